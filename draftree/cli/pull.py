"""`draftree pull`: download a model by name. The path goes to stdout, progress to stderr."""

import sys
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Callable
    from pathlib import Path

    from draftree.weights.source import Progress


def pull(
    name: Annotated[
        str,
        typer.Argument(
            metavar="NAME",
            help="A model's name (see `draftree models`), or a hub file as org/repo/file.gguf.",
        ),
    ],
    is_quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Do not print the path of the model.")
    ] = False,
    with_draft: Annotated[
        bool, typer.Option("--draft/--no-draft", help="Download the model's usual draft as well.")
    ] = True,
) -> None:
    """Download a model and its draft, unless they are here already."""
    from draftree.weights import hub

    path = _fetch(name)
    draft = hub.usual_draft(name) if with_draft else None
    if draft is not None:
        _fetch(draft)
    if not is_quiet:
        print(path)


def _fetch(name: str) -> "Path":
    from draftree.errors import FetchError
    from draftree.weights import hub

    try:
        return hub.resolve(name)
    except FetchError:
        return _download(name)


def _download(name: str) -> "Path":
    """Fetch with a progress bar on a terminal, with one line for each stage elsewhere."""
    from draftree.weights import hub

    if not sys.stderr.isatty():
        return hub.pull(name, _say_stages())
    from rich import progress as bars
    from rich.console import Console

    columns = (
        bars.TextColumn("{task.description}"),
        bars.BarColumn(),
        bars.DownloadColumn(binary_units=True),
        bars.TransferSpeedColumn(),
        bars.TimeRemainingColumn(),
    )
    with bars.Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        tasks: dict[str, bars.TaskID] = {}

        def report(state: "Progress") -> None:
            label = f"{state.stage} {state.file}"
            if label not in tasks:
                tasks[label] = bar.add_task(label, total=state.total_bytes)
            bar.update(tasks[label], completed=state.num_bytes, total=state.total_bytes)

        return hub.pull(name, report)


def _say_stages() -> "Callable[[Progress], None]":
    said: set[str] = set()

    def report(state: "Progress") -> None:
        line = f"{state.stage} {state.file}"
        if line not in said:
            said.add(line)
            print(line, file=sys.stderr)

    return report
