"""The block formats of weight files: type numbers, sizes, and the plain decoder to float32.

In: raw bytes of whole rows, uint8 [num_rows, row_bytes]. Out: float32 [num_rows, num_cols],
bit-equal to ggml. Knows nothing of files, names or devices; the fast kernels are elsewhere.
"""

from enum import IntEnum

import numpy as np


class QuantType(IntEnum):
    """Weight formats by their GGML type number."""

    F32 = 0
    F16 = 1
    Q4_0 = 2
    Q4_1 = 3
    Q5_0 = 6
    Q5_1 = 7
    Q8_0 = 8
    Q2_K = 10
    Q3_K = 11
    Q4_K = 12
    Q5_K = 13
    Q6_K = 14
    IQ4_NL = 20
    IQ4_XS = 23
    BF16 = 30

    @property
    def block_len(self) -> int:
        """Weights in one block."""
        return _BLOCKS[self.value][0]

    @property
    def block_bytes(self) -> int:
        """Bytes of one block."""
        return _BLOCKS[self.value][1]

    @property
    def bits_per_weight(self) -> float:
        return 8.0 * self.block_bytes / self.block_len


_BLOCKS: dict[int, tuple[int, int]] = {
    QuantType.F32.value: (1, 4),
    QuantType.F16.value: (1, 2),
    QuantType.BF16.value: (1, 2),
    QuantType.Q4_0.value: (32, 18),
    QuantType.Q4_1.value: (32, 20),
    QuantType.Q5_0.value: (32, 22),
    QuantType.Q5_1.value: (32, 24),
    QuantType.Q8_0.value: (32, 34),
    QuantType.IQ4_NL.value: (32, 18),
    QuantType.Q2_K.value: (256, 84),
    QuantType.Q3_K.value: (256, 110),
    QuantType.Q4_K.value: (256, 144),
    QuantType.Q5_K.value: (256, 176),
    QuantType.Q6_K.value: (256, 210),
    QuantType.IQ4_XS.value: (256, 136),
}


def row_bytes(qtype: QuantType, cols: int) -> int:
    """Bytes of one row of cols weights; a ValueError when cols is not whole blocks."""
    num_blocks, rest = divmod(cols, qtype.block_len)
    if cols < 1 or rest:
        raise ValueError(f"a row of {cols} weights is not a multiple of {qtype.block_len}")
    return num_blocks * qtype.block_bytes


def dequantize(raw: np.ndarray, qtype: QuantType) -> np.ndarray:
    """Decode rows, uint8 [num_rows, row_bytes] -> float32 [num_rows, num_cols]."""
    if raw.dtype != np.uint8 or raw.ndim != 2:
        raise ValueError(f"raw weights must be uint8 [rows, bytes], not {raw.dtype} {raw.shape}")
    if raw.shape[1] % qtype.block_bytes:
        raise ValueError(f"{raw.shape[1]} bytes a row are not whole {qtype.name} blocks")
    raw = np.ascontiguousarray(raw)
    match qtype:
        case QuantType.F32:
            return raw.view("<f4").astype(np.float32)
        case QuantType.F16:
            return raw.view("<f2").astype(np.float32)
        case QuantType.BF16:
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
    if raw.shape[0] == 0:
        return np.zeros((0, raw.shape[1] // qtype.block_bytes * qtype.block_len), np.float32)
    # gguf takes 60 ms to import, and the fast path never comes here.
    from gguf import GGMLQuantizationType
    from gguf import quants as gguf_quants

    with np.errstate(all="ignore"):  # blocks of damaged files may hold infinite or NaN scales
        decoded: np.ndarray = gguf_quants.dequantize(raw, GGMLQuantizationType(qtype.value))
    return decoded
