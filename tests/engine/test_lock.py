"""What cannot be answered raises at once: a closed engine, a second reply in the same thread."""

import threading
from collections.abc import Callable

import pytest

from draftree.config import EngineConfig
from draftree.core import Request
from draftree.engine.engine import TokenEngine
from draftree.errors import EngineError
from tests.tiny import tiny_path

PROMPT = tuple(range(1, 30))
PATIENCE_S = 600.0  # after which something hangs


def _open(num_threads: int = 2) -> TokenEngine:
    config = EngineConfig(device="cpu", threads=num_threads, max_ctx=200, math="exact", budget=4)
    return TokenEngine.open(tiny_path("llama"), config)


def _raised(work: Callable[[], object]) -> BaseException | None:
    """What a function raised, which a thread of its own runs: it may hang."""
    raised: list[BaseException | None] = []

    def run() -> None:
        try:
            work()
        except BaseException as error:
            raised.append(error)
        else:
            raised.append(None)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(PATIENCE_S)
    assert raised, "it hangs"
    return raised[0]


def _read(engine: TokenEngine, prompt: tuple[int, ...] = PROMPT) -> list[int]:
    return [event.token for event in engine.generate(Request(prompt, 20))]


@pytest.mark.parametrize("num_threads", [1, 2])
def test_a_closed_engine_raises(num_threads: int) -> None:
    engine = _open(num_threads)
    _read(engine)
    engine.close()
    engine.close()
    for use in (lambda: _read(engine), engine.offload, engine.reset):
        error = _raised(use)
        assert isinstance(error, EngineError) and "closed" in str(error)


def test_a_reply_that_is_read_on_after_close_raises() -> None:
    engine = _open()
    stream = engine.generate(Request(PROMPT, 50))
    next(stream)
    engine.close()
    assert isinstance(_raised(lambda: list(stream)), EngineError)


def test_closing_while_another_thread_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Between the check and the pass: the threads refuse, and the error is the same."""
    engine = _open()
    forward = engine.target.forward

    def close_and_forward(rows: range) -> object:
        engine.close()
        return forward(rows)

    monkeypatch.setattr(engine.target, "forward", close_and_forward)
    assert isinstance(_raised(lambda: _read(engine)), EngineError)


def test_a_second_reply_in_the_same_thread_raises() -> None:
    engine = _open()
    expected = _read(engine)
    errors: list[str] = []

    def work() -> None:
        first = engine.generate(Request(PROMPT, 20))
        tokens = [next(first).token]
        second = engine.generate(Request(PROMPT[:9], 20))
        for use in (lambda: next(second), engine.reset):
            with pytest.raises(EngineError, match="unfinished in this thread") as caught:
                use()
            errors.append(str(caught.value))
        tokens += [event.token for event in first]
        assert tokens == expected
        assert _read(engine, PROMPT[:9])

    assert _raised(work) is None and len(errors) == 2
    engine.close()


def test_a_reply_may_be_read_on_in_another_thread() -> None:
    """Then that one must not open a second one either, and the first one's thread waits."""
    engine = _open()
    expected = _read(engine)
    stream = engine.generate(Request(PROMPT, 20))
    tokens = [next(stream).token]
    errors: list[BaseException | None] = []

    def work() -> None:
        tokens.extend(next(stream).token for _ in range(9))
        try:
            next(engine.generate(Request(PROMPT, 2)))
        except EngineError as error:
            errors.append(error)
        tokens.extend(event.token for event in stream)

    assert _raised(work) is None
    assert tokens == expected and len(errors) == 1
    engine.close()


def test_those_who_wait_when_it_closes_are_told() -> None:
    engine = _open()
    stream = engine.generate(Request(PROMPT, 50))
    next(stream)
    errors: list[BaseException | None] = []
    waiting = threading.Thread(target=lambda: errors.append(_raised(lambda: _read(engine))))
    waiting.start()
    engine.close()
    stream.close()
    waiting.join(PATIENCE_S)
    assert len(errors) == 1 and isinstance(errors[0], EngineError)
