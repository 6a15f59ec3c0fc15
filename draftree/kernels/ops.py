"""The operations that layers are written in. A device implements them; layers know nothing else
of it.

Calls record: arrays returned by an operation are filled when the program that it was recorded
into runs. Every array of activations has one row per token of the pass; how many rows are live
is known only at run time.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple, Protocol, TypeVar, Union

import numpy as np

from draftree.kernels.quant.formats import QuantType

if TYPE_CHECKING:
    import torch

Array = Union[np.ndarray, "torch.Tensor"]  # on the CPU, on a GPU; layers only pass them on
Integers = Sequence[int] | np.ndarray
_T = TypeVar("_T")


class Weight:
    """A matrix in the device's own layout."""


class MatmulInput:
    """Rows in the form that the device's products read; what it was made from may not change."""


class LayerStore:
    """What one layer remembers between passes, in the device's own layout."""


class HeldArray(Protocol):
    """A copy of what a layer remembers, in whatever memory: a numpy array, or what becomes one."""

    @property
    def nbytes(self) -> int: ...
    def __array__(self, dtype: None = None, /, *, copy: bool | None = None) -> np.ndarray: ...


class KvState(LayerStore):
    """Keys and values. centre: what is taken from keys before they are turned and rounded,
    [kv_heads * head_dim]; None: nothing.
    """

    centre: Array | None = None


class BatchedStores(LayerStore):
    """What a layer remembers of each of several sequences, a row of a pass each."""

    def __init__(self, stores: Sequence[LayerStore]) -> None:
        self._stores = stores

    def of(self, kind: type[_T]) -> list[_T]:
        """Row by row, as what this device made them."""
        return [narrow(store, kind) for store in self._stores]


class BatchedKv(BatchedStores, KvState):
    """Keys and values."""


class HeadStore(Protocol):
    """What attention layers ask and offer before positions enter: queries of a sequence's last rows
    and keys of all. Passes over what `keep_heads` recorded fill it; the last one has enough rows.
    """

    def collect(self, first: int, num_rows: int) -> None:
        """After a pass over so many rows from position first on."""
        ...

    def score(self, num_text: int, length: int) -> Array:
        """Of a text and the question behind it, length tokens in all: a float32 for each CHUNK_LEN
        tokens of the text (heads.py). Softmax over all that a query sees, the largest of all
        layers, heads and queries, smoothed, the mean of each chunk, in shares of an even spread.
        """
        ...


def narrow(handle: object, kind: type[_T]) -> _T:
    """The handle as what this device made it."""
    if not isinstance(handle, kind):
        raise TypeError(f"expected a {kind.__name__} of this device, not {type(handle).__name__}")
    return handle


class Columns(NamedTuple):
    """Some columns of an array, from `first` on."""

    array: Array
    first: int


class HeadNorm(NamedTuple):
    """RMS norm of every head's query or key."""

    weight: Array  # [head_dim]
    eps: float


