"""Convolution over rows whose coefficients each row brings along, in plain torch."""

import torch


def block_conv_reference(x: torch.Tensor, own: torch.Tensor, base: torch.Tensor) -> torch.Tensor:
    """x: [rows, width]; own: [rows, taps * groups]; base: [taps, width]."""
    (taps, width), count = base.shape, len(x)
    more = own.view(count, taps, -1).repeat_interleave(width * taps // own.shape[1], dim=2)
    out = torch.zeros_like(x)
    for row in range(count):
        for tap in range(min(taps, row + 1)):
            out[row] += (base[tap] + more[row, tap]) * x[row - tap]
    return out
