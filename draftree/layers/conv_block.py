"""A decoder block whose sublayers are convolved over the rows of a pass, before and after.

Both convolutions of a sublayer take their coefficients from its normed input.
"""

from dataclasses import dataclass

from draftree.kernels.ops import Array, Columns, LayerStore, MatmulInput, Ops
from draftree.layers.attention import Attention, Projection
from draftree.layers.block import Block


@dataclass(frozen=True, slots=True)
class BlockConv:
    before: Array  # [taps, width], the base of the convolution before the sublayer
    after: Array
    own_before: Projection  # what rows add to it: [taps * groups]
    own_after: Projection


@dataclass(frozen=True, slots=True)
class ConvBlock(Block):
    mixer_conv: BlockConv
    ffn_conv: BlockConv

    def __call__(
        self, ops: Ops, x: Array, state: LayerStore, *, copy_to: Columns | None = None
    ) -> None:
        assert copy_to is None and isinstance(self.mixer, Attention)
        with ops.scope():
            rows, own = _convolve(ops, x, self.mixer_norm, self.eps, self.mixer_conv)
            mixed = self.mixer(ops, rows, state)
            ops.block_conv(mixed, own, self.mixer_conv.after, add_to=x)
        with ops.scope():
            rows, own = _convolve(ops, x, self.ffn_norm, self.eps, self.ffn_conv)
            ops.block_conv(self.ffn(ops, rows), own, self.ffn_conv.after, add_to=x)


def _convolve(
    ops: Ops, x: Array, norm: Array, eps: float, conv: BlockConv
) -> tuple[MatmulInput, Array]:
    """What a sublayer reads, and the coefficients of the convolution after it."""
    normed = ops.norm(x, norm, eps)
    rows = ops.matmul_input(normed)
    own = conv.own_before(ops, rows)
    return ops.matmul_input(ops.block_conv(normed, own, conv.before)), conv.own_after(ops, rows)
