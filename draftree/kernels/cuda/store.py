"""Weights on the GPU, shared by all operations of a device: each matrix is packed once.

A file's matrices stay where they are until it is known which of them are multiplied with the same
rows; those whose formats allow it are then stacked and become one product.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.edges import PairTables
from draftree.kernels.cuda.embed import EmbedTable, new_embed_table
from draftree.kernels.cuda.layout import PackedMatrix
from draftree.kernels.cuda.linear import Workspace, new_workspace
from draftree.kernels.cuda.pack import Uploader, is_native
from draftree.kernels.cuda.program import MOST_ROWS
from draftree.kernels.ops import Weight
from draftree.kernels.quant.formats import QuantType, dequantize


@dataclass(frozen=True, eq=False)
class LazyMatrix(Weight):
    """Rows as the file holds them; they go to the GPU when it is known which others lie beside."""

    raw: np.ndarray
    qtype: QuantType

    @property
    def num_rows(self) -> int:
        return len(self.raw)

    @property
    def num_cols(self) -> int:
        return self.raw.shape[1] // self.qtype.block_bytes * self.qtype.block_len


class WeightStore:
    def __init__(self, gpu: Gpu) -> None:
        self.gpu = gpu
        self.workspace: Workspace = new_workspace(MOST_ROWS, gpu)
        self._uploader = Uploader(gpu)
        self._stacks: dict[tuple[LazyMatrix, ...], PackedMatrix] = {}
        # By address of the file's rows.
        self._tables: dict[int, EmbedTable] = {}
        self._rows: dict[tuple[int, QuantType], torch.Tensor] = {}

    def matrix(self, *parts: LazyMatrix) -> PackedMatrix:
        """The parts' rows one after the other; their formats can be stacked."""
        if parts not in self._stacks:
            self._stacks[parts] = self._uploader.pack([(part.raw, part.qtype) for part in parts])
            self._uploader.finish()
        return self._stacks[parts]

    def table(self, raw: np.ndarray, qtype: QuantType) -> EmbedTable:
        address = raw.ctypes.data
        if address not in self._tables:
            self._tables[address] = new_embed_table(raw, qtype, self.gpu)
        return self._tables[address]

    def pair_tables(
        self,
        before: tuple[np.ndarray, QuantType],  # rows as a file holds them
        after: tuple[np.ndarray, QuantType],
        row_of: np.ndarray | None,
        hidden: torch.Tensor,
    ) -> PairTables:
        """Rows in two formats, or in one that kernels cannot read, become 16-bit floats."""
        qtype = before[1]
        kept = qtype if after[1] == qtype and is_native(qtype) else QuantType.F16
        rows = self._place_rows(*before, kept), self._place_rows(*after, kept)
        places = None if row_of is None else torch.from_numpy(row_of).to(self.gpu.place)
        return PairTables(kept, *rows, places, hidden)

    def _place_rows(self, raw: np.ndarray, qtype: QuantType, kept: QuantType) -> torch.Tensor:
        key = raw.ctypes.data, kept
        if key not in self._rows:
            if kept != qtype:
                raw = dequantize(raw, qtype).astype(np.float16).view(np.uint8)
            self._rows[key] = torch.from_numpy(np.array(raw)).to(self.gpu.place)
        return self._rows[key]

    def bias(
        self, parts: Sequence[LazyMatrix], biases: Sequence[torch.Tensor | None]
    ) -> torch.Tensor | None:
        """The biases of stacked parts; None where no part has one."""
        if all(bias is None for bias in biases):
            return None
        pairs = zip(parts, biases, strict=True)
        zeros = [
            torch.zeros(p.num_rows, device=self.gpu.place) if b is None else b for p, b in pairs
        ]
        return torch.cat(zeros)
