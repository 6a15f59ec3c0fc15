"""Rows of activations as int8 with one scale for 256 columns: what products on a GPU read."""

import torch

BLOCK_COLS = 256


def quantize_rows_reference(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """float32 [rows, cols] -> integers [rows, blocks, 256], padded with zeros, and their scales
    float32 [rows, blocks, 1].
    """
    padding = -x.shape[1] % BLOCK_COLS
    blocks = torch.nn.functional.pad(x, (0, padding)).view(len(x), -1, BLOCK_COLS)
    largest = blocks.abs().amax(-1, keepdim=True)
    inverse = torch.where(largest < 2.0**-100, 0.0, 127.0 / largest)
    scale = torch.where(largest < 2.0**-100, 0.0, largest / 127.0)
    return torch.round(blocks * inverse), scale


def round_rows_reference(x: torch.Tensor) -> torch.Tensor:
    """The values that int8 activations stand for, float64 [rows, cols]."""
    integers, scale = quantize_rows_reference(x)
    return (integers.double() * scale.double()).flatten(1)[:, : x.shape[1]]
