"""Rounds on a device that is only said to exist: which of them draft under an automatic budget."""

from collections import deque
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from draftree.core import DraftTree, Request, SamplingParams, TokenSource
from draftree.decode.controller import DEVICE_SCHEDULE, SpeculationController
from draftree.decode.decoder import DeviceRecord, Round
from draftree.decode.device_decoder import DeviceDecoder
from draftree.decode.device_tree import DeviceTreeDecoder

PLAIN_MS = 5.0
REQUEST = Request(prompt_ids=(1,), max_tokens=1, sampling=SamplingParams())


class Rounds:
    """Plain rounds of one token, and drafted ones of `length` tokens that take `ms`."""

    def __init__(self, length: int, ms: float) -> None:
        self.length, self.ms = length, ms
        self.kinds: list[bool] = []  # of the rounds that were launched
        self._under_way: deque[bool] = deque()

    @staticmethod
    def can_serve(request: Request) -> bool:
        return True

    def begin(self, *args: Any) -> None:
        assert not self._under_way

    def begin_segment(self, *args: Any, **options: Any) -> None:
        assert not self._under_way

    sizes = (24,)

    def launch(self, size: int, *limits: int) -> None:
        assert size in (1, *self.sizes)
        self.kinds.append(size > 1)
        self._under_way.append(size > 1)

    def read(self) -> DeviceRecord:
        count, ms = (self.length, self.ms) if self._under_way.popleft() else (1, PLAIN_MS)
        nodes = tuple(range(count))
        tree = DraftTree(nodes, tuple(range(-1, count - 1)), nodes, (TokenSource.CHAIN,) * count)
        return DeviceRecord(Round(tree, nodes, 7), False, ms)


class Counting(Rounds):
    """Tokens are numbered by their positions, and rounds begin where they are told to."""

    def __init__(self, length: int, ms: float) -> None:
        super().__init__(length, ms)
        self.begun: list[tuple[int, int]] = []

    def begin(self, *args: Any) -> None:
        super().begin(*args)
        self._anchor = args[1]

    def begin_segment(self, *args: Any, **options: Any) -> None:
        super().begin_segment(*args, **options)
        max_tokens, committed = args
        assert self._anchor == committed
        self.begun.append((max_tokens, committed))
        self._position = committed

    def read(self) -> DeviceRecord:
        record = super().read()
        start, self._position = self._position, self._position + self.length
        tree = replace(record.round.tree, tokens=tuple(range(start, self._position)))
        return replace(record, round=replace(record.round, tree=tree, bonus=self._position))


class Looking(Rounds):
    """Trees whose first nodes are looked up, of which so many are right."""

    def __init__(self, num_right: int) -> None:
        super().__init__(1, PLAIN_MS / 4)
        self.num_right, self.limits = num_right, [10]

    def launch(self, size: int, *limits: int) -> None:
        super().launch(size)
        self.limits += limits

    def read(self) -> DeviceRecord:
        if not self._under_way.popleft():
            return DeviceRecord(Round(DraftTree.chain([5]), (0,), 7), False, PLAIN_MS)
        count = self.limits[-1]
        tree = DraftTree.chain([5] * 16)
        sources = *(TokenSource.NGRAM,) * (count + 1), *(TokenSource.CHAIN,) * (15 - count)
        path = tuple(range(min(count, self.num_right) + 1))
        found = Round(replace(tree, sources=sources), path, 7)
        return DeviceRecord(found, False, self.ms)


class Trees(Rounds):
    """The same where the host builds the trees."""

    def __init__(self, length: int, ms: float) -> None:
        super().__init__(length, ms)
        self._has_draft = False

    def propose(self) -> None:
        self._has_draft = True

    def read_proposal(self) -> tuple[list[int], list[int]]:
        return [5, 6], [-1, 0]

    def verify(self, tree: DraftTree) -> None:
        assert tree.num_nodes <= 9

    def accept(self) -> None:
        super().launch(24 if self._has_draft else 1)
        self._has_draft = False


class State:
    def __init__(self, committed: int) -> None:
        self.committed = committed

    def record(self, tokens: list[int]) -> None:
        self.committed += len(tokens)


def new_controller() -> SpeculationController:
    return SpeculationController(DEVICE_SCHEDULE)


def write(
    rounds: Rounds, controller: SpeculationController | None, count: int, *, committed: int = 100
) -> list[bool]:
    """Which rounds drafted, of a request of so many tokens."""
    target = cast("Any", SimpleNamespace(state=State(committed)))
    decoder = DeviceDecoder(*(target, None, rounds, REQUEST), use_draft=True, controller=controller)
    decoder.start(1)
    first, num_tokens = len(rounds.kinds), 0
    while num_tokens < count:
        emitted = decoder.step(count - num_tokens)
        assert emitted[-1].source in (TokenSource.BONUS, TokenSource.PLAIN)
        num_tokens += len(emitted)
    decoder.finish()
    return rounds.kinds[first:]


