"""Causal depthwise convolution with SiLU in plain torch."""

import torch


def conv_reference(
    x: torch.Tensor, weight: torch.Tensor, window: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """x [num_tokens, channels], weight [channels, kernel], window [kernel - 1, channels] before x.

    Returns silu of the sums [num_tokens, channels], and the window after these tokens.
    """
    inputs = torch.cat((window, x))
    total = torch.zeros(x.shape, dtype=torch.float64)
    for tap in range(weight.shape[1]):
        total += inputs[tap : tap + len(x)].double() * weight[:, tap].double()
    return torch.nn.functional.silu(total).to(x.dtype), inputs[len(x) :]
