"""Formats of cached keys and values: sizes, and the plain coder of rows.

In: float32 rows [..., head_dim]. Out: uint8 [..., row_bytes], the numbers in groups that share a
16-bit scale, padded to 16 bytes. Nothing else knows bits; the fast kernels code rows alike.

Keys that are rounded are rotated first: signs, then a Walsh-Hadamard transform of 128 dimensions at
a time. It spreads the few large dimensions of a key over all; queries are rotated alike, so that
products stay what they were. `tq3_0` rotates values too, and results are rotated back.
"""

from dataclasses import dataclass
from enum import IntEnum

import numpy as np

ROTATED_LEN = 128
_SIGNS = 0x9D2C5680_1B873593_CC9E2D51_E6546B64  # one bit a dimension; any mixed bits would do
# The best levels for normal numbers of variance 1 (Lloyd and Max), those above zero.
LEVELS_3 = 0.245094, 0.756005, 1.343909, 2.151946
LEVELS_4 = 0.128395, 0.388048, 0.656759, 0.942340, 1.256231, 1.618046, 2.069017, 2.732590


class KvCode(IntEnum):
    """How numbers become bits; the numbers are those of source/kv_format.cu."""

    HALF = 0
    BYTE = 1  # a group's largest number is 127 of its scale
    NIBBLE = 2  # a group's largest number is -8 of its scale
    LEVELS_4 = 3  # a sign and one of eight levels
    LEVELS_3 = 4  # a sign and one of four levels


_BITS = {KvCode.HALF: 16, KvCode.BYTE: 8, KvCode.NIBBLE: 4, KvCode.LEVELS_4: 4, KvCode.LEVELS_3: 3}


@dataclass(frozen=True, slots=True)
class KvFormat:
    """A format of keys or of values."""

    code: KvCode
    group_len: int = 0  # numbers that share a scale, at most a head
    is_rotated: bool = False

    def group_of(self, head_dim: int) -> int:
        return min(self.group_len, head_dim)

    def data_bytes(self, head_dim: int) -> int:
        return head_dim * _BITS[self.code] // 8

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
KEY_FORMATS = {
    "f16": _F16,
    "q8_0": KvFormat(KvCode.BYTE, 32, is_rotated=True),
    "q4": KvFormat(KvCode.LEVELS_4, 64, is_rotated=True),
    "tq3_0": KvFormat(KvCode.LEVELS_3, 128, is_rotated=True),
}
VALUE_FORMATS = {
    "f16": _F16,
    "q8_0": KvFormat(KvCode.BYTE, 32),
    "q4": KvFormat(KvCode.NIBBLE, 32),
    "tq3_0": KvFormat(KvCode.LEVELS_3, 128, is_rotated=True),
}
KV_ALIASES = {"q8": "q8_0"}
AUTO_NAMES = ("f16", "q8_0", "q4")  # best first; fewer bits only where they are asked for
BYTE_NAME = "q8_0"  # a CPU has a cache of bytes as well


def rotation_signs(head_dim: int) -> np.ndarray:
    """float32 [head_dim] of 1 and -1."""
    bits = [_SIGNS >> i & 1 for i in range(ROTATED_LEN)]
    return np.resize(np.where(bits, -1.0, 1.0).astype(np.float32), head_dim)


def rotate(rows: np.ndarray) -> np.ndarray:
    """float32 [..., head_dim] with the same products among rotated rows."""
    return _transform(rows * rotation_signs(rows.shape[-1]))


def rotate_back(rows: np.ndarray) -> np.ndarray:
    return _transform(rows) * rotation_signs(rows.shape[-1])


def _transform(rows: np.ndarray) -> np.ndarray:
    """Walsh-Hadamard, orthonormal: its own inverse."""
    order = min(rows.shape[-1], ROTATED_LEN)
    x = rows.astype(np.float32).reshape(-1, order)
    step = 1
    while step < order:
        pairs = x.reshape(-1, order // (2 * step), 2, step)
        x = np.stack((pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]), axis=2)
        step *= 2
    return (x.reshape(rows.shape) * np.float32(order**-0.5)).astype(np.float32)


def encode(rows: np.ndarray, form: KvFormat) -> np.ndarray:
    """float32 [..., head_dim] as uint8 [..., row_bytes]; what is to be rotated is rotated."""
    lead, head_dim = rows.shape[:-1], rows.shape[-1]
    out = np.zeros((*lead, form.row_bytes(head_dim)), np.uint8)
    if form.code is KvCode.HALF:
        halves = np.clip(rows, -65504, 65504).astype(np.float16)
        out[..., : 2 * head_dim] = halves.view(np.uint8)
        return out
    groups = rows.astype(np.float32).reshape(*lead, -1, form.group_of(head_dim))
    codes, scales = _CODERS[form.code](groups)
    data = _pack(codes.reshape(*lead, head_dim), form.code)
    scale_bytes = np.clip(scales, -65504, 65504).astype(np.float16).view(np.uint8)
    out[..., : data.shape[-1]] = data
    out[..., data.shape[-1] : data.shape[-1] + scale_bytes.shape[-1]] = scale_bytes
    return out


