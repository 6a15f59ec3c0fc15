"""Shortened prompts at the positions that their tokens have in the whole prompt.

In: token ids of both, and where the text was cut. Out: a position for each token. An engine's keys
lie in the order that they were read, so that fresh positions are all it knows; here its table of
rotary angles is exchanged for as long as a reply takes.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from draftree.chat import Engine
from draftree.layers.attention import Attention
from draftree.text.tokenizer import Tokenizer


def find_positions(
    tokenizer: Tokenizer, whole: Sequence[int], shorter: Sequence[int], cut: "Cut"
) -> np.ndarray:
    """Of the shorter prompt's tokens, int64, rising."""
    starts, raw = _spell(tokenizer, whole)
    short_starts, short_raw = _spell(tokenizer, shorter)
    points = cut.map_bytes(raw, short_raw)
    mapped = np.interp(short_starts, points[:, 0], points[:, 1])
    found = np.searchsorted(starts, np.floor(mapped), side="right") - 1
    steps = np.arange(len(found))
    return np.maximum.accumulate(found - steps) + steps


def _spell(tokenizer: Tokenizer, ids: Sequence[int]) -> tuple[np.ndarray, bytes]:
    """The byte that each token begins at, and all of them."""
    pieces = [tokenizer.token_bytes(token) for token in ids]
    ends = np.cumsum([len(piece) for piece in pieces])
    return np.concatenate(([0], ends[:-1])), b"".join(pieces)


class Cut:
    """How a text was shortened: what was left out, and what came of it."""

    def __init__(self, text: str) -> None:
        self.text, self.shorter = text, text
        self._gaps: list[tuple[int, int]] = []

    def count(self, start: int, end: int) -> int:
        """For `cut_text`, which asks for each gap in turn."""
        self._gaps.append((start, end))
        return end - start

    def map_bytes(self, raw: bytes, short_raw: bytes) -> np.ndarray:
        """Points (shorter, whole) between which the bytes of both prompts run in step; a mark is
        spread over its gap.
        """
        text, shorter = self.text.encode(), self.shorter.encode()
        whole_at, short_at = raw.index(text), short_raw.index(shorter)
        points, at = [(0, 0), (short_at, whole_at)], short_at
        ends = [0, *(end for _, end in self._gaps)]
        starts = [*(start for start, _ in self._gaps), len(self.text)]
        for start, end in zip(ends, starts, strict=True):
            if start == end:  # a gap at the end of the text
                continue
            piece, before = self.text[start:end].encode(), len(self.text[:start].encode())
            at = short_raw.index(piece, at)
            points.append((at, whole_at + before))
            at += len(piece)
            points.append((at, whole_at + before + len(piece)))
        points.append((short_at + len(shorter), whole_at + len(text)))
        return np.array([*points, (len(short_raw), len(raw))], np.float64)


@contextmanager
def placed(engine: Engine, positions: Sequence[int] | np.ndarray) -> Iterator[None]:
    """The next prompt stands at these positions, and its reply behind the last of them."""
    mixers = [block.mixer for block in engine.tokens.target.model.blocks]
    tables = {id(m.rope.table): m.rope.table for m in mixers if isinstance(m, Attention)}
    saved = {key: _copy(table) for key, table in tables.items()}
    try:
        for key, table in tables.items():
            rest = np.arange(1, len(table) - len(positions) + 1) + positions[-1]
            rows = np.minimum(np.concatenate((positions, rest)), len(table) - 1)
            _write(table, saved[key], rows)
        yield
    finally:
        for key, table in tables.items():
            _write(table, saved[key], np.arange(len(table)))


def _copy(table: Any) -> Any:
    return table.copy() if isinstance(table, np.ndarray) else table.clone()


def _write(table: Any, source: Any, rows: np.ndarray) -> None:
    """These rows of the source, between passes: a GPU's may still be running."""
    if isinstance(table, np.ndarray):
        table[:] = source[rows]
        return
    import torch

    wait = torch.cuda.synchronize if table.is_cuda else lambda: None
    wait()
    table.copy_(source[torch.as_tensor(rows, device=table.device)])
    wait()
