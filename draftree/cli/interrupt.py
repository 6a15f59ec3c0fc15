"""Ctrl-C that stops a reply between two tokens, so that the engine is never left half way.

The first Ctrl-C is noted and honoured at the next token, or chunk of the prompt; the second one
interrupts at once.
"""

import signal
from collections.abc import Callable, Generator, Iterator
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING

from draftree.cli.prompt_bar import PromptBar

if TYPE_CHECKING:
    from draftree.chat import Delta, Generation


class Interrupt:
    """Whether Ctrl-C was pressed since `watch_interrupt` began."""

    def __init__(self, on_first: Callable[[], None]) -> None:
        self.is_set = False
        self._on_first = on_first

    def note(self, *_: object) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True
        self._on_first()


@contextmanager
def watch_interrupt(
    on_first: Callable[[], None] = lambda: None,
) -> Generator[Interrupt, None, None]:
    """on_first: called with the first Ctrl-C."""
    interrupt = Interrupt(on_first)
    try:
        previous = signal.signal(signal.SIGINT, interrupt.note)
    except ValueError:  # not the main thread: there Ctrl-C never arrives
        yield interrupt
        return
    try:
        yield interrupt
    finally:
        signal.signal(signal.SIGINT, previous)


def consume(generation: "Generation", write: Callable[["Delta"], None]) -> bool:
    """Write every delta of a reply; True when Ctrl-C ended it. The reply is closed in any case."""
    bar = PromptBar(generation)
    try:
        with watch_interrupt(generation.cancel) as interrupt:
            deltas: Iterator[Delta] = iter(generation)
            for delta in deltas:
                bar.end()
                write(delta)
                if interrupt.is_set:
                    break
            return interrupt.is_set
    finally:
        bar.end()
        with suppress(BrokenPipeError):
            generation.close()
