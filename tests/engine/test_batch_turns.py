"""Who has how much of an engine whose passes requests share: on a clock that passes and chunks
move, with the turns of a server.
"""

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest

from draftree.core import Request
from draftree.engine.batch_gain import BatchGain
from draftree.engine.stream import PAUSE
from draftree.serve.queue import Job
from draftree.serve.turns import Turns
from tests.engine.turns import Reply, make_prompt, open_engine
from tests.serve.test_turns import Clock

_LONG = 480  # tokens of a reply after which the client asks for another one


class House:
    """Clients of one engine. seconds: of a round of one, of a shared pass by its rows, of a chunk
    of a prompt (64 tokens).
    """

    def __init__(
        self,
        monkeypatch: pytest.MonkeyPatch,
        alone_s: float,
        shared_s: Callable[[int], float],
        chunk_s: float = 0.3,
        **options: Any,
    ) -> None:
        self.clock, self.first_s = Clock(), alone_s
        fake = SimpleNamespace(perf_counter=self.clock)
        for name in ("batch", "live"):
            monkeypatch.setattr(f"draftree.engine.{name}.time", fake)
        usual: dict[str, Any] = {"max_ctx": 512, "budget": 0, "chunk": 64, "parallel": 16}
        self.engine = open_engine("dense", **{**usual, "batching": "auto", **options})
        self.turns, self._until_s = Turns(clock=self.clock), 0.0
        self._later: list[tuple[float, dict[str, int]]] = []
        self.begun: list[tuple[float, float]] = []  # of those: when they came, and were let in
        self.replies: list[Reply] = []
        self._by_job: dict[Job, Reply | float] = {}
        batch, target = self.engine._use.batch, self.engine.target
        own, others = target.forward, batch._target.forward if batch is not None else None

        def alone(rows: Any = None) -> Any:
            is_round = rows is not None and len(rows) > 0
            self.clock.now_s += self.first_s if is_round else chunk_s
            self.first_s = alone_s if is_round else self.first_s
            return own(rows)

        def shared(anchors: Any) -> Any:
            self.clock.now_s += shared_s(len(anchors))
            return others(anchors)  # type: ignore[misc]

        monkeypatch.setattr(target, "forward", alone)
        if batch is not None:
            batch.gain = BatchGain(self.clock)
            monkeypatch.setattr(batch._target, "forward", shared)
        self.batch = batch

    def ask(self, prompt_len: int = 8, max_tokens: int = _LONG) -> Reply:
        request = Request(make_prompt(prompt_len, len(self.replies)), max_tokens)
        reply = Reply.start(self.engine, request)
        reply.stream.should_pause = self._should_pause
        self.replies.append(reply)
        self._add(reply)
        return reply

    def ask_later(self, seconds: float, **options: int) -> None:
        """When somebody may be in the middle of a turn."""
        self._later.append((self.clock.now_s + seconds, options))

    def occupy(self, seconds: float) -> None:
        """Turns of something that is no reply, one after the other."""
        self._add(seconds)

    def run(self, until_s: float) -> None:
        self._until_s = until_s
        while self.clock.now_s < until_s:
            while self._is_somebody_here:
                due_s, options = self._later.pop(0)
                self.begun.append((due_s, self.clock.now_s))
                self.ask(**options)
            now, job = self.clock.now_s, self.turns.begin()
            what = self._by_job[job]
            if isinstance(what, Reply):
                is_finished = not what.advance()
            else:
                with self.engine._lock.hold():
                    self.clock.now_s += what
                is_finished = False
            self.turns.end(is_finished=is_finished)
            self.clock.now_s = max(self.clock.now_s, now + 0.0002)
            if is_finished and isinstance(what, Reply) and len(what.events) == _LONG:
                self.ask()

    @property
    def _is_somebody_here(self) -> bool:
        return bool(self._later) and self._later[0][0] <= self.clock.now_s

    def _should_pause(self) -> bool:
        if self.clock.now_s >= self._until_s:
            return True
        turns = self.turns
        if not turns.is_over(0.0, is_awaited=True):
            return False
        is_awaited = turns.has_fresh or self._is_somebody_here
        return is_awaited or (turns.has_others and turns.is_over(0.0))

    def measure(self, seconds: float) -> float:
        """Tokens a second in all."""
        before, start_s = self.num_tokens, self.clock.now_s
        self.run(start_s + seconds)
        return (self.num_tokens - before) / (self.clock.now_s - start_s)

    @property
    def num_tokens(self) -> int:
        return sum(len(reply.events) for reply in self.replies)

    @property
    def num_batched(self) -> int:
        return sum(reply.stream.usage.rounds.num_batched for reply in self.replies)

    def _add(self, what: Reply | float) -> None:
        job = Job(str(len(self._by_job)), lambda engine: None, None)
        self._by_job[job] = what
        self.turns.add(job)


