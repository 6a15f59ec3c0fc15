"""How many lines the package has, by folder: Python and CUDA, which count together."""

import io
import subprocess
import tarfile
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Final

from benchmarks.markdown import table
from draftree.errors import BenchError

PACKAGE: Final = "draftree"
_SUFFIXES: Final = (".py", ".cu")

Counts = dict[tuple[str, str], int]  # by folder and suffix


def count_lines(root: Path) -> Counts:
    """Of the files below root/draftree."""
    files = sorted((root / PACKAGE).rglob("*"))
    return _count(
        (file.relative_to(root).as_posix(), file.read_bytes())
        for file in files
        if file.suffix in _SUFFIXES
    )


def count_lines_at(root: Path, commit: str) -> Counts:
    """The same of a commit of the repository at root."""
    command = ["git", "-C", str(root), "archive", commit, PACKAGE]
    result = subprocess.run(command, capture_output=True)
    if result.returncode != 0:
        raise BenchError(f"git has no {PACKAGE}/ at {commit}.")
    with tarfile.open(fileobj=io.BytesIO(result.stdout)) as archive:
        opened = ((member.name, archive.extractfile(member)) for member in archive)
        return _count((name, file.read()) for name, file in opened if file is not None)


def _count(files: Iterable[tuple[str, bytes]]) -> Counts:
    counts: Counts = {}
    for name, data in files:
        path = PurePosixPath(name)
        if path.suffix in _SUFFIXES:
            folder = path.parts[1] if len(path.parts) > 2 else "."
            counts[folder, path.suffix] = counts.get((folder, path.suffix), 0) + len(
                data.splitlines()
            )
    return counts


def make_table(now: Counts, before: Counts | None = None) -> list[str]:
    """A row for each folder, and one for all; before: to compare with."""
    columns = [(name, counts) for name, counts in (("before", before), ("now", now)) if counts]
    head = ["folder", *(f"{name}, {kind[1:]}" for name, _ in columns for kind in _SUFFIXES), "all"]
    folders = sorted({folder for _, counts in columns for folder, _ in counts})

    def row(title: str, members: list[str]) -> list[str]:
        def total(counts: Counts, kinds: Iterable[str]) -> int:
            return sum(counts.get((folder, kind), 0) for folder in members for kind in kinds)

        cells = [f"{total(counts, [kind]):,}" for _, counts in columns for kind in _SUFFIXES]
        return [title, *cells, f"{total(now, _SUFFIXES):,}"]

    return table(head, [*(row(folder, [folder]) for folder in folders), row("all", folders)])
