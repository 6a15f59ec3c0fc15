"""The forms of packed weights in memory. Compiled code knows a form by its place in ALL_FORMS.

Integer forms mean value = scale * (q - zero) + min for groups of columns. A plain one keeps
float16 scales and mins for every group; a nested one keeps float16 for 256 columns and small
integers for every group.
"""

from dataclasses import dataclass

LINE_BYTES = 64
FLOAT_ROWS = 16  # rows in a strip of float weights
GROUP_COLS = 32  # columns that share an activation scale
BLOCK_COLS = 256  # columns of a nested block


@dataclass(frozen=True, slots=True)
class Form:
    """bits of one weight; group_len is 0 for the float forms, which have no scales."""

    bits: int
    group_len: int = 0
    zero: int = 0
    has_min: bool = False
    is_nested: bool = False
    is_bfloat: bool = False

    @property
    def is_float(self) -> bool:
        return self.group_len == 0


F32, F16, BF16 = Form(32), Form(16), Form(16, is_bfloat=True)
ALL_FORMS = (
    *(F32, F16, BF16),
    Form(4, 32, 8),
    Form(4, 32, 0, has_min=True),
    Form(5, 32, 16),
    Form(5, 32, 0, has_min=True),
    Form(8, 32, 128),
    Form(4, 16, 0, has_min=True, is_nested=True),
    Form(4, 16, 4, is_nested=True),
    Form(4, 32, 0, has_min=True, is_nested=True),
    Form(5, 32, 0, has_min=True, is_nested=True),
    Form(6, 16, 32, is_nested=True),
    Form(8, 32, 128, is_nested=True),
)


def quant_bytes(form: Form, lanes: int, cols: int) -> int:
    """Bytes of the integers of a strip of `lanes` rows.

    For each group of 32 columns: a unit is 4 columns of all rows, one byte each. 8 bits: units
    0...7. Fewer: units 0...3 with units 4...7 in the high nibbles; then the fifth bits of all
    units (bit u of a byte is of unit u), or the fifth and sixth bits of units 0...3 and of units
    4...7 (bits 2u and 2u + 1).
    """
    return cols // GROUP_COLS * 4 * form.bits * lanes


def scale_bytes(form: Form, lanes: int) -> int:
    """Bytes of the scales of a strip for one group (plain) or block (nested).

    Plain: float16 scales of the rows, float16 mins. Nested: the same, then for each group the int8
    scales of the rows, then for each group the int8 mins. All mins are added.
    """
    parts = 2 if form.has_min else 1
    groups = BLOCK_COLS // form.group_len if form.is_nested else 0
    return parts * lanes * (2 + groups)


def strip_bytes(form: Form, lanes: int, cols: int) -> int:
    """Integers, then scales, padded to whole cache lines."""
    if form.is_float:
        return cols * lanes * form.bits // 8
    period = BLOCK_COLS if form.is_nested else GROUP_COLS
    total = quant_bytes(form, lanes, cols) + cols // period * scale_bytes(form, lanes)
    return -(-total // LINE_BYTES) * LINE_BYTES
