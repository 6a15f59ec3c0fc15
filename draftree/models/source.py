"""Strict taking of tensors from a checkpoint: nothing missing, nothing unused, every shape
checked.
"""

from math import prod

import numpy as np

from draftree.errors import CheckpointError
from draftree.kernels.ops import Array, Ops, Weight
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.layers.attention import Projection
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.mapping import forget_rows


class TensorSource:
    """Hands out each tensor once, in the device's layout."""

    def __init__(self, checkpoint: Checkpoint, ops: Ops) -> None:
        self._checkpoint = checkpoint
        self._ops = ops
        self._left = set(checkpoint.tensors)

    def has(self, name: str) -> bool:
        return name in self._checkpoint.tensors

    def raw(self, name: str, rows: int, cols: int) -> tuple[np.ndarray, QuantType]:
        """The matrix as the file holds it, leading dimensions folded: uint8 [rows, row_bytes]."""
        info = self._checkpoint.tensors.get(name)
        if info is None:
            raise CheckpointError(f"{self._checkpoint.path} has no tensor '{name}'.")
        if (prod(info.shape[:-1]), info.shape[-1]) != (rows, cols):
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor '{name}' is {list(info.shape)}, "
                f"but the metadata asks for {[rows, cols] if rows > 1 else [cols]}."
            )
        self._left.discard(name)
        return self._checkpoint.raw(name), info.qtype

    def weight(self, name: str, rows: int, cols: int, keep: np.ndarray | None = None) -> Weight:
        """A matrix, or those of its rows that `keep` names."""
        raw, qtype = self.raw(name, rows, cols)
        return self.pack(raw, qtype, keep)

    def pack(self, raw: np.ndarray, qtype: QuantType, keep: np.ndarray | None = None) -> Weight:
        """What is packed takes memory; what it was made from needs to no longer."""
        weight = self._ops.pack(raw if keep is None else raw[keep], qtype)
        forget_rows(raw)
        return weight

    def projection(self, name: str, rows: int, cols: int, *, bias: str | None = None) -> Projection:
        """A matrix with the bias of that name, where the file has one."""
        has_bias = bias is not None and self.has(bias)
        return Projection(
            self.weight(name, rows, cols), self.vector(bias, rows) if bias and has_bias else None
        )

    def array(self, name: str, rows: int, cols: int) -> np.ndarray:
        """A small tensor as float32 [rows, cols]."""
        raw, qtype = self.raw(name, rows, cols)
        return dequantize(raw, qtype)

    def vector(self, name: str, length: int) -> Array:
        return self._ops.constant(self.array(name, 1, length)[0])

    def ignore(self, prefix: str) -> None:
        """Tensors that a model knows and does not use."""
        self._left = {name for name in self._left if not name.startswith(prefix)}

    def finish(self) -> None:
        """All tensors are taken, and in the device's layout: the file's pages are needed no
        more.
        """
        self._checkpoint.release()
        if self._left:
            some = ", ".join(sorted(self._left)[:3])
            raise CheckpointError(
                f"{self._checkpoint.path} holds {len(self._left)} tensors that this architecture "
                f"does not use ({some}{', …' if len(self._left) > 3 else ''}); "
                "it is probably a variant that is not supported."
            )
