"""Weights as a four-bit file (GGUF type 3) holds them: blocks of 32 along a row, of 16 even steps.

In: float32 matrices. Out: such blocks, to pack into a file or to compute with while training.
"""

from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

BLOCK_LEN = 32
_TOP = 15  # the largest number
_ROUNDS = 3  # of fitting the spacing to the numbers and the numbers to the spacing


class FourBits(NamedTuple):
    """A weight is step * number + lowest; step and lowest are float16 values."""

    numbers: Tensor  # float32 [..., num_blocks, 32]
    step: Tensor  # float32 [..., num_blocks, 1]
    lowest: Tensor

    def weights(self) -> Tensor:
        return (self.step * self.numbers + self.lowest).flatten(-2)

    def pack(self) -> np.ndarray:
        """A file's bytes: uint8 [..., num_blocks * 20]."""
        low, high = self.numbers.to("cpu", torch.uint8).chunk(2, dim=-1)
        scales = torch.cat([self.step, self.lowest], dim=-1).to("cpu", torch.float16)
        return torch.cat([scales.view(torch.uint8), low | high << 4], dim=-1).flatten(-2).numpy()


@torch.no_grad()
def round_weights(weights: Tensor) -> FourBits:
    """The better of two: from the smallest to the largest weight, and fitted by least squares."""
    blocks = weights.float().unflatten(-1, (-1, BLOCK_LEN))
    lowest = blocks.amin(-1, keepdim=True)
    plain = fitted = _number(blocks, (blocks.amax(-1, keepdim=True) - lowest) / _TOP, lowest)
    for _ in range(_ROUNDS):
        fitted = _number(blocks, *_fit(blocks, fitted.numbers))
    errors = [(bits.weights().view_as(blocks) - blocks).square() for bits in (plain, fitted)]
    is_better = errors[1].sum(-1, keepdim=True) < errors[0].sum(-1, keepdim=True)
    return FourBits(*(torch.where(is_better, b, a) for a, b in zip(plain, fitted, strict=True)))


def _number(blocks: Tensor, step: Tensor, lowest: Tensor) -> FourBits:
    """The nearest number of every weight, for spacings as the file can state them."""
    step, lowest = step.half().float(), lowest.half().float()
    numbers = ((blocks - lowest) / step.clamp_min(1e-8)).round().clamp(0, _TOP)  # a step may be 0
    return FourBits(numbers, step, lowest)


def _fit(blocks: Tensor, numbers: Tensor) -> tuple[Tensor, Tensor]:
    """The step and the lowest value with the least squared error for these numbers."""
    center = numbers.mean(-1, keepdim=True)
    offsets = numbers - center
    spread = offsets.square().sum(-1, keepdim=True).clamp_min(1e-6)  # 0 where all are equal
    step = (offsets * blocks).sum(-1, keepdim=True) / spread
    return step, blocks.mean(-1, keepdim=True) - step * center
