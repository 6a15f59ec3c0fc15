"""The operations that layers are written in. A device implements them; layers know nothing else
of it.

Calls record: arrays returned by an operation are filled when the program that it was recorded
into runs. Every array of activations has one row per token of the pass; how many rows are live
is known only at run time.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, Protocol

import numpy as np

from draftree.kernels.quant.formats import QuantType

Array = Any  # numpy on the CPU, torch elsewhere; layers only pass them on
Weight = Any  # a matrix in the device's own layout
Step = Any  # what changes from pass to pass: tokens, positions, parents, path


LayerStore = Any  # what one layer remembers between passes, in the device's own layout
KvState = LayerStore
ConvState = LayerStore
DeltaState = LayerStore


class Runnable(Protocol):
    def run(self) -> None: ...


class Ops(Protocol):
    """float32 activations [tokens, width]; `add_to` accumulates in place instead of returning a
    new array. What rms_norm, silu_mul, sigmoid_mul and gated_norm return is read by linear alone: a
    device may keep it in the form that its matrix products want.
    """

    step: Step

    def capture(self) -> AbstractContextManager[Runnable]: ...
    def scope(self) -> AbstractContextManager[None]:
        """Arrays made inside are reused after it."""
        ...

    def pack(self, raw: np.ndarray, qtype: QuantType) -> Weight: ...
    def constant(self, values: np.ndarray) -> Array: ...
    def rope_table(self, inv_freq: np.ndarray) -> Array: ...
    def new_kv(self, num_kv_heads: int, head_dim: int) -> KvState: ...
    def new_conv(self, channels: int, kernel_len: int) -> ConvState: ...
    def new_delta(self, key_heads: int, value_heads: int, head_dim: int) -> DeltaState: ...
    def new_rows(self, width: int, num_rows: int = 0) -> Array:
        """An array that outlives every scope; 0: as many rows as a pass may have."""
        ...

    def read(self, x: Array, num_rows: int) -> np.ndarray:
        """The first rows in host memory, valid until the next pass."""
        ...

    def embed(self, raw: np.ndarray, qtype: QuantType) -> Array: ...
    def linear(
        self, x: Array, weight: Weight, *, bias: Array | None = None, add_to: Array | None = None
    ) -> Array: ...
    def linears(
        self, x: Array, weights: Sequence[Weight], biases: Sequence[Array | None]
    ) -> tuple[Array, ...]:
        """Several matrices over the same rows, which a device may lay together."""
        ...

    def rms_norm(self, x: Array, weight: Array, eps: float) -> Array: ...
    def head_norm(self, x: Array, weight: Array, eps: float) -> None: ...
    def rope(self, x: Array, head_dim: int, table: Array, *, interleaved: bool) -> None: ...
    def kv_write(self, k: Array, v: Array, cache: KvState) -> None: ...
    def attention(
        self, q: Array, cache: KvState, *, window: int = 0, bidirectional: bool = False
    ) -> Array: ...
    def silu_mul(self, gate: Array, up: Array) -> Array: ...
    def sigmoid_mul(self, x: Array, gate: Array) -> Array: ...
    def conv(self, x: Array, weight: Array, state: ConvState) -> Array: ...
    def gated_delta(
        self,
        qkv: Array,
        alpha: Array,
        beta: Array,
        decay: Array,
        decay_bias: Array,
        state: DeltaState,
    ) -> Array: ...
    def gated_norm(self, x: Array, z: Array, weight: Array, eps: float) -> Array: ...
    def head(self, x: Array, norm: Array, eps: float, weight: Weight) -> Array:
        """Norm and output matrix for the rows that step.rows names: logits [rows, vocabulary]."""
        ...

    def copy_columns(self, x: Array, into: Array, column: int) -> None: ...
    def commit(self, store: LayerStore) -> None:
        """Keep the nodes on step.path, in order, and forget the others."""
        ...

    def snapshot(self, store: LayerStore, start: int, end: int) -> tuple[np.ndarray, ...]:
        """A copy of keys and values of the committed positions start … end-1, or of all that a
        recurrent layer remembers.
        """
        ...

    def restore(
        self, store: LayerStore, parts: tuple[np.ndarray, ...], start: int = 0, end: int = 0
    ) -> None:
        """Put a copy that began at start back, up to position end; it may reach further. No parts:
        the empty sequence.
        """
        ...