def _shared_s(num_rows: int) -> float:
    return 0.018 + 0.001 * num_rows


@pytest.mark.parametrize("pause_s", [0.25, 1.0, 5.0])
def test_an_interruption_does_not_end_sharing(
    monkeypatch: pytest.MonkeyPatch, pause_s: float
) -> None:
    house = House(monkeypatch, 0.02, _shared_s)
    house.ask()
    house.run(2.0)
    house.ask()
    house.run(5.0)
    before = house.measure(5.0)
    assert before > 1.5 / 0.02
    with house.engine._lock.hold():
        house.clock.now_s += pause_s
    house.run(house.clock.now_s + 1.0)
    assert house.measure(10.0) > 0.9 * before
    house.clock.now_s += pause_s  # and one of the machine, which nobody announces
    house.run(house.clock.now_s + 1.0)
    assert house.measure(10.0) > 0.9 * before


def test_a_long_prompt_does_not_end_sharing(monkeypatch: pytest.MonkeyPatch) -> None:
    house = House(monkeypatch, 0.02, _shared_s, chunk_s=1.5)
    house.ask()
    house.run(2.0)
    house.ask()
    for number in range(8):  # at any moment of a turn
        house.ask_later(3.0 + 5.007 * number, prompt_len=320, max_tokens=20)
    house.run(65.0)
    before = house.num_tokens, house.num_batched
    house.run(75.0)
    assert house.num_batched - before[1] > 0.8 * (house.num_tokens - before[0]) > 200


def test_rows_for_some_are_no_loss_to_them(monkeypatch: pytest.MonkeyPatch) -> None:
    """Who has a row writes about as much as who takes turns, or more."""
    house = House(monkeypatch, 0.016, _shared_s, batching="always")
    assert house.batch is not None
    house.batch._size = 4
    for _ in range(8):
        house.ask()
    house.run(15.0)
    joined = [r for r in house.replies[:8] if r.stream.usage.rounds.num_batched > 20]
    others = [r for r in house.replies[:8] if r not in joined]
    assert len(joined) >= 4 and others
    assert min(len(r.events) for r in joined) > 0.8 * max(len(r.events) for r in others)


def test_writers_keep_their_share_beside_other_uses(monkeypatch: pytest.MonkeyPatch) -> None:
    counts = {}
    for batching in ("off", "always"):
        house = House(monkeypatch, 0.016, _shared_s, batching=batching)
        house.ask()
        house.ask()
        house.occupy(0.25)
        house.run(10.0)
        counts[batching] = house.num_tokens
    assert counts["always"] > 0.9 * counts["off"]


def test_a_cold_start_does_not_decide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rounds alone are faster here; the first one takes long, and a second request comes then."""
    house = House(monkeypatch, 0.008, lambda num_rows: 0.022 + 0.001 * num_rows)
    house.first_s = 0.5
    house.ask_later(1.0)
    house.ask()
    house.run(2.0)
    assert house.measure(10.0) > 0.85 / 0.008


def test_a_newcomer_waits_for_no_slice(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also while another one reads a long prompt, and those in the batch have whole slices."""
    house = House(monkeypatch, 0.016, _shared_s, chunk_s=0.0125, chunk=8, batching="always")
    house.ask()
    house.ask()
    house.run(1.0)
    house.ask(prompt_len=500, max_tokens=2)
    for number in range(8):
        house.ask_later(0.1 + 0.11 * number, prompt_len=4, max_tokens=1)
    house.run(3.0)
    waits = [begun_s - due_s for due_s, begun_s in house.begun]
    assert len(waits) == 8 and max(waits) < 0.1


def test_what_comes_from_shared_passes_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """All of the time, and no round of tokens that nobody was told."""
    house = House(monkeypatch, 0.016, lambda num_rows: 0.004, batching="always")
    first, second, third = house.ask(), house.ask(), house.ask(max_tokens=60)
    house.run(1.1)
    while next(second.stream) is PAUSE:
        pass
    second.stream.close()  # among tokens of one turn, as after a stop string
    while third.stream.finish_reason is None:
        house.run(house.clock.now_s + 0.01)
    first.stream.close()
    for reply in house.replies:
        usage = reply.stream.usage
        assert usage.rounds.num_batched > 20
        assert usage.completion_tokens == usage.rounds.num_rounds
    usage = third.stream.usage
    assert usage.decode_ms / usage.completion_tokens == pytest.approx(4.0, rel=0.1)
    assert usage.rounds.verify_ms == pytest.approx(usage.decode_ms, rel=0.2)
