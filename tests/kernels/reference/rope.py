"""Rotary position embedding in plain torch."""

import torch


def rope_reference(
    x: torch.Tensor, positions: torch.Tensor, inv_freq: torch.Tensor, interleaved: bool
) -> torch.Tensor:
    """x [num_tokens, num_heads, head_dim]; the first 2 * len(inv_freq) of a head are turned."""
    half = len(inv_freq)
    angles = positions.double()[:, None] * inv_freq.double()  # [num_tokens, half]
    cos, sin = angles.cos()[:, None], angles.sin()[:, None]
    turned, rest = x[..., : 2 * half].double(), x[..., 2 * half :]
    if interleaved:
        a, b = turned[..., 0::2], turned[..., 1::2]
        out = torch.stack((a * cos - b * sin, b * cos + a * sin), dim=-1).flatten(-2)
    else:
        a, b = turned[..., :half], turned[..., half:]
        out = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1)
    return torch.cat((out.to(x.dtype), rest), dim=-1)
