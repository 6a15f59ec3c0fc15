"""Attention of long chains of rows: SDPA over ranges of the cache, which are expanded to half
floats one after the other.

Rows are a committed pass; their own keys are in the cache already. Passes that follow others are
launched for the numbers that the host knows. Ranges begin at multiples of absolute positions and
are merged by the sums of their weights, so that scratch is bounded, and a pass's bits depend on
where it begins and ends alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch.nn.functional import scaled_dot_product_attention

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.kv_cache import CACHE_FILES, CudaKv, KvShape, head_strides
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.quant.kv_format import MOST_RANGE

_LEAST_RANGE = 1024  # of those that cuDNN is asked for: each size costs it a search for a plan
_MASK_ROWS = 256  # of one call, where a mask has to be written out
_LARGEST_HALF = 65504.0
_WARPS = 8
_MERGED = 4  # ranges whose results are held until they are merged
_Pair = tuple[torch.Tensor, torch.Tensor]


def merge_source(head_dim: int) -> KernelSource:
    macros = (("HEAD_DIM", head_dim),)
    return KernelSource("merge_ranges_kernel", ("bits", "merge_ranges"), macros)


@dataclass
class _Merger:
    """Puts what rows find in ranges together, a few at a time."""

    out: torch.Tensor  # float32 [rows, heads * head_dim]
    head_dim: int
    gpu: Gpu
    sums: torch.Tensor  # float32 [heads, rows]
    has_before: bool = False

    def merge(self, found: Sequence[_Pair]) -> None:
        """At most _MERGED results of `_attend`."""
        ranges: list[torch.Tensor | int] = []
        for part, weight in found:
            ranges += [part, weight, part.stride(0), part.stride(1)]
        ranges += ranges[:4] * (_MERGED - len(found))  # not read
        rows, heads, lanes = len(self.out), len(self.sums), self.head_dim // 8
        load_kernel(merge_source(self.head_dim), self.gpu).launch(
            (-(-rows * lanes // (32 * _WARPS)), heads),
            32 * _WARPS,
            *(*ranges, len(found), rows, self.out, self.out.stride(0), self.sums),
            int(self.has_before),
        )
        self.has_before = True


def expand_source(shape: KvShape) -> KernelSource:
    macros = (("HEAD_DIM", shape.head_dim), *shape.macros)
    return KernelSource("kv_expand_kernel", (*CACHE_FILES, "kv_code", "kv_expand"), macros)


def expand_kv(cache: CudaKv, first: int, end: int, gpu: Gpu) -> _Pair:
    """Keys and values at slots first … end-1: float16 [kv_heads, end - first, head_dim], keys still
    rotated, as queries are.
    """
    heads, count = cache.num_kv_heads, end - first
    shape = (heads, count, cache.head_dim)
    keys, values = (torch.empty(shape, dtype=torch.float16, device=gpu.place) for _ in range(2))
    load_kernel(expand_source(cache.shape), gpu).launch(
        (-(-count // _WARPS), heads),
        32 * _WARPS,
        *(*cache.args, heads, *cache.shape.row_bytes, first, count, keys, values),
        *cache.expand_args,
    )
    return keys, values


def prefill_attention(
    q: torch.Tensor,
    cache: CudaKv,
    step: CudaPassArgs,
    out: torch.Tensor,
    gpu: Gpu,
    *,
    window: int = 0,
) -> torch.Tensor:
    """out = softmax(q k / sqrt(head_dim)) v, both [rows, heads * head_dim] or views of heads."""
    heads, head_dim, committed = head_strides(q, cache.head_dim)[0], cache.head_dim, step.committed
    # A first pass is the same for any number of live rows: they do not see those behind them.
    num_rows = step.num_tokens if committed else len(q)
    queries = q[:num_rows].reshape(num_rows, heads, head_dim).transpose(0, 1)
    # Half floats on a CPU are slow, and there only tests run this.
    kind = torch.float16 if q.is_cuda else torch.float32
    queries = queries.to(kind).clamp_(-_LARGEST_HALF, _LARGEST_HALF)
    result = out[:num_rows].view(num_rows, heads, head_dim).transpose(0, 1)
    if window:
        _attend_window(queries, cache, step, result, window, gpu)
        return out
    own = _attend(queries, expand_kv(cache, committed, committed + num_rows, gpu), True)
    if not committed:
        result.copy_(own[0])
        return out
    merger = _Merger(out[:num_rows], head_dim, gpu, torch.empty((heads, num_rows), device=q.device))
    found = [own]
    for first, end in split_range(committed):
        if len(found) == _MERGED:
            merger.merge(found)
            found = []
        found.append(_attend(queries, expand_kv(cache, first, end, gpu), False))
    merger.merge(found)
    return out


def split_range(length: int) -> list[tuple[int, int]]:
    """Ranges of positions 0 … length-1: of the largest size, then of ever smaller powers of two, so
    that there are few sizes.
    """
    ranges, first, size = [], 0, MOST_RANGE
    while first < length:
        while size > _LEAST_RANGE and first + size > length:
            size //= 2
        ranges.append((first, min(first + size, length)))
        first += size
    return ranges


def _attend(queries: torch.Tensor, pair: _Pair, is_causal: bool) -> _Pair:
    """16-bit floats [heads, rows, head_dim] and the logarithm of the weights' sum [heads, rows];
    causal rows are those of the keys.
    """
    keys, values = pair
    if not queries.is_cuda:
        return _attend_plainly(queries, keys.to(queries.dtype), values.to(queries.dtype), is_causal)
    rows, count = queries.shape[1], keys.shape[1]
    is_usual = rows % _LEAST_RANGE == 0 and count % _LEAST_RANGE == 0
    ops, heads = torch.ops.aten, [part[None] for part in (queries, keys, values)]
    if is_usual and torch.cuda.get_device_capability(queries.device)[0] >= 9:
        found = ops._scaled_dot_product_cudnn_attention(*heads, None, True, 0.0, is_causal, False)
    else:
        found = ops._scaled_dot_product_flash_attention(*heads, 0.0, is_causal, False)
    return found[0][0], found[1].view(len(queries), -1)[:, :rows].contiguous()


def _attend_plainly(
    queries: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, is_causal: bool
) -> _Pair:
    group = len(queries) // len(keys)
    keys, values = (part.repeat_interleave(group, 0) for part in (keys, values))
    scores = queries @ keys.transpose(1, 2) * queries.shape[-1] ** -0.5
    if is_causal:
        scores += torch.full(scores.shape[1:], float("-inf")).triu(1)
    return (scores.softmax(-1) @ values).half(), scores.logsumexp(-1)


def _attend_window(
    queries: torch.Tensor,
    cache: CudaKv,
    step: CudaPassArgs,
    result: torch.Tensor,
    window: int,
    gpu: Gpu,
) -> None:
    """Rows see the sinks, and of the rest what lies within the window."""
    committed, sinks, place = step.committed, step.sinks, queries.device
    for first in range(0, queries.shape[1], _MASK_ROWS):
        last = min(first + _MASK_ROWS, queries.shape[1])
        begin = max(min(sinks, committed), committed + first - window + 1)
        parts = [expand_kv(cache, begin, committed + last, gpu)]
        columns = torch.arange(begin, committed + last, device=place)
        if sinks and begin > 0:
            parts.insert(0, expand_kv(cache, 0, min(sinks, begin), gpu))
            columns = torch.cat((torch.arange(min(sinks, begin), device=place), columns))
        rows = torch.arange(committed + first, committed + last, device=place)[:, None]
        mask = (columns <= rows) & ((rows - columns < window) | (columns < sinks))
        keys, values = (
            torch.cat(same, dim=1).to(queries.dtype) for same in zip(*parts, strict=True)
        )
        heads = queries[None, :, first:last], keys[None], values[None]
        found = scaled_dot_product_attention(*heads, mask, enable_gqa=True)
        result[:, first:last] = found[0]
