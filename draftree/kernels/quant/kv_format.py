"""Formats of cached keys and values: names and sizes. A row of a head is its numbers, in groups
that share a 16-bit scale, padded to 16 bytes. What a name stands for depends on the head: small
heads spread what is rounded over fewer numbers, and their keys take more bits.

Keys that are rounded are rotated first: signs, then a Walsh-Hadamard transform of 128 dimensions at
a time. It spreads the few large dimensions of a key over all; queries are rotated alike, so that
products stay what they were. `tq3_0` rotates values too, and results are rotated back.
"""

from dataclasses import dataclass, replace
from enum import IntEnum

import numpy as np

PAGE = 256  # positions that lie together, as in source/kv_format.cu
MOST_RANGE = 32_768  # positions that a long prefill expands to 16 bits at a time
ROTATED_LEN = 128
_SIGNS = 0x9D2C5680_1B873593_CC9E2D51_E6546B64  # one bit a dimension; any mixed bits would do
# Near the best levels for normal numbers (Lloyd and Max), with two bits behind the first, so
# that a half float's upper byte holds them; and what the numbers' RMS is multiplied with.
LEVELS_4 = (0.21875, 0.625, 1.0, 1.5, 2.0, 2.5, 3.0, 4.0), 1.54
LEVELS_3 = (0.5, 1.5, 2.5, 4.0), 1.91


class KvCode(IntEnum):
    """How numbers become bits; the numbers are those of source/kv_format.cu."""

    HALF = 0
    BYTE = 1  # a group's largest number is 127 of its scale
    NIBBLE = 2  # a group's largest number is -8 of its scale
    LEVELS_4 = 3  # a sign and one of eight levels
    LEVELS_3 = 4  # a sign and one of four levels
    FIVE = 5  # a group's largest number is -16 of its scale


BITS = dict(zip(KvCode, (16, 8, 4, 4, 3, 5), strict=True))


@dataclass(frozen=True, slots=True)
class KvFormat:
    """A format of keys or of values."""

    code: KvCode
    group_len: int = 0  # numbers that share a scale, at most a head
    is_rotated: bool = False
    for_64: "KvFormat | None" = None  # what heads of so many dimensions take instead
    for_128: "KvFormat | None" = None

    def of(self, head_dim: int) -> "KvFormat":
        """For heads of this size."""
        return {64: self.for_64, 128: self.for_128}.get(head_dim) or self

    def is_centred(self, head_dim: int, *, has_bias: bool) -> bool:
        """Whether a GPU takes from keys what they have in common before it rounds them: it costs a
        second product for every score, and memory on the chip that heads of 256 do not leave.
        """
        form = self.of(head_dim)
        is_needed = has_bias or (form.code is KvCode.FIVE and head_dim == 64)
        return is_needed and form.code is not KvCode.HALF and head_dim in (64, 128)

    def suits_bias(self, head_dim: int) -> bool:
        """Whether keys with a bias survive it: that is most of such a key."""
        has_many_bits = self.code in (KvCode.HALF, KvCode.BYTE)
        return has_many_bits or self.is_centred(head_dim, has_bias=True)

    def group_of(self, head_dim: int) -> int:
        return min(self.of(head_dim).group_len, head_dim)

    def data_bytes(self, head_dim: int) -> int:
        return head_dim * BITS[self.of(head_dim).code] // 8

    def row_bytes(self, head_dim: int) -> int:
        """Of one key or value of one head."""
        num_scales = head_dim // self.group_of(head_dim) if self.group_len else 0
        return -(-(self.data_bytes(head_dim) + 2 * num_scales) // 16) * 16

    def can_hold(self, head_dim: int) -> bool:
        """Whole groups; a rotation takes a power of two."""
        if self.is_rotated and head_dim not in (64, 128, 256):
            return False
        return head_dim % 8 == 0 and (not self.group_len or head_dim % self.group_of(head_dim) == 0)


_F16 = KvFormat(KvCode.HALF)
# A row of 64 numbers of 4 bits is padded to 48 bytes: so many have 5 bits and a scale for each 16.
_FIVES = KvFormat(KvCode.FIVE, 16)
_ROTATED_FIVES = KvFormat(KvCode.FIVE, 16, is_rotated=True)
_SHORT_THREES = KvFormat(KvCode.LEVELS_3, 16, is_rotated=True)
_FOURS = KvFormat(KvCode.LEVELS_4, 64, is_rotated=True)
KEY_FORMATS = {
    "f16": _F16,
    "q8_0": KvFormat(KvCode.BYTE, 32, is_rotated=True),
    "q4": replace(_FOURS, for_64=_ROTATED_FIVES, for_128=_ROTATED_FIVES),
    "tq3_0": KvFormat(KvCode.LEVELS_3, 128, True, for_64=_ROTATED_FIVES, for_128=_FOURS),
}
VALUE_FORMATS = {
    "f16": _F16,
    "q8_0": KvFormat(KvCode.BYTE, 32),
    "q4": KvFormat(KvCode.NIBBLE, 32, for_64=_FIVES),
    "tq3_0": KvFormat(KvCode.LEVELS_3, 128, is_rotated=True, for_64=_SHORT_THREES),
}
KV_ALIASES = {"q8": "q8_0"}
AUTO_NAMES = ("f16", "q8_0", "q4")  # best first; fewer bits only where they are asked for
BYTE_NAME = "q8_0"  # a CPU has a cache of bytes as well


def kv_word(kv_k: str, kv_v: str) -> str:
    """The formats of keys and of values in a word."""
    return kv_k if kv_k == kv_v else f"{kv_k}/{kv_v}"


def rotation_signs(head_dim: int) -> np.ndarray:
    """float32 [head_dim] of 1 and -1."""
    bits = [_SIGNS >> i & 1 for i in range(ROTATED_LEN)]
    return np.resize(np.where(bits, -1.0, 1.0).astype(np.float32), head_dim)
