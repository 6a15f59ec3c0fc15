"""Attention of long chains of rows: SDPA on views of the cache.

Rows are a committed pass; their own keys are in the cache already. Everything is launched for the
numbers that the host knows of the pass.
"""

import torch
from torch.nn.attention.bias import causal_lower_right
from torch.nn.functional import scaled_dot_product_attention

from draftree.kernels.cuda.kv_cache import CudaKv, head_strides
from draftree.kernels.cuda.pass_args import CudaPassArgs

_LARGEST_HALF = 65504.0
_MASK_ROWS = 256  # of one call, where a mask has to be written out


def prefill_attention(
    q: torch.Tensor,
    cache: CudaKv,
    step: CudaPassArgs,
    out: torch.Tensor,
    *,
    window: int = 0,
    bidirectional: bool = False,
) -> torch.Tensor:
    """out = softmax(q k / sqrt(head_dim)) v, both [rows, heads * head_dim] or views of heads."""
    heads, head_dim, num_rows = head_strides(q, cache.head_dim)[0], cache.head_dim, step.num_tokens
    committed = step.committed
    queries = q[:num_rows].reshape(num_rows, heads, head_dim).transpose(0, 1)
    result = out[:num_rows].view(num_rows, heads, head_dim).transpose(0, 1)
    # Half floats on a CPU are slow, and there only tests run this.
    kind = torch.float16 if q.is_cuda else torch.float32
    queries = queries.to(kind).clamp(-_LARGEST_HALF, _LARGEST_HALF)
    keys, values = (part[:, : committed + num_rows].to(kind) for part in (cache.keys, cache.values))
    if not window:
        bias = None if bidirectional else causal_lower_right(num_rows, committed + num_rows)
        result.copy_(_attend(queries, keys, values, bias))
        return out
    for first in range(0, num_rows, _MASK_ROWS):
        last = min(first + _MASK_ROWS, num_rows)
        begin = max(0, committed + first - window + 1)
        end = committed + (num_rows if bidirectional else last)
        rows = torch.arange(committed + first, committed + last, device=q.device)[:, None]
        columns = torch.arange(begin, end, device=q.device)
        mask = rows - columns < window
        if not bidirectional:
            mask &= columns <= rows
        found = _attend(queries[:, first:last], keys[:, begin:end], values[:, begin:end], mask)
        result[:, first:last] = found
    return out


def _attend(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
) -> torch.Tensor:
    """Heads of rows; fewer key heads than query heads are shared."""
    return scaled_dot_product_attention(q[None], k[None], v[None], bias, enable_gqa=True)[0]
