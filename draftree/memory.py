"""Bytes that a model needs, by arithmetic on its sizes, and what a machine has."""

import os
from dataclasses import dataclass

from draftree.core import DraftSize, ModelConfig
from draftree.kernels.quant.kv_format import BYTE_NAME, KEY_FORMATS, MOST_RANGE, PAGE, VALUE_FORMATS

_SHARE = 4  # of free main memory, for what turns and batches need
_PREFIX_BYTES = 2**32  # for earlier conversations, at most
_FEATURE_BYTES, _LEAST_FEATURES = 2**25, 1024  # what a draft has yet to read of shared passes
_SPARE_LEN = 1024  # positions of a reply that a draft can go back behind
_GPU_RESERVE = 1400 * 2**20  # graphs, loaded kernels, what the allocator cannot use
# Weights of one slab in 16 bits and sums of products: of passes that are graphs, and of others.
_GPU_SLABS = 640 * 2**20
_LONG_CHUNK, _LONG_SLABS = 4096, 448 * 2**20  # what slabs of so many rows take beside
_SCORING_RESERVE = 384 * 2**20  # products of queries and keys, graphs, what cannot be used
GPU_DRAFT_CHUNK = 512  # rows of features that a draft reads together


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by purpose."""

    weights: int
    kv: int
    recurrent: int
    scratch: int
    draft: int = 0  # weights, keys and values, features

    @property
    def total(self) -> int:
        return self.weights + self.draft + self.kv + self.recurrent + self.scratch


def kv_bytes(model: ModelConfig, kv_k: str, kv_v: str) -> int:
    """Of a token on a GPU, in all layers."""
    key, value = KEY_FORMATS[kv_k], VALUE_FORMATS[kv_v]
    row = key.row_bytes(model.head_dim) + value.row_bytes(model.head_dim)
    return model.num_kv_layers * model.num_kv_heads * row


def count_ring(context_len: int, num_rows: int) -> int:
    """Of how many positions a draft keeps keys and values: those it looks back at, the rows of a
    pass, and enough for a reply to be written once more from its beginning.
    """
    length = context_len + num_rows + min(context_len, _SPARE_LEN)
    return -(-length // PAGE) * PAGE


def draft_kv_bytes(draft: DraftSize, max_ctx: int) -> int:
    """What a draft keeps of a request on a CPU, or in a copy of it."""
    return 4 * draft.kv_width * min(max_ctx, count_ring(draft.context_len, max_ctx))


def plan_prefix_bytes(asked: int | str, free_bytes: int) -> int:
    """An eighth of what would be left of main memory, unless a number was asked for."""
    return max(min(_PREFIX_BYTES, free_bytes // 8), 0) if asked == "auto" else int(asked)


def count_features(row_bytes: int) -> int:
    """Of how many tokens that others' passes wrote features are kept; of more, the last ones."""
    return max(_FEATURE_BYTES // max(row_bytes, 1), _LEAST_FEATURES)


def feature_bytes(draft: DraftSize | None) -> int:
    """Main memory that they take of a request."""
    row_bytes = 4 * draft.feature_width if draft is not None else 0
    return row_bytes * count_features(row_bytes)


def count_in_share(most: int, each_bytes: int, free_bytes: int) -> int:
    """How many things of a size may take their share of main memory, at most so many."""
    return min(most, max(free_bytes, 0) // _SHARE // max(each_bytes, 1))


def plan_memory(
    model: ModelConfig,
    max_ctx: int,
    kv_k: str,
    kv_v: str,
    *,
    exact: bool,
    chunk: int,
    max_nodes: int,
) -> MemoryPlan:
    """What the target needs: upper bounds, since untouched context costs nothing until it is
    used.
    """
    weights = 4 * model.num_parameters if exact else model.weight_bytes
    row = model.head_dim * (4 if "f32" in (kv_k, kv_v) else 2)  # other formats lie in 16 bits
    if kv_k == kv_v == BYTE_NAME:
        row = model.head_dim + 4  # a scale
    kv = 2 * model.num_kv_layers * model.num_kv_heads * row * (max_ctx + max_nodes)
    rows = chunk * (6 * model.hidden_size + 3 * model.ffn_size)
    logits = max_nodes * (model.vocab_size + model.stash_width)
    return MemoryPlan(weights, kv, model.recurrent_bytes, 4 * (rows + logits))


def plan_gpu_memory(
    model: ModelConfig,
    draft: DraftSize | None,
    max_ctx: int,
    chunk: int,
    max_nodes: int,
    kv_k: str = "f16",
    kv_v: str = "f16",
) -> MemoryPlan:
    """What target and draft need on a GPU. The token embedding stays in main memory."""
    positions = (-(-(max_ctx + max_nodes) // PAGE) + 1) * PAGE  # whole pages, and a spare
    kv = kv_bytes(model, kv_k, kv_v) * positions
    expanded = 4 * model.num_kv_heads * model.head_dim * min(max_ctx, MOST_RANGE)
    angles = 4 * (model.rotary_dim or model.head_dim) * (max_ctx + chunk)
    if KEY_FORMATS[kv_k].is_centred(model.head_dim, has_bias=model.has_key_bias):
        angles += 2 * model.head_dim * (max_ctx + chunk) + 4 * model.hidden_size * chunk
    stash = 4 * max_nodes * model.stash_width
    rows = chunk * _row_bytes(model)
    scratch = rows + 4 * max_nodes * model.vocab_size + stash + _GPU_SLABS + _GPU_RESERVE
    scratch += _LONG_SLABS if chunk >= _LONG_CHUNK else 0
    partial = (positions // 1024 + 12) * 160 * model.hidden_size  # results of spans of keys
    scratch += expanded + angles + partial
    extra = 0
    if draft is not None:
        draft_chunk = max(min(chunk, GPU_DRAFT_CHUNK), draft.block_len)
        features = 4 * draft.feature_width * (chunk + draft_chunk)
        halves = 2 * draft_chunk * (draft.feature_width + model.hidden_size)
        logits = 4 * max_nodes * model.vocab_size
        ring_len = count_ring(draft.context_len, draft_chunk)
        draft_kv = 2 * draft.kv_width * min(positions, ring_len)
        extra = draft.weight_bytes + draft_kv + features + halves + logits
        extra += rows // chunk * draft_chunk
        extra += 4 * (draft.head_dim or model.head_dim) * (max_ctx + draft_chunk)
    weights = int(1.025 * (model.weight_bytes - model.embedding_bytes))  # padding, stacking
    recurrent = model.recurrent_bytes + model.window_bytes  # windows are there twice
    return MemoryPlan(weights, kv, recurrent, scratch, extra)


def scoring_bytes(
    model: ModelConfig, num_layers: int, max_ctx: int, chunk: int, *, is_loaded: bool
) -> int:
    """What a model's first layers need on a GPU, beside an engine's plan, to read texts for their
    keys. is_loaded: its weights are there.
    """
    kv_layers = -(-num_layers * model.num_kv_layers // model.num_layers)
    width = model.num_kv_heads * model.head_dim
    positions = (-(-max_ctx // PAGE) + 2) * PAGE
    kv = 6 * kv_layers * width * positions  # keys and values, and keys that are not rotated
    recurrent = (model.recurrent_bytes + model.window_bytes) * num_layers // model.num_layers
    rows = _row_bytes(model) * chunk
    # Weights in 16 bits, products, queries and results of attention: of graphs, and of others.
    slab = min(_GPU_SLABS // 3, 4 * model.hidden_size * model.ffn_size)
    passing = 2 * (slab + 12 * model.hidden_size * chunk) + _SCORING_RESERVE
    weights = 0
    if not is_loaded:
        weights = int(1.025 * (model.weight_bytes - model.embedding_bytes))
        passing += 4 * (model.rotary_dim or model.head_dim) * (max_ctx + chunk)
    return weights + kv + recurrent + rows + passing


def _row_bytes(model: ModelConfig) -> int:
    """Of a pass: float32 (residual, one wide projection, what mixes it) and once more in 16
    bits.
    """
    return 4 * (4 * model.hidden_size + 2 * model.ffn_size) + 4 * model.ffn_size


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
