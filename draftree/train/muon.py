"""Muon: a matrix learns along the direction of its momentum with all singular values near one.

In bfloat16 on a GPU; in float32 elsewhere, where processors without bfloat16 would take a hundred
times as long. Updates are scaled like AdamW's, so that both take the same learning rate.
"""

import math
from collections.abc import Callable, Iterable
from typing import Final

import torch

_MOMENTUM: Final = 0.95
_STEPS: Final = 5
_FIRST, _THIRD, _FIFTH = 3.4445, -4.775, 2.0315  # a polynomial that moves what is in (0, 1] to 1
_ADAMW_SIZE: Final = 0.2  # usual root mean square of an update of AdamW's


def orthogonalize(matrices: torch.Tensor) -> torch.Tensor:
    """The same singular vectors, singular values between 0.5 and 1.5 or so. [count, rows, cols]"""
    is_tall = matrices.shape[1] > matrices.shape[2]
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    x = x.mT if is_tall else x
    x = x / x.norm(dim=(1, 2), keepdim=True).clamp(min=1e-7)
    for _ in range(_STEPS):
        gram = x @ x.mT
        polynomial = torch.baddbmm(gram, gram, gram, beta=_THIRD, alpha=_FIFTH)
        x = torch.baddbmm(x, polynomial, x, beta=_FIRST)
    return x.mT if is_tall else x


class Muon(torch.optim.Optimizer):
    """For matrices only. Those of one shape take their steps together, in fewer kernels."""

    def __init__(self, matrices: Iterable[torch.Tensor], lr: float, weight_decay: float) -> None:
        super().__init__(matrices, {"lr": lr, "weight_decay": weight_decay})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:
        assert closure is None, "the loss is computed before"
        for group in self.param_groups:
            by_shape: dict[torch.Size, list[torch.Tensor]] = {}
            for weight in group["params"]:
                if weight.grad is not None:
                    by_shape.setdefault(weight.shape, []).append(weight)
            for shape, weights in by_shape.items():
                directions = orthogonalize(torch.stack([self._aim(w) for w in weights]))
                size = _ADAMW_SIZE * math.sqrt(max(shape))
                for weight, direction in zip(weights, directions, strict=True):
                    weight.mul_(1 - group["lr"] * group["weight_decay"])
                    weight.add_(direction, alpha=-group["lr"] * size)

    def _aim(self, weight: torch.Tensor) -> torch.Tensor:
        """The slope, led by its momentum."""
        slope, state = weight.grad, self.state[weight]
        assert slope is not None
        if not state:
            state["momentum_buffer"] = torch.zeros_like(slope)
        return slope.lerp(state["momentum_buffer"].lerp_(slope, 1 - _MOMENTUM), _MOMENTUM)
