"""Keys and values of a run of positions, copied and put back.

Attention layers only append: what they hold of a position stays until the sequence goes back behind
it, or a ring comes round to it. So spans that follow each other make up a whole, and what a
sequence still holds need not be copied back.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.kernels.ops import HeldArray, LayerStore, Ops

Parts = tuple[tuple[HeldArray, ...], ...]  # of each layer


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

    def put(self, spans: Sequence[Span], at_hand: range, length: int, least: int = 0) -> int:
        """Fill the positions before length, as far back as spans go without a gap, but not behind
        least; those at hand are there already. The first position that is filled.
        """
        first = length
        while first > least:
            if at_hand.start < first <= at_hand.stop:
                first = max(at_hand.start, least)
                continue
            span = next((span for span in spans if span.start < first <= span.end), None)
            if span is None:
                break
            begin = max(span.start, least, at_hand.stop if at_hand.stop < first else 0)
            for store, arrays in zip(self._stores, span.parts, strict=True):
                self._ops.restore(store, arrays, span.start, first, begin)
            first = begin
        return first