@pytest.mark.parametrize(("num_right", "limit"), [(0, 2), (3, 4), (10, 10)])
def test_looked_up_text_gets_the_nodes_that_it_earns(num_right: int, limit: int) -> None:
    rounds = Looking(num_right)
    target = cast("Any", SimpleNamespace(state=State(100)))
    target.state.tokens = ()
    options = {"use_draft": True, "use_lookup": True, "controller": new_controller()}
    decoder = DeviceDecoder(*(target, None, rounds, REQUEST), **options)
    decoder.start(1)
    for _ in range(100):
        decoder.step(1000)
    assert max(rounds.limits[-20:]) <= limit and max(rounds.limits) == 10
    assert min(rounds.limits[-20:]) >= limit - 1


@pytest.mark.parametrize(("ms", "is_worth_it"), [(2.0, True), (50.0, False)])
def test_trees_of_the_host_are_drafted_as_long_as_it_pays(ms: float, is_worth_it: bool) -> None:
    rounds, state = Trees(3, ms * PLAIN_MS), State(100)
    target = cast("Any", SimpleNamespace(state=state))
    state.tokens, state.max_ctx = (), 10_000
    decoder = DeviceTreeDecoder(
        *(target, None, rounds, REQUEST),
        budget=8,
        use_draft=True,
        use_index=True,
        controllers=(new_controller(), new_controller()),
    )
    decoder.start(1)
    for _ in range(200):
        decoder.step(1000)
    share = sum(rounds.kinds[-100:]) / 100
    assert share > 0.9 if is_worth_it else share < 0.3


def test_a_fixed_budget_drafts_every_round() -> None:
    assert all(write(Rounds(1, 50.0), None, 100))


@pytest.mark.parametrize("interval", [1, 3])
def test_a_pause_waits_for_rounds_and_loses_none(interval: int) -> None:
    """Then the device is free, and rounds begin again where they were."""
    rounds = Counting(4, 8.0)
    target = cast("Any", SimpleNamespace(state=State(100)))
    decoder = DeviceDecoder(*(target, None, rounds, REQUEST), use_draft=True)
    decoder.start(100)
    tokens: list[int] = []
    for number in range(20):
        tokens += [one.token for one in decoder.step(400 - len(tokens))]
        assert len(tokens) == 4 * decoder.stats.num_rounds
        if number % interval == 0:
            decoder.pause()
            assert not rounds._under_way
    decoder.finish()
    assert tokens == [*range(101, 181)]
    assert len(rounds.begun) == (10 if interval == 1 else 7)
    assert {sum(place) for place in rounds.begun} == {500}


def test_only_the_first_request_needs_plain_rounds_to_compare_with() -> None:
    rounds, controller = Rounds(4, 8.0), new_controller()
    first = write(rounds, controller, 200)
    assert 2 <= first.count(False) <= 5 and controller.cost.plain_ms == PLAIN_MS
    for _ in range(3):
        assert all(write(rounds, controller, 200))


def test_plain_rounds_are_timed_again_after_a_while_and_where_contexts_differ() -> None:
    rounds, controller = Rounds(4, 8.0), new_controller()
    kinds = write(rounds, controller, 4000)
    assert 4 <= kinds.count(False) <= 10 and not all(kinds[-600:])
    assert not all(write(rounds, controller, 100, committed=60_000))
    assert all(write(rounds, controller, 100, committed=60_000))
    assert not all(write(rounds, controller, 100))


def test_a_draft_that_does_not_pay_is_tried_more_and_more_rarely() -> None:
    rounds, controller = Rounds(1, 8.0), new_controller()
    kinds = write(rounds, controller, 600)
    assert sum(kinds[:100]) < 40 and sum(kinds[300:]) < 20
    assert sum(write(rounds, controller, 300)) < 40


def test_a_draft_that_becomes_good_is_used_again() -> None:
    rounds, controller = Rounds(1, 8.0), new_controller()
    write(rounds, controller, 100)
    rounds.length = 4
    kinds = write(rounds, controller, 1000)
    assert all(kinds[-100:])


def test_a_pause_of_the_device_is_no_news() -> None:
    controller = new_controller()
    for ms in (5.0, 5.0, 500.0, 5.0):
        controller.observe_plain(ms, ms, 100)
    assert 4.9 < controller.cost.plain_ms < 5.6
