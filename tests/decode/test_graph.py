"""Rounds on a device that is only said to exist: which of them draft under an automatic budget."""

from collections import deque
from types import SimpleNamespace
from typing import Any, cast

from draftree.core import DraftTree, Request, SamplingParams, TokenSource
from draftree.decode.graph import DeviceRecord, GraphDecoder, Pace
from draftree.decode.speculative import Round

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

    def launch(self, *, use_draft: bool) -> None:
        self.kinds.append(use_draft)
        self._under_way.append(use_draft)

    def read(self) -> DeviceRecord:
        count, ms = (self.length, self.ms) if self._under_way.popleft() else (1, PLAIN_MS)
        nodes = tuple(range(count))
        tree = DraftTree(nodes, tuple(range(-1, count - 1)), nodes, (TokenSource.CHAIN,) * count)
        return DeviceRecord(Round(tree, nodes, 7), False, ms)


class State:
    def __init__(self, committed: int) -> None:
        self.committed = committed

    def note(self, tokens: list[int]) -> None:
        self.committed += len(tokens)


def write(
    rounds: Rounds, pace: Pace | None, count: int, *, committed: int = 100, is_auto: bool = True
) -> list[bool]:
    """Which rounds drafted, of a request of so many tokens."""
    target = cast("Any", SimpleNamespace(state=State(committed)))
    decoder = GraphDecoder(
        *(target, None, rounds, REQUEST), use_draft=True, is_auto=is_auto, pace=pace
    )
    decoder.start(1)
    first, num_tokens = len(rounds.kinds), 0
    while num_tokens < count:
        emitted = decoder.step(count - num_tokens)
        assert emitted[-1].source in (TokenSource.BONUS, TokenSource.PLAIN)
        num_tokens += len(emitted)
    decoder.finish()
    return rounds.kinds[first:]


def test_a_fixed_budget_drafts_every_round() -> None:
    assert all(write(Rounds(1, 50.0), Pace(), 100, is_auto=False))


def test_only_the_first_request_needs_plain_rounds_to_compare_with() -> None:
    rounds, pace = Rounds(4, 8.0), Pace()
    first = write(rounds, pace, 200)
    assert 2 <= first.count(False) <= 5 and pace.ms == PLAIN_MS
    for _ in range(3):
        assert all(write(rounds, pace, 200))


def test_plain_rounds_are_timed_again_after_a_while_and_where_contexts_differ() -> None:
    rounds, pace = Rounds(4, 8.0), Pace()
    kinds = write(rounds, pace, 4000)
    assert 4 <= kinds.count(False) <= 10 and not all(kinds[-600:])
    assert not all(write(rounds, pace, 100, committed=60_000))
    assert all(write(rounds, pace, 100, committed=60_000))
    assert not all(write(rounds, pace, 100))


def test_a_draft_that_does_not_pay_is_tried_more_and_more_rarely() -> None:
    rounds, pace = Rounds(1, 8.0), Pace()
    kinds = write(rounds, pace, 600)
    assert sum(kinds[:100]) < 40 and sum(kinds[300:]) < 20
    assert sum(write(rounds, pace, 300)) < 40


def test_a_draft_that_becomes_good_is_used_again() -> None:
    rounds, pace = Rounds(1, 8.0), Pace()
    write(rounds, pace, 100)
    rounds.length = 4
    kinds = write(rounds, pace, 1000)
    assert all(kinds[-100:])


def test_a_pause_of_the_device_is_no_news() -> None:
    pace = Pace()
    for ms in (5.0, 5.0, 500.0, 5.0):
        pace.observe(ms, 100)
    assert 4.9 < pace.ms < 5.6
