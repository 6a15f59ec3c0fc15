"""Norms in plain torch: what the kernels must compute, without any care for speed."""

import torch


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x [..., cols] / sqrt(mean of squares + eps) * weight [cols]; for heads, cols is head_dim."""
    wide = x.double()
    factor = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide * factor * weight.double()).to(x.dtype)


def gated_norm_reference(
    x: torch.Tensor, z: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """Norm of x [..., head_dim], times weight, times silu(z)."""
    normed = rms_norm_reference(x.double(), weight, eps)
    return (normed * torch.nn.functional.silu(z.double())).to(x.dtype)
