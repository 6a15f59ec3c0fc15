"""The plain coder of cached keys and values, which the kernels' are compared with.

In: float32 rows [..., head_dim]. Out: uint8 [..., row_bytes], as the caches of a GPU hold them.
"""

import numpy as np

from draftree.kernels.quant.kv_format import (
    BITS,
    LEVELS_3,
    LEVELS_4,
    ROTATED_LEN,
    KvCode,
    KvFormat,
    rotation_signs,
)


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
    form = form.of(head_dim)
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
    form = form.of(head_dim)
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


def _code_integers(groups: np.ndarray, most: int) -> tuple[np.ndarray, np.ndarray]:
    at = np.abs(groups).argmax(axis=-1)[..., None]
    scales = np.take_along_axis(groups, at, axis=-1)[..., 0] / np.float32(-most)
    codes = np.floor(groups * _inverse(scales)[..., None] + np.float32(most + 0.5))
    return np.clip(codes, 0, 2 * most - 1).astype(np.uint8), scales


def _code_levels(
    groups: np.ndarray, levels: tuple[float, ...], spread: float
) -> tuple[np.ndarray, np.ndarray]:
    """The scale keeps a group's norm: the levels are chosen by its RMS, then made as long as it."""
    table = np.array(levels, np.float32)
    borders = (table[1:] + table[:-1]) / 2
    rms = np.sqrt((groups * groups).mean(axis=-1, dtype=np.float32))
    scaled = groups * (np.float32(spread) * _inverse(rms))[..., None]
    index = (np.abs(scaled)[..., None] > borders).sum(axis=-1)
    found = np.sqrt((table[index] ** 2).mean(axis=-1, dtype=np.float32))
    return (index + len(levels) * (groups < 0)).astype(np.uint8), rms / found


def _inverse(scales: np.ndarray) -> np.ndarray:
    return np.divide(np.float32(1), scales, out=np.zeros_like(scales), where=scales != 0)


_CODERS = {
    KvCode.BYTE: _code_bytes,
    KvCode.NIBBLE: lambda groups: _code_integers(groups, 8),
    KvCode.FIVE: lambda groups: _code_integers(groups, 16),
    KvCode.LEVELS_4: lambda groups: _code_levels(groups, *LEVELS_4),
    KvCode.LEVELS_3: lambda groups: _code_levels(groups, *LEVELS_3),
}


def _numbers(codes: np.ndarray, code: KvCode) -> np.ndarray:
    """What a scale is multiplied with."""
    if code is KvCode.BYTE:
        return codes.view(np.int8).astype(np.float32)
    if code in (KvCode.NIBBLE, KvCode.FIVE):
        return codes.astype(np.float32) - 2 ** (BITS[code] - 1)
    levels, _ = LEVELS_4 if code is KvCode.LEVELS_4 else LEVELS_3
    table = np.array(levels, np.float32)
    return np.concatenate((table, -table))[codes]


def _bit_places(code: KvCode, head_dim: int) -> np.ndarray:
    """int64 [head_dim, bits]: where the bits of each dimension's code lie in a row, lowest first.

    Eight dimensions share a word: few instructions get at them. The last bit of
    a level is its sign; the signs of LEVELS_3 follow behind the levels of the row, the fifth bits
    of FIVE behind the four others.
    """
    dim, bit = np.arange(head_dim)[:, None], np.arange(BITS[code])
    eight, e = dim // 8, dim % 8
    if code is KvCode.BYTE:
        return 8 * dim + bit
    if code in (KvCode.NIBBLE, KvCode.FIVE):
        fifths = 4 * head_dim + 8 * eight + 4 * (e % 2) + e // 2
        return np.where(bit < 4, 32 * eight + 16 * (e % 2) + 4 * (e // 2) + bit, fifths)
    if code is KvCode.LEVELS_4:
        signs = 32 * eight + 8 * (e % 4) + np.where(e < 4, 7, 3)
        return np.where(bit < 3, 32 * eight + 4 * e + bit, signs)
    signs = 2 * head_dim + 32 * (dim // 32) + 8 * (e % 4) + 7 - e // 4 - 2 * (eight % 4)
    return np.where(bit < 2, 16 * eight + 4 * (e % 4) + 2 * (e // 4) + bit, signs)


def _pack(codes: np.ndarray, code: KvCode) -> np.ndarray:
    """uint8 [..., head_dim] as uint8 [..., data_bytes]."""
    places = _bit_places(code, codes.shape[-1])
    bits = np.zeros((*codes.shape[:-1], places.size), np.uint8)
    bits[..., places] = codes[..., None] >> np.arange(BITS[code], dtype=np.uint8) & 1
    return np.packbits(bits, axis=-1, bitorder="little")


def _unpack(data: np.ndarray, code: KvCode) -> np.ndarray:
    places = _bit_places(code, 8 * data.shape[-1] // BITS[code])
    bits = np.unpackbits(data, axis=-1, bitorder="little")[..., places]
    return (bits << np.arange(BITS[code], dtype=np.uint8)).sum(axis=-1, dtype=np.uint8)
