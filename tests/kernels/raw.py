"""Random weights in the formats of files: any integers, sane scales."""

import numpy as np

from draftree.kernels.quant.formats import QuantType, row_bytes
from draftree.kernels.quant.layout import block_layout


def random_raw(rng: np.random.Generator, qtype: QuantType, rows: int, cols: int) -> np.ndarray:
    """uint8 [rows, row_bytes]; values have a size of about one."""
    layout = block_layout(qtype)
    if layout is None:
        values = rng.standard_normal((rows, cols)).astype(np.float32)
        if qtype == QuantType.F16:
            return values.astype(np.float16).view(np.uint8)
        if qtype == QuantType.BF16:
            return (values.view(np.uint32) >> 16).astype(np.uint16).view(np.uint8)
        return values.view(np.uint8)
    raw = rng.integers(0, 256, (rows, row_bytes(qtype, cols)), dtype=np.uint8)
    blocks = raw.reshape(rows, -1, qtype.block_bytes)
    largest = 2.0**layout.bits * (32 if layout.is_nested else 1)
    for at in (layout.scale_at, layout.min_at if layout.has_min else layout.scale_at):
        scales = rng.uniform(-2, 2, blocks.shape[:2]) / largest
        blocks[:, :, at : at + 2] = scales.astype(np.float16)[..., None].view(np.uint8)
    return raw
