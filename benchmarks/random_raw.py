"""Synthetic weights in the formats of files, for benchmarks and tests."""

import torch

from draftree.kernels.quant.formats import QuantType, row_bytes

# Where a block keeps its scale and its minimum, and the usual ratio of the two.
_SCALE_AT = {
    QuantType.Q4_0: (0, None, 0.0),
    QuantType.Q4_1: (0, 2, -8.0),
    QuantType.Q5_0: (0, None, 0.0),
    QuantType.Q5_1: (0, 2, -16.0),
    QuantType.Q8_0: (0, None, 0.0),
    QuantType.Q2_K: (80, 82, 1.5),
    QuantType.Q3_K: (108, None, 0.0),
    QuantType.Q4_K: (0, 2, 7.0),
    QuantType.Q5_K: (0, 2, 15.0),
    QuantType.Q6_K: (208, None, 0.0),
    QuantType.IQ4_NL: (0, None, 0.0),
    QuantType.IQ4_XS: (0, None, 0.0),
}


def random_raw(
    qtype: QuantType, num_rows: int, num_cols: int, generator: torch.Generator
) -> torch.Tensor:
    """uint8 [num_rows, row_bytes] on the generator's device; rows differ in size up to 16 times."""
    place = generator.device
    size = torch.exp2(-4 * torch.rand((num_rows, 1), generator=generator, device=place))
    if qtype not in _SCALE_AT:
        values = torch.randn((num_rows, num_cols), generator=generator, device=place) * size * 0.05
        kind = {QuantType.F16: torch.float16, QuantType.BF16: torch.bfloat16}
        return values.to(kind.get(qtype, torch.float32)).view(torch.uint8)
    scale_at, minimum_at, ratio = _SCALE_AT[qtype]
    num_bytes = row_bytes(qtype, num_cols)
    raw = torch.randint(
        0, 256, (num_rows, num_bytes), dtype=torch.uint8, generator=generator, device=place
    )
    blocks = raw.view(num_rows, -1, qtype.block_bytes)
    for at, factor in ((scale_at, 1.0), (minimum_at, ratio)):
        if at is not None:
            spread = 0.25 + torch.rand(blocks.shape[:2], generator=generator, device=place)
            values = (spread * size * 1e-3 * factor).to(torch.float16)
            blocks[:, :, at : at + 2] = values.view(torch.uint8).view(*values.shape, 2)
    return raw
