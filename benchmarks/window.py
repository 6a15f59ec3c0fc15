"""More text that every machine with Python has: standard library sources beside the language
reference. Out: windows of token ids, prose and code in turn.
"""

from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Final

from draftree.bench.window import Encode, read_prose
from draftree.errors import BenchError

_MODULES: Final = (
    *("heapq", "textwrap", "difflib", "statistics", "argparse", "bisect", "calendar"),
    *("configparser", "contextlib", "csv", "dataclasses", "fractions", "functools"),
    *("gettext", "inspect", "ipaddress"),
)
_PIECE_CHARACTERS: Final = 20_000


def make_windows(encode: Encode, num_windows: int, window_len: int) -> list[list[int]]:
    """Prose and code in turn, each going on where its last window ended."""
    streams = [_windows(encode, pieces, window_len) for pieces in (read_prose(), _code())]
    windows = []
    for index in range(num_windows):
        window = next(streams[index % 2], None)
        if window is None:
            raise BenchError(
                f"The standard library has no more than {index} windows of {window_len} tokens; "
                "ask for fewer tokens."
            )
        windows.append(window)
    return windows


def _windows(encode: Encode, pieces: Iterator[str], window_len: int) -> Iterator[list[int]]:
    pending: list[int] = []
    for piece in pieces:
        pending += encode(piece)
        while len(pending) >= window_len:
            yield pending[:window_len]
            pending = pending[window_len:]


def _code() -> Iterator[str]:
    for name in _MODULES:
        spec = find_spec(name)
        if spec is None or spec.origin is None:
            raise BenchError(f"This Python has no source of its module {name}.")
        text = Path(spec.origin).read_text(encoding="utf-8")
        for start in range(0, len(text), _PIECE_CHARACTERS):
            yield text[start : start + _PIECE_CHARACTERS]
