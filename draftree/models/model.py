"""A loaded target: embedding, blocks, head, and how they follow one another."""

from dataclasses import dataclass

import numpy as np

from draftree.kernels.ops import Array, Columns, LayerStore, Ops, Weight
from draftree.kernels.quant.formats import QuantType
from draftree.layers.attention import Attention
from draftree.layers.block import Block


@dataclass(frozen=True, slots=True)
class Embedding:
    """Rows as the file holds them; a draft shares them with its target."""

    raw: np.ndarray  # uint8 [vocab_size, row_bytes]
    qtype: QuantType

    def __call__(self, ops: Ops) -> Array:
        return ops.embed(self.raw, self.qtype)


@dataclass(frozen=True, slots=True)
class Model:
    architecture: str
    vocab_size: int
    hidden_size: int
    context_length: int
    eps: float
    embedding: Embedding
    blocks: tuple[Block, ...]
    output_norm: Array
    head: Weight
    head_rows: Embedding  # the same as the file holds it

    @property
    def num_layers(self) -> int:
        return len(self.blocks)

    @property
    def attention_layers(self) -> tuple[int, ...]:
        return tuple(i for i, b in enumerate(self.blocks) if isinstance(b.mixer, Attention))

    def new_state(self, ops: Ops) -> tuple[LayerStore, ...]:
        return tuple(block.mixer.new_state(ops) for block in self.blocks)

    def record_body(
        self,
        ops: Ops,
        states: tuple[LayerStore, ...],
        feature_layers: tuple[int, ...] = (),
        features: Array | None = None,
    ) -> Array:
        """The residual stream after all blocks; features gets it after each of feature_layers
        too.
        """
        x = self.embedding(ops)
        copies: list[list[Columns]] = [[] for _ in range(self.num_layers + 1)]
        if features is not None:  # the next block makes the copy, on its way
            for slot, layer in enumerate(feature_layers):
                copies[layer + 1].append(Columns(features, slot * self.hidden_size))
        for block, state, found in zip(self.blocks, states, copies[:-1], strict=True):
            for into in found[1:]:
                ops.copy_columns(x, into)
            block(ops, x, state, copy_to=found[0] if found else None)
        for into in copies[-1]:
            ops.copy_columns(x, into)
        return x

    def record_head(self, ops: Ops, x: Array) -> Array:
        """Logits of the rows that step.rows names."""
        return ops.head(x, self.output_norm, self.eps, self.head)
