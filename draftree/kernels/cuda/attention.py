"""Attention of up to 64 rows over the committed keys and, in a tree, over their own ancestors.

Keys are reduced in tiles, segments and spans fixed by absolute position; a row's bits depend
neither on the other rows nor on which of its keys are committed. source/attention_plan.cu says how
the work is shared out. Long prompts: attention_prefill.py.
"""

import math
from dataclasses import dataclass, replace

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.kv_cache import CACHE_FILES, CudaKv, KvShape, head_strides
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.quant.kv_format import PAGE, KvCode

SEGMENT_LEN = 256
_THREADS, _MOST_MERGE_THREADS = 256, 1024
_TILE, _SPAN, _FOLD_WAVES = 64, 4, 3  # as in source/attention_plan.cu
_MERGED_SPANS = 32  # between two meetings, as in source/attention_merge.cu
_MOST_COL_TILES = 6  # groups of 8 columns that a block works on
_GROUP_PLANS = (1, 1), (2, 3), (2, 6), (2, 9)  # warpgroups that multiply, groups of columns of each
_GROUP_THREADS = 128
WIDE_FROM = 4096  # where segments of warpgroups become longer: they leave fewer sums
_MOST_STAGES, _FEW_STAGES = 6, 4
_MOST_RAW_STAGES, _MOST_RAW_BYTES = 4, 34816  # of rows that are decoded
_GROUP_RESERVED = 6144
_RESERVED_SHARED = 3072  # what a block needs beside its stages, and the driver's own
_FEW_ROWS, _LONG_CTX = 8, 16384
_SLICE_ROWS = 32  # of one launch: bounds the workspace


