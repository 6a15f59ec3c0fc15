"""What a block of each format says, in one form: value = scale * (q - zero) + min.

A plain block is one group of weights with float16 scale and min. A nested block has several groups
with integer scales and mins, which multiply the float16 scale and min of the block. The decoders
are in block.py.
"""

from dataclasses import dataclass

from draftree.kernels.quant.formats import QuantType

_NONE = -1


@dataclass(frozen=True, slots=True)
class BlockLayout:
    """q has `bits` bits as decoded; offsets are bytes in the block."""

    qtype: QuantType
    bits: int
    group_len: int  # weights that share scale and min: 16 or 32
    zero: int
    is_nested: bool
    scale_at: int
    min_at: int = _NONE  # nested mins are subtracted, plain ones added

    @property
    def has_min(self) -> bool:
        return self.min_at != _NONE


_LAYOUTS = (
    BlockLayout(QuantType.Q4_0, 4, 32, 8, False, 0),
    BlockLayout(QuantType.Q4_1, 4, 32, 0, False, 0, 2),
    BlockLayout(QuantType.Q5_0, 5, 32, 16, False, 0),
    BlockLayout(QuantType.Q5_1, 5, 32, 0, False, 0, 2),
    BlockLayout(QuantType.Q8_0, 8, 32, 128, False, 0),
    BlockLayout(QuantType.IQ4_NL, 8, 32, 128, False, 0),
    BlockLayout(QuantType.Q2_K, 4, 16, 0, True, 80, 82),
    BlockLayout(QuantType.Q3_K, 4, 16, 4, True, 108),
    BlockLayout(QuantType.Q4_K, 4, 32, 0, True, 0, 2),
    BlockLayout(QuantType.Q5_K, 5, 32, 0, True, 0, 2),
    BlockLayout(QuantType.Q6_K, 6, 16, 32, True, 208),
    BlockLayout(QuantType.IQ4_XS, 8, 32, 128, True, 0),
)
_BY_TYPE = {layout.qtype: layout for layout in _LAYOUTS}


def block_layout(qtype: QuantType) -> BlockLayout | None:
    """None for the float formats, which have no blocks."""
    return _BY_TYPE.get(qtype)
