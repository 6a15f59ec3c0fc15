"""Rows in a cache of keys and values on a GPU, written without its kernels."""

import torch

from draftree.kernels.cuda.kv_cache import CudaKv
from draftree.kernels.cuda.pass_args import COMMITTED, IS_TREE, NUM_TOKENS, CudaPassArgs

LARGEST_HALF = 65504.0


def write_rows(k: torch.Tensor, v: torch.Tensor, cache: CudaKv, step: CudaPassArgs) -> None:
    """Rows [rows, heads * head_dim] or [rows, heads, head_dim] of the pass that the step holds."""
    count, committed, is_tree = (int(step.control[i]) for i in (NUM_TOKENS, COMMITTED, IS_TREE))
    slots = step.positions[:count].long()
    if is_tree:
        slots = torch.arange(committed, committed + count, device=slots.device)
    for part, rows in ((cache.keys, k), (cache.values, v)):
        heads = rows[:count].reshape(count, cache.num_kv_heads, cache.head_dim).transpose(0, 1)
        part[:, slots] = heads.clamp(-LARGEST_HALF, LARGEST_HALF).half()