@dataclass(frozen=True)
class AttentionPlan:
    """How attention with heads of up to `dim` is launched."""

    shape: KvShape
    dim: int
    col_tiles: int
    num_stages: int
    blocks_an_sm: int
    num_blocks: int
    segment_len: int
    wide_from: int  # segments are longer from here on (source/attention_plan.cu); 0: all are alike
    num_groups: int = 0  # warpgroups that multiply; 0: each warp has matrices of its own

    @property
    def _num_producers(self) -> int:
        """Warpgroups that bring keys and values, and decode them: two where registers are free."""
        return 2 if self._is_coded and self.col_tiles < math.prod(_GROUP_PLANS[-1]) else 1

    @property
    def num_threads(self) -> int:
        if not self.num_groups:
            return _THREADS
        return _GROUP_THREADS * (self._num_producers + self.num_groups)

    @property
    def _is_coded(self) -> bool:
        return {self.shape.keys.code, self.shape.values.code} != {KvCode.HALF}

    @property
    def _tile_bytes(self) -> int:
        """Of 64 keys or values as half floats."""
        return _TILE * self.dim * 2

    @property
    def _raw_bytes(self) -> int:
        """Of 64 keys or values as they lie in the cache, with the angles of their positions; half
        floats are padded to `dim`.
        """
        formats = self.shape.keys, self.shape.values
        angles = 2 * self.dim if self.shape.is_centred else 0
        return _TILE * (max(form.row_bytes(self.dim) for form in formats) + angles)

    @property
    def _raw_keys(self) -> int:
        """Keys or values in a stage before they are decoded for a warpgroup: many at a time take
        fewer meetings, but two stages must fit.
        """
        return _TILE if 2 * self._raw_bytes <= _MOST_RAW_BYTES else _TILE // 2

    @property
    def _raw_stage_bytes(self) -> int:
        return self._raw_bytes * self._raw_keys // _TILE

    @property
    def _raw_stages(self) -> int:
        return min(_MOST_RAW_STAGES, _MOST_RAW_BYTES // self._raw_stage_bytes)

    @property
    def stage_bytes(self) -> int:
        return self._tile_bytes if self.num_groups else self._raw_bytes

    @property
    def shared_bytes(self) -> int:
        query_dims = self.dim * (1 + self.shape.is_centred)
        columns = 8 * self.col_tiles * (query_dims + _TILE) * 2
        if self.num_groups:  # and where matrices may begin
            beside = 1024 + self._is_coded * self._raw_stages * self._raw_stage_bytes
        else:
            beside = self._tile_bytes if self._is_coded else 0
        return self.num_stages * self.stage_bytes + columns + beside

    @property
    def partial_dtype(self) -> torch.dtype:
        return torch.float16 if self.num_groups else torch.float32

    @property
    def source(self) -> KernelSource:
        macros = (("STAGES", self.num_stages), ("BLOCKS_AN_SM", self.blocks_an_sm))
        if not self.num_groups:
            return self._source("attention_kernel", ("attention_feed", "attention"), macros)
        files = "ring", "warpgroup", "attention_feed", "attention_group"
        groups = ("GROUPS", self.num_groups), ("GROUP_TILES", self.col_tiles // self.num_groups)
        raw = ("RAW_KEYS", self._raw_keys), ("RAW_STAGES", self._raw_stages)
        producers = (("PRODUCERS", self._num_producers),)
        return self._source("attention_kernel", files, (*macros, *groups, *raw, *producers))

    @property
    def merge_source(self) -> KernelSource:
        return self._source("attention_merge_kernel", ("kv_code", "attention_merge"), ())

    def _source(
        self, name: str, files: tuple[str, ...], macros: tuple[tuple[str, int], ...]
    ) -> KernelSource:
        sizes = ("DIM", self.dim), ("COL_TILES", self.col_tiles)
        segments = ("SEGMENT", self.segment_len), ("WIDE_FROM", self.wide_from)
        folds = (("FOLDS", int(not self.num_groups)),)
        files = (*CACHE_FILES, "attention_plan", *files)
        macros = (*sizes, *segments, *folds, *self.shape.macros, *macros)
        return KernelSource(name, files, macros)

    def most_stages(self, gpu: Gpu, blocks_an_sm: int) -> int:
        """Of warpgroups; 0: too few. Copies alone must reach far ahead to fill the time."""
        of_block = gpu.shared_per_sm // blocks_an_sm - 1024
        room = min(gpu.shared_per_block, of_block) - _GROUP_RESERVED
        empty = replace(self, num_stages=0).shared_bytes
        stages = min(_MOST_STAGES, (room - empty) // self.stage_bytes)
        is_far = self._is_coded or blocks_an_sm == 1 or stages >= _FEW_STAGES
        return stages if stages >= 2 and is_far else 0

    def filled(self, gpu: Gpu) -> "AttentionPlan":
        """With as many blocks and stages as the chip has room for."""
        blocks = 2 if self.num_groups == 1 and self.most_stages(gpu, 2) else 1
        stages, num_blocks = self.most_stages(gpu, blocks), gpu.num_sms * blocks
        return replace(self, num_stages=stages, blocks_an_sm=blocks, num_blocks=num_blocks)

    def shrunk(self, gpu: Gpu) -> "AttentionPlan":
        """For a persistent kernel: one block a multiprocessor, with fewer registers a thread and
        less shared memory.
        """
        col_tiles = min(self.col_tiles, 128 * _MOST_COL_TILES // self.dim)
        col_tiles -= col_tiles % 2 if col_tiles > 1 else 0  # warps share groups in two halves
        plan = replace(self, col_tiles=col_tiles, blocks_an_sm=1, num_blocks=gpu.num_sms)
        room = gpu.shared_per_block - gpu.reserved_shared(_RESERVED_SHARED)
        empty = replace(plan, num_stages=0).shared_bytes
        return replace(plan, num_stages=min(plan.num_stages, (room - empty) // plan.stage_bytes))

    def _num_segments(self, capacity: int) -> int:
        bounds = 0, self.wide_from, 4 * self.wide_from, capacity
        lengths = (self.segment_len * n for n in ((1, 2, 4) if self.wide_from else (1, 1, 1)))
        parts = zip(bounds, bounds[1:], lengths, strict=False)
        return sum(max(0, -(-(min(end, capacity) - begin) // n)) for begin, end, n in parts)

    def most_entries(self, num_rows: int, num_heads: int, capacity: int) -> int:
        """Partial results of a row and head that a launch can leave."""
        columns = num_rows * num_heads
        if self.num_groups:
            return (self._num_segments(capacity) + 1) * columns
        segments = -(-capacity // self.segment_len) + 1
        waves = _SPAN * 8 * self.col_tiles * _FOLD_WAVES * self.num_blocks
        unfolded = min(segments * columns, waves + 8 * columns)
        return max(unfolded, (segments // _SPAN + 8) * columns)


@dataclass(frozen=True)
class AttentionWorkspace:
    """Partial results; launches that share one must follow each other on one stream."""

    plans: tuple[AttentionPlan, ...]  # from few columns to many; the first is for a single row
    partial: torch.Tensor  # [entries, dim]: float32 sums, or of warpgroups halves (averages)
    stats: torch.Tensor  # float32 [entries, 2]: reference and sum of the weights

    def plan_for(self, num_rows: int, group: int) -> AttentionPlan:
        """A row's bits are the same by each plan."""
        row_plan, *others = self.plans
        if num_rows == 1 and group <= 8 * row_plan.col_tiles:
            return row_plan
        tiles = -(-num_rows * group // 8)
        share = -(-tiles // -(-tiles // others[-1].col_tiles))  # of blocks that have about as many
        least = max(share, -(-group // 8))
        return next((plan for plan in others if plan.col_tiles >= least), others[-1])


def plan_attention(
    shape: KvShape, gpu: Gpu, segment_len: int = SEGMENT_LEN, wide_from: int = WIDE_FROM
) -> tuple[AttentionPlan, ...]:
    """Plans from few columns to many, with the same bits."""
    head_dim = shape.head_dim
    dim = next((n for n in (64, 128, 256) if n >= head_dim), 0)
    if not dim:
        raise ValueError(f"attention with heads of {head_dim} dimensions is not supported")
    if segment_len % _TILE:
        raise ValueError(f"segments of {segment_len} positions are not whole tiles of {_TILE}")
    empty = AttentionPlan(shape, dim, 0, 0, 1, 0, segment_len, 0)
    groups = _plan_groups(replace(empty, wide_from=wide_from), gpu)
    return groups or tuple(
        _plan_warps(replace(empty, col_tiles=n), gpu) for n in (1, _MOST_COL_TILES)
    )


def _plan_warps(empty: AttentionPlan, gpu: Gpu) -> AttentionPlan:
    # Sums of many columns and dimensions fill the registers of half a multiprocessor.
    most_blocks = 1 if empty.dim * empty.col_tiles > 128 * _MOST_COL_TILES else 2
    for blocks, least in ((2, _FEW_STAGES), (1, 2)):
        room = min(gpu.shared_per_block, gpu.shared_per_sm // blocks - 1024) - _RESERVED_SHARED
        stages = min(_MOST_STAGES, (room - empty.shared_bytes) // empty.stage_bytes)
        if blocks <= most_blocks and stages >= least:
            num_blocks = gpu.num_sms * blocks
            return replace(empty, num_stages=stages, blocks_an_sm=blocks, num_blocks=num_blocks)
    head_dim = empty.shape.head_dim
    raise ValueError(f"heads of {head_dim} dimensions need more shared memory than the GPU has")


def _plan_groups(empty: AttentionPlan, gpu: Gpu) -> tuple[AttentionPlan, ...]:
    """For a single row two blocks share a multiprocessor, where they can.

    Nothing where the chip has no such instructions, or too little memory for many rows: a row's
    bits must be the same by all plans.
    """
    if not gpu.has_warpgroups or empty.shape.is_centred:
        return ()
    plans = [replace(empty, num_groups=n, col_tiles=n * tiles) for n, tiles in _GROUP_PLANS]
    if not plans[-1].most_stages(gpu, 1):
        return ()
    return tuple(plan.filled(gpu) for plan in plans)


def new_attention_workspace(
    max_rows: int,
    num_heads: int,
    shape: KvShape,
    max_ctx: int,
    gpu: Gpu,
    is_ring: bool = False,
    *,
    segment_len: int = SEGMENT_LEN,
    wide_from: int = WIDE_FROM,
) -> AttentionWorkspace:
    """Scratch for passes of up to max_rows that follow up to max_ctx positions, or a ring of them:
    no row sees more, and segments stay short.
    """
    plans = plan_attention(shape, gpu, segment_len, 0 if is_ring else wide_from)
    capacity = max_ctx + max_rows
    entries = plans[-1].most_entries(min(max_rows, _SLICE_ROWS), num_heads, capacity)
    entries = max(entries, plans[0].most_entries(1, num_heads, capacity))
    return AttentionWorkspace(
        plans,
        torch.empty((entries, plans[0].dim), dtype=plans[0].partial_dtype, device=gpu.place),
        torch.empty((entries, 2), device=gpu.place),
    )


def attention(
    q: torch.Tensor,
    cache: CudaKv,
    step: CudaPassArgs,
    out: torch.Tensor,
    workspace: AttentionWorkspace,
    gpu: Gpu,
    *,
    window: int = 0,
    bidirectional: bool = False,
) -> torch.Tensor:
    """out = softmax(q k / sqrt(head_dim)) v, both [rows, heads * head_dim] or views of heads.

    The pass's own keys are in the cache already. Causal rows see the committed keys, their
    ancestors (in a chain: all earlier rows) and themselves; bidirectional ones the committed keys
    and all rows. With a window, keys from that far back on are hidden, but for the step's sinks;
    those before the step's first position are hidden always.
    """
    head_dim, kv_heads = cache.head_dim, cache.num_kv_heads
    (heads, *q_strides), (out_heads, *out_strides) = (head_strides(x, head_dim) for x in (q, out))
    group = heads // kv_heads
    if heads != out_heads or heads != group * kv_heads or len(q) != len(out):
        raise ValueError(f"{heads} heads cannot share {kv_heads} key heads")
    plan = workspace.plan_for(len(q), group)
    if gpu.rehearsal.is_persistent:
        plan = plan.shrunk(gpu)
    if plan.shape != cache.shape or group > 8 * plan.col_tiles:
        raise ValueError(f"the workspace is for {plan.shape}, not {cache.shape}, {group} a group")
    length = min(cache.capacity, cache.table.num_pages * PAGE)  # of a ring: what windows see
    if plan.most_entries(min(len(q), _SLICE_ROWS), heads, length) > len(workspace.partial):
        raise ValueError("the workspace is too small for the rows, heads or positions")
    kernel, merge_kernel = (load_kernel(s, gpu) for s in (plan.source, plan.merge_source))
    scale = head_dim**-0.5 * math.log2(math.e)
    # Many threads for many segments; few leave room for the product that comes next.
    is_long = len(q) <= _FEW_ROWS and cache.capacity > _LONG_CTX
    is_long = is_long and not gpu.rehearsal.is_persistent
    merge_threads = _MOST_MERGE_THREADS if is_long else _THREADS
    for first in range(0, len(q), _SLICE_ROWS):
        count = min(_SLICE_ROWS, len(q) - first)
        rows = (first, count, kv_heads, group, head_dim, window, int(bidirectional))
        positions, partial = step.positions[first:], (workspace.partial, workspace.stats)
        pool, pages, page_bytes = cache.args
        kernel.launch(
            (plan.num_blocks,),
            plan.num_threads,
            *(step.control, positions, step.ancestors[min(first, step.max_nodes) :], q[first:]),
            *(pool, pages, *partial, scale),
            *(step.ancestors.stride(0), *q_strides, page_bytes, *cache.shape.row_bytes, *rows),
            *cache.score_args(first),
            shared_bytes=plan.shared_bytes,
            is_chained=True,
        )
        merge_kernel.launch(
            (count, heads),
            merge_threads,
            *(step.control, positions, *partial, out[first:], *out_strides, *rows),
            plan.num_blocks,
            shared_bytes=_MERGED_SPANS * plan.dim * 4,
            is_chained=True,
        )
    return out
