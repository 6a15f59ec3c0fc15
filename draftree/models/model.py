"""A loaded target: embedding, blocks, head, and how they follow one another."""

from dataclasses import dataclass

import numpy as np

from draftree.kernels.ops import Array, Ops, Weight
from draftree.kernels.quant.formats import QuantType
from draftree.layers.block import Block, LayerState


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

    def new_state(self, ops: Ops) -> tuple[LayerState, ...]:
        return tuple(block.mixer.new_state(ops) for block in self.blocks)

    def record_body(
        self,
        ops: Ops,
        states: tuple[LayerState, ...],
        feature_layers: tuple[int, ...] = (),
        features: Array | None = None,
    ) -> Array:
        """The residual stream after all blocks; features gets it after each of feature_layers
        too.
        """
        x = self.embedding(ops)
        for i, (block, state) in enumerate(zip(self.blocks, states, strict=True)):
            block(ops, x, state)
            for slot, layer in enumerate(feature_layers):
                if layer == i:
                    ops.copy_columns(x, features, slot * self.hidden_size)
        return x

    def record_head(self, ops: Ops, x: Array) -> Array:
        """Logits of the rows that step.rows names."""
        return ops.head(x, self.output_norm, self.eps, self.head)
