"""A table with a row of numbers for each token, such as the heads of drafts have. Knows nothing of
what the rows mean.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final

import numpy as np

from draftree.kernels.quant.formats import QuantType, dequantize

_SMALL: Final = 1 << 22  # bytes of a table that is decoded once


@dataclass(slots=True)
class TokenTable:
    """A row for every token, or for those that are listed, as the file holds them."""

    raw: np.ndarray  # uint8 [num_rows, row_bytes]
    qtype: QuantType
    row_of: np.ndarray | None = None  # int32, by token; the last stands for tokens after it
    _decoded: np.ndarray | None = field(default=None, init=False)

    def __call__(self, tokens: np.ndarray) -> np.ndarray:
        """float32 [*tokens.shape, width]; the last row stands for tokens after it."""
        places = tokens.ravel()
        if self.row_of is not None:
            places = self.row_of[np.minimum(places, len(self.row_of) - 1)]
        places = np.minimum(places, len(self.raw) - 1)
        if self._decoded is None and self.raw.size <= _SMALL:
            self._decoded = dequantize(np.ascontiguousarray(self.raw), self.qtype)
        if self._decoded is not None:
            rows = self._decoded[places]
        else:
            rows = dequantize(np.ascontiguousarray(self.raw[places]), self.qtype)
        return rows.reshape(*tokens.shape, -1)


def index_listed(tokens: Sequence[int]) -> np.ndarray:
    """`TokenTable.row_of` for a table with a row for each of them, which rise, and a last row for
    all others.
    """
    row_of = np.full(tokens[-1] + 2, len(tokens), dtype=np.int32)
    row_of[list(tokens)] = np.arange(len(tokens))
    return row_of