def decode(raw: np.ndarray, head_dim: int, form: KvFormat) -> np.ndarray:
    """The float32 rows that kernels see: rounded to half floats, still rotated."""
    lead, num_bytes = raw.shape[:-1], form.data_bytes(head_dim)
    data = np.ascontiguousarray(raw[..., :num_bytes])
    if form.code is KvCode.HALF:
        return data.view(np.float16).astype(np.float32)
    group = form.group_of(head_dim)
    scales = np.ascontiguousarray(raw[..., num_bytes : num_bytes + 2 * (head_dim // group)])
    codes = _unpack(data, form.code).reshape(*lead, -1, group)
    numbers = _numbers(codes, form.code).astype(np.float16) * scales.view(np.float16)[..., None]
    return numbers.reshape(*lead, head_dim).astype(np.float32)


def _code_bytes(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    scales = np.abs(groups).max(axis=-1) / np.float32(127)
    return np.rint(groups * _inverse(scales)[..., None]).astype(np.int8).view(np.uint8), scales


def _code_nibbles(groups: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    at = np.abs(groups).argmax(axis=-1)[..., None]
    scales = np.take_along_axis(groups, at, axis=-1)[..., 0] / np.float32(-8)
    codes = np.floor(groups * _inverse(scales)[..., None] + np.float32(8.5))
    return np.clip(codes, 0, 15).astype(np.uint8), scales


def _code_levels(groups: np.ndarray, levels: tuple[float, ...]) -> tuple[np.ndarray, np.ndarray]:
    """The scale keeps a group's norm: the levels are chosen by its RMS, then made as long as it."""
    table = np.array(levels, np.float16).astype(np.float32)
    borders = (np.array(levels[1:], np.float32) + np.array(levels[:-1], np.float32)) / 2
    rms = np.sqrt((groups * groups).mean(axis=-1, dtype=np.float32))
    scaled = groups * _inverse(rms)[..., None]
    index = (np.abs(scaled)[..., None] > borders).sum(axis=-1)
    found = np.sqrt((table[index] ** 2).mean(axis=-1, dtype=np.float32))
    return (index + len(levels) * (groups < 0)).astype(np.uint8), rms / found


def _inverse(scales: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)


_CODERS = {
    KvCode.BYTE: _code_bytes,
    KvCode.NIBBLE: _code_nibbles,
    KvCode.LEVELS_4: lambda groups: _code_levels(groups, LEVELS_4),
    KvCode.LEVELS_3: lambda groups: _code_levels(groups, LEVELS_3),
}


def _numbers(codes: np.ndarray, code: KvCode) -> np.ndarray:
    """What a scale is multiplied with."""
    if code is KvCode.BYTE:
        return codes.view(np.int8).astype(np.float32)
    if code is KvCode.NIBBLE:
        return codes.astype(np.float32) - 8
    table = np.array(LEVELS_4 if code is KvCode.LEVELS_4 else LEVELS_3, np.float32)
    return np.concatenate((table, -table))[codes]


def _pack(codes: np.ndarray, code: KvCode) -> np.ndarray:
    """Eight dimensions lie together. Of 4 bits, dimension 2i is nibble i and 2i + 1 nibble i + 4.
    Of 3 bits, the levels of even dimensions fill one byte and those of odd ones the next; the
    signs follow behind all levels: even dimensions in the lower half of a byte, odd in the upper.
    """
    if code is KvCode.BYTE:
        return codes
    eights = codes.reshape(*codes.shape[:-1], -1, 4, 2)  # [..., i, even or odd]
    shifts = np.arange(4, dtype=np.uint8)
    if code is not KvCode.LEVELS_3:
        nibbles = np.swapaxes(eights, -1, -2).reshape(*codes.shape[:-1], -1, 2)
        return nibbles[..., 0] | nibbles[..., 1] << 4
    levels = ((eights & 3) << (2 * shifts)[:, None]).sum(axis=-2, dtype=np.uint8)
    signs = (eights >> 2 << (shifts[:, None] + np.array([0, 4], np.uint8))).sum(
        axis=(-1, -2), dtype=np.uint8
    )
    return np.concatenate((levels.reshape(*codes.shape[:-1], -1), signs), axis=-1)


def _unpack(data: np.ndarray, code: KvCode) -> np.ndarray:
    if code is KvCode.BYTE:
        return data
    lead, shifts = data.shape[:-1], np.arange(4, dtype=np.uint8)
    if code is not KvCode.LEVELS_3:
        nibbles = np.stack((data & 15, data >> 4), axis=-1).reshape(*lead, -1, 2, 4)
        return np.swapaxes(nibbles, -1, -2).reshape(*lead, -1)
    num_eights = data.shape[-1] // 3
    levels = data[..., : 2 * num_eights].reshape(*lead, num_eights, 1, 2)
    signs = data[..., 2 * num_eights :, None, None]
    found = levels >> (2 * shifts)[:, None] & 3
    found |= (signs >> (shifts[:, None] + np.array([0, 4], np.uint8)) & 1) << 2
    return found.reshape(*lead, -1)
