"""How much of a long prompt has been read, as a bar on stderr, where that is a terminal."""

import sys
import time
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from rich.progress import Progress, TaskID

    from draftree.chat import Generation

_MOMENT_S: Final = 1.0  # before there is a bar


class PromptBar:
    """Comes once reading takes longer than a moment, and goes when the reply begins."""

    def __init__(self, generation: "Generation") -> None:
        self._generation = generation
        self._start_s = time.monotonic()
        self._shown: tuple[Progress, TaskID] | None = None
        if sys.stderr.isatty():
            generation.watch_prompt(self._show)

    def end(self) -> None:
        if self._shown is not None:
            self._shown[0].stop()
            self._shown = None

    def _show(self) -> None:
        usage = self._generation.usage
        is_read = usage.read_tokens >= usage.prompt_tokens - 1
        if self._shown is None and not is_read and time.monotonic() - self._start_s > _MOMENT_S:
            self._shown = _start_bar(usage.prompt_tokens)
        if self._shown is not None:
            progress, task = self._shown
            progress.update(task, completed=usage.read_tokens)


def _start_bar(num_tokens: int) -> "tuple[Progress, TaskID]":
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

    columns = TextColumn("reading the prompt"), BarColumn(), MofNCompleteColumn()
    progress = Progress(*columns, console=Console(stderr=True), transient=True)
    progress.start()
    return progress, progress.add_task("", total=num_tokens)
