"""Keys and values of a run of positions, copied to host memory and back.

Attention layers only append: what they hold of a position stays until the sequence goes back behind
it. So spans that follow each other make up a whole, and what a sequence still holds need not be
copied back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftree.kernels.ops import LayerStore, Ops

Parts = tuple[tuple[np.ndarray, ...], ...]  # arrays of each layer


def count_bytes(parts: Parts) -> int:
    return sum(array.nbytes for arrays in parts for array in arrays)


@dataclass(frozen=True, slots=True)
class Span:
    """A copy of positions start … end-1; parts may hold more, of a text that has forked at end."""

    start: int
    end: int
    parts: Parts


class KvLayers:
    """The attention layers of one sequence."""

    def __init__(self, ops: Ops, stores: Sequence[LayerStore]) -> None:
        self._ops, self._stores = ops, tuple(stores)

    def __len__(self) -> int:
        return len(self._stores)

    def copy(self, start: int, end: int) -> Parts:
        return tuple(self._ops.snapshot(store, start, end) for store in self._stores)

    def put(self, spans: Sequence[Span], shared: int, length: int) -> None:
        """Fill positions shared … length-1 from spans that follow each other from position 0; those
        before are there already.
        """
        end = 0
        for span in spans:
            if end >= length:
                break
            assert span.start == end, "spans must follow each other"
            end = min(span.end, length)
            if end > shared:
                for store, arrays in zip(self._stores, span.parts, strict=True):
                    self._ops.restore(store, arrays, span.start, end)
        assert max(end, shared) >= length, "the spans end too early"