class Heads(NamedTuple):
    """Queries or keys, and what they are normed with before they are rotated."""

    x: Array
    norm: HeadNorm | None = None


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary positions, one table for all layers of a model. interleaved: pairs (2i, 2i+1), else
    (i, i + rotary_dim / 2).
    """

    table: Array
    head_dim: int
    interleaved: bool


class PassArgs(Protocol):
    """What changes from pass to pass: tokens, positions, parents, path."""

    def set_chain(self, tokens: Integers, committed: int) -> None: ...
    def set_tree(
        self, tokens: Integers, parents: Integers, depths: Integers, committed: int
    ) -> None: ...
    def set_path(self, path: Integers) -> None: ...
    def set_rows(self, rows: Integers) -> None: ...
    def set_first(self, position: int) -> None:
        """Attention does not look before it, in this pass and those after."""
        ...

    def set_sinks(self, count: int) -> None:
        """So many positions at the beginning are seen from now on, whatever the window."""
        ...


class Runnable(Protocol):
    def run(self) -> None: ...


class Ops(Protocol):
    """float32 activations [tokens, width]; `add_to` accumulates in place instead of returning a
    new array. Products read a `MatmulInput`, which norms, gates and activations make on the way.
    """

    @property
    def step(self) -> PassArgs: ...
    @property
    def ring_len(self) -> int:
        """Keys and values are kept of so many positions, the last ones; 0: of all."""
        ...

    def capture(self) -> AbstractContextManager[Runnable]: ...
    def scope(self) -> AbstractContextManager[None]:
        """Arrays made inside are reused after it."""
        ...

    def pack(self, raw: np.ndarray, qtype: QuantType) -> Weight: ...
    def constant(self, values: np.ndarray) -> Array: ...
    def rope_table(self, inv_freq: np.ndarray) -> Array: ...
    def new_kv(self, num_kv_heads: int, head_dim: int, centre: Array | None = None) -> KvState:
        """centre: what keys have in common, where it is known. A format may take it, or ask for one
        by itself, which is zero until `centre_keys`.
        """
        ...

    def centre_keys(self, store: KvState, first: int, end: int) -> None:
        """The centre, if there is one, becomes the mean of the keys at positions first … end-1."""
        ...

    def new_conv(self, channels: int, kernel_len: int) -> LayerStore: ...
    def new_delta(self, key_heads: int, value_heads: int, head_dim: int) -> LayerStore: ...
    def new_rows(self, width: int, num_rows: int = 0) -> Array:
        """An array that outlives every scope; 0: as many rows as a pass may have."""
        ...

    def read(self, x: Array, num_rows: int) -> np.ndarray:
        """The first rows in host memory, valid until the next pass."""
        ...

    def embed(self, raw: np.ndarray, qtype: QuantType) -> Array: ...
    def matmul_input(self, x: Array) -> MatmulInput: ...
    def rms_norm(
        self, x: Array, weight: Array, eps: float, *, copy_to: Columns | None = None
    ) -> MatmulInput:
        """copy_to: gets x as it is, on the way."""
        ...

    def norm(self, x: Array, weight: Array, eps: float) -> Array:
        """The same, as rows."""
        ...

    def silu_mul(self, gate: Array, up: Array) -> MatmulInput: ...
    def sigmoid_mul(self, x: Array, gate: Array) -> MatmulInput: ...
    def gated_norm(self, x: Array, z: Array, weight: Array, eps: float) -> MatmulInput: ...
    def linear(
        self, x: MatmulInput, weight: Weight, *, bias: Array | None, add_to: Array | None = None
    ) -> Array: ...
    def linears(
        self, x: MatmulInput, weights: Sequence[Weight], biases: Sequence[Array | None]
    ) -> tuple[Array, ...]:
        """Several matrices over the same rows, which a device may lay together."""
        ...

    def rope_and_store_kv(
        self, q: Heads | None, k: Heads, v: Array, cache: KvState, rope: Rope
    ) -> None:
        """Rotate heads: queries in place, keys on their way into the cache, with the values."""
        ...

    def new_heads(self) -> HeadStore: ...
    def keep_heads(self, q: Heads, k: Heads, rope: Rope, store: HeadStore) -> None:
        """As they are before they are rotated: the store's next layer."""
        ...

    def attention(
        self, q: Array, cache: KvState, *, window: int = 0, bidirectional: bool = False
    ) -> Array: ...
    def conv_gated_delta(
        self,
        qkv: Array,
        conv_weight: Array,
        conv_state: LayerStore,
        alpha: Array,
        beta: Array,
        decay: Array,
        decay_bias: Array,
        delta_state: LayerStore,
    ) -> Array: ...

    def block_conv(
        self, x: Array, own: Array, base: Array, *, add_to: Array | None = None
    ) -> Array:
        """Each row with those before it in the pass: the sum over taps of (base[tap] + own[tap]) *
        the row that many before. own: [rows, taps * groups], for groups of columns; base: [taps,
        width].
        """
        ...

    def head(self, x: Array, norm: Array, eps: float, weight: Weight) -> Array:
        """Norm and output matrix for the rows that step.rows names: logits [rows, vocabulary]."""
        ...

    def copy_columns(self, x: Array, into: Columns) -> None: ...
    def commit(self, stores: Sequence[LayerStore]) -> None:
        """Keep the nodes on step.path, in order, and forget the others, in all layers."""
        ...

    def snapshot(self, store: LayerStore, start: int, end: int) -> tuple[HeldArray, ...]:
        """A copy of keys and values of the committed positions start … end-1, which must still be
        there, or of all that a recurrent layer remembers.
        """
        ...

    def restore(
        self,
        store: LayerStore,
        parts: tuple[HeldArray, ...],
        start: int = 0,
        end: int = 0,
        first: int = 0,
    ) -> None:
        """Put a copy that began at start back, from position first up to position end; it may reach
        further. No parts: the empty sequence.
        """
        ...


class BatchOps(Ops, Protocol):
    """Passes over one row of each of several sequences, which have operations and stores of their
    own: a row has the bits that it has alone.
    """

    def set_batch(self, tokens: Integers, positions: Integers) -> None:
        """A row for each of the first sequences, all of whose logits are wanted."""
        ...
