"""Ctrl-C that stops a reply between two tokens, so that the engine is never left half way.

The first Ctrl-C is noted and honoured at the next token; the second one interrupts at once.
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

    def __init__(self) -> None:
        self.is_set = False

    def note(self, *_: object) -> None:
        if self.is_set:
            raise KeyboardInterrupt
        self.is_set = True


@contextmanager
def watch_interrupt() -> Generator[Interrupt, None, None]:
    interrupt = Interrupt()
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
        with watch_interrupt() as interrupt:
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
