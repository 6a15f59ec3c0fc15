"""Muon: a matrix learns along the direction of its momentum with all singular values near one.

In bfloat16 on a GPU; in float32 elsewhere, where processors without bfloat16 would take a hundred
times as long. Updates are scaled like AdamW's, so that both take the same learning rate.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, Final

import torch

_MOMENTUM: Final = 0.95
_STEPS: Final = 5
_FIRST, _THIRD, _FIFTH = 3.4445, -4.775, 2.0315  # a polynomial that moves what is in (0, 1] to 1
_ADAMW_SIZE: Final = 0.2  # usual root mean square of an update of AdamW's


def orthogonalize(matrix: torch.Tensor) -> torch.Tensor:
    """The same singular vectors, singular values between 0.5 and 1.5 or so."""
    is_tall = matrix.shape[0] > matrix.shape[1]
    x = matrix.to(torch.bfloat16 if matrix.is_cuda else torch.float32)
    x = x.T if is_tall else x
    x = x / x.norm().clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = x @ x.T
        x = torch.addmm(x, torch.addmm(gram, gram, gram, beta=_THIRD, alpha=_FIFTH), x, beta=_FIRST)
    return x.T if is_tall else x


class Muon(torch.optim.Optimizer):
    """For matrices only."""

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None, "the loss is computed before"
        for group in self.param_groups:
            for weight in group["params"]:
                if weight.grad is not None:
                    self._learn(weight, weight.grad, group)

    def _learn(self, weight: torch.Tensor, slope: torch.Tensor, group: dict[str, Any]) -> None:
        state = self.state[weight]
        if not state:
            state["momentum_buffer"] = torch.zeros_like(slope)
        momentum = state["momentum_buffer"].lerp_(slope, 1 - _MOMENTUM)
        direction = orthogonalize(slope.lerp(momentum, _MOMENTUM))
        size = _ADAMW_SIZE * math.sqrt(max(weight.shape))
        weight.mul_(1 - group["lr"] * group["weight_decay"])
        weight.add_(direction, alpha=-group["lr"] * size)
