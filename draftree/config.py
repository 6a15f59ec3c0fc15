"""EngineConfig is what was asked for; Plan is what will be done. The only place where "auto" is
decided.

The plan's memory is arithmetic on the model's sizes, done before anything is loaded; what does
not fit is refused here, with the numbers.
"""

import os
from dataclasses import dataclass
from math import inf

from draftree.core import DraftSize, ModelConfig
from draftree.errors import CapacityError

KV_BYTES = {"f32": 4.0, "f16": 2.0, "q8": 1.125}  # the last with scales, for heads of 32
_DEFAULT_CTX = 8192
_CHUNK = 128  # more rows are no faster on a CPU, and take more memory
_MAX_BUDGET = 64
_GPU_BUDGET = 23  # with the root, a whole bucket of rows
GPU_NODES = 64
_GPU_CHUNKS = (2048, 1024, 512, 256)
_GPU_RESERVE = 1400 * 2**20  # graphs, loaded kernels, what the allocator cannot use
_GPU_SLABS = 320 * 2**20  # weights of one slab in 16 bits, partial sums
_GIB = 2**30
_PREFIX_BYTES = 4 * _GIB
_PARALLEL, _MAX_PARALLEL = 4, 256
_PARKED_SHARE = 4  # of free main memory, for requests that take turns
_COPY_SIZE, _NUM_STATES = 1.25, 5  # copies have edges; a recurrent state is there several times


@dataclass(frozen=True, slots=True)
class GpuInfo:
    """A GPU that could be used."""

    index: int
    name: str
    memory_bytes: int


def _is_count(value: object, least: int = 0, most: float = inf) -> bool:
    """A whole number in the range; True is not one."""
    return isinstance(value, int) and not isinstance(value, bool) and least <= value <= most


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of an engine. 0 or "auto" leaves the choice to the plan."""

    device: str = "auto"  # "cpu", "cuda", or "auto": a GPU where there is one
    draft: str = "auto"  # a name, a path, "auto" (the one that belongs to the model) or "none"
    budget: int | str = "auto"  # most nodes besides the root; "auto" chooses each round
    block: int = 0  # positions that the draft fills; 0: as trained
    ngram: str = "auto"  # look drafts up in the text: "on", "off" or "auto"
    max_ctx: int = 0
    math: str = "auto"  # "exact": float32 arithmetic on dequantised weights
    kv_type: str = "auto"  # "f32", "f16" or "q8"
    threads: int = 0
    chunk: int = 0  # tokens of one prefill pass
    gpu_memory: float = 0.0  # GiB of the GPU that may be used; 0: all of it
    prefix_bytes: int | str = "auto"  # main memory for earlier conversations; 0: none
    parallel: int = 0  # unfinished requests that may take turns; 1: one after the other

    def __post_init__(self) -> None:
        checks = (
            (self.device in ("auto", "cpu", "cuda"), "device must be auto, cpu or cuda"),
            (self.math in ("auto", "exact"), "math must be auto or exact"),
            (0.0 <= self.gpu_memory < inf, "gpu memory must be positive, or 0 for all of it"),
            (self.kv_type in ("auto", *KV_BYTES), f"kv type must be auto or {', '.join(KV_BYTES)}"),
            (self.ngram in ("auto", "on", "off"), "ngram must be auto, on or off"),
            (
                self.budget == "auto" or _is_count(self.budget, 0, 1024),
                "budget must be auto or a number of nodes from 0 to 1024",
            ),
            (
                _is_count(self.block, 0, 64),
                "block must be between 2 and 64, or 0 for the trained one",
            ),
            (
                _is_count(self.max_ctx) and self.max_ctx != 1,
                "max ctx must be at least 2, a prompt and a reply, or 0 for the default",
            ),
            (
                _is_count(self.threads, 0, 512),
                "threads must be between 1 and 512, or 0 for all cores",
            ),
            (
                _is_count(self.chunk, 0, 4096),
                "chunk must be between 1 and 4096, or 0 for the default",
            ),
            (
                self.prefix_bytes == "auto" or _is_count(self.prefix_bytes),
                "prefix bytes must be auto or a number of bytes, 0 for none",
            ),
            (
                _is_count(self.parallel, 0, _MAX_PARALLEL),
                f"parallel must be between 1 and {_MAX_PARALLEL}, or 0 for the default",
            ),
        )
        for is_valid, sentence in checks:
            if not is_valid:
                raise ValueError(sentence)


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


@dataclass(frozen=True, slots=True)
class Plan:
    threads: int
    max_ctx: int
    chunk: int
    max_nodes: int
    is_exact: bool
    kv_type: str
    prefix_bytes: int  # main memory at most, as conversations fill it
    parallel: int  # unfinished requests at most, which take turns
    parked_bytes: int  # main memory at most that they are copied to
    memory: MemoryPlan
    gpu: GpuInfo | None = None  # None: the CPU
    memory_limit: int = 0  # bytes of the GPU that may be used


def plan_memory(
    model: ModelConfig, max_ctx: int, kv_type: str, *, exact: bool, chunk: int, max_nodes: int
) -> MemoryPlan:
    """What the target needs: upper bounds, since untouched context costs nothing until it is
    used.
    """
    weights = 4 * model.num_parameters if exact else model.weight_bytes
    kv = int(model.num_kv_layers * model.kv_width * KV_BYTES[kv_type] * (max_ctx + max_nodes))
    rows = chunk * (6 * model.hidden_size + 3 * model.ffn_size)
    logits = max_nodes * (model.vocab_size + model.stash_width)
    return MemoryPlan(weights, kv, model.recurrent_bytes, 4 * (rows + logits))


def plan_gpu_memory(
    model: ModelConfig, draft: DraftSize | None, max_ctx: int, chunk: int, max_nodes: int
) -> MemoryPlan:
    """What target and draft need on a GPU. The token embedding stays in main memory."""
    positions = max_ctx + max_nodes
    kv = 2 * model.num_kv_layers * model.kv_width * positions
    stash = 4 * max_nodes * model.stash_width
    # Rows in float32 (residual, one wide projection, what mixes it) and once more in 16 bits.
    rows = chunk * (4 * (4 * model.hidden_size + 2 * model.ffn_size) + 4 * model.ffn_size)
    scratch = rows + 4 * max_nodes * model.vocab_size + stash + _GPU_SLABS + _GPU_RESERVE
    extra = 0
    if draft is not None:
        features = 4 * draft.feature_width * 2 * chunk
        logits = 4 * max_nodes * model.vocab_size
        extra = draft.weight_bytes + 2 * draft.kv_width * positions + features + logits
    weights = int(1.025 * (model.weight_bytes - model.embedding_bytes))  # padding, stacking
    recurrent = model.recurrent_bytes + model.window_bytes  # windows are there twice
    return MemoryPlan(weights, kv, recurrent, scratch, extra)


def usable_cores() -> int:
    """Cores that this process may run on."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def machine_memory() -> int:
    """Bytes of main memory."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def plan_prefix_bytes(config: EngineConfig, free_bytes: int) -> int:
    """An eighth of what would be left of main memory, unless a number was asked for."""
    if config.prefix_bytes == "auto":
        return max(min(_PREFIX_BYTES, free_bytes // 8), 0)
    return int(config.prefix_bytes)


def plan_parallel(
    config: EngineConfig,
    model: ModelConfig,
    draft: DraftSize | None,
    max_ctx: int,
    kv_type: str,
    free_bytes: int,
) -> tuple[int, int]:
    """How many requests may take turns, and the main memory that copies of them need at most."""
    width = model.num_kv_layers * model.kv_width + (draft.kv_width if draft is not None else 0)
    kv_bytes = int(_COPY_SIZE * width * KV_BYTES[kv_type] * max_ctx)
    request_bytes = kv_bytes + _NUM_STATES * model.recurrent_bytes
    count = config.parallel or max(
        min(_PARALLEL, free_bytes // _PARKED_SHARE // max(request_bytes, 1)), 1
    )
    if count == 1:
        return 1, 0
    if count * request_bytes > free_bytes:
        raise CapacityError(
            f"{count} requests of {max_ctx} tokens that take turns need "
            f"{count * request_bytes / _GIB:.1f} GiB of main memory, of which "
            f"{max(free_bytes, 0) / _GIB:.1f} GiB are free; try a smaller --parallel or --max-ctx."
        )
    return count, count * request_bytes


def resolve(
    config: EngineConfig,
    model: ModelConfig,
    memory_limit: int | None = None,
    gpu: GpuInfo | None = None,
    draft: DraftSize | None = None,
) -> Plan:
    """Decide every "auto" and refuse what does not fit. gpu: the GPU to use, if any."""
    is_exact = config.math == "exact"
    max_ctx = config.max_ctx or min(model.context_length, _DEFAULT_CTX)
    if max_ctx > model.context_length:
        raise CapacityError(
            f"A context of {max_ctx} tokens was asked for, but {model.name} was trained for "
            f"{model.context_length}."
        )
    if gpu is not None:
        return _resolve_gpu(config, model, max_ctx, gpu, draft, memory_limit)
    kv_type = config.kv_type
    if kv_type == "auto":
        small = "q8" if model.has_even_keys else "f16"
        kv_type = small if model.is_quantized and not is_exact else "f32"
    budget = _MAX_BUDGET if config.budget == "auto" else int(config.budget)
    chunk = max(config.chunk or _CHUNK, budget + 1)
    max_nodes = budget + 1
    memory = plan_memory(model, max_ctx, kv_type, exact=is_exact, chunk=chunk, max_nodes=max_nodes)
    limit = memory_limit if memory_limit is not None else machine_memory()
    if memory.total > limit:
        raise CapacityError(
            f"{model.name} needs {memory.total / _GIB:.1f} GiB (weights "
            f"{memory.weights / _GIB:.1f}, context of {max_ctx} tokens {memory.kv / _GIB:.1f}), "
            f"but the machine has {limit / _GIB:.1f} GiB; try a smaller --max-ctx or model."
        )
    free = limit - memory.total
    parallel, parked_bytes = plan_parallel(config, model, draft, max_ctx, kv_type, free)
    return Plan(
        threads=config.threads or usable_cores(),
        max_ctx=max_ctx,
        chunk=chunk,
        max_nodes=max_nodes,
        is_exact=is_exact,
        kv_type=kv_type,
        prefix_bytes=plan_prefix_bytes(config, free),
        parallel=parallel,
        parked_bytes=parked_bytes,
        memory=memory,
    )


def _resolve_gpu(
    config: EngineConfig,
    model: ModelConfig,
    max_ctx: int,
    gpu: GpuInfo,
    draft: DraftSize | None,
    memory_limit: int | None,
) -> Plan:
    if config.math == "exact" or config.kv_type in ("f32", "q8"):
        raise ValueError("exact math and keys and values other than f16 need the CPU: --device cpu")
    budget = _GPU_BUDGET if config.budget == "auto" else int(config.budget)
    if budget >= GPU_NODES:
        raise ValueError(f"on a GPU the budget is at most {GPU_NODES - 1}, not {budget}")
    max_nodes = budget + 1
    limit = memory_limit or int(config.gpu_memory * _GIB) or gpu.memory_bytes
    for chunk in (config.chunk,) if config.chunk else _GPU_CHUNKS:
        chunk = max(chunk, max_nodes)
        memory = plan_gpu_memory(model, draft, max_ctx, chunk, max_nodes)
        if memory.total <= limit:
            break
    else:
        raise CapacityError(
            f"{model.name} needs {memory.total / _GIB:.1f} GiB (weights "
            f"{memory.weights / _GIB:.1f}, draft {memory.draft / _GIB:.1f}, context of {max_ctx} "
            f"tokens {memory.kv / _GIB:.1f}, the rest "
            f"{(memory.scratch + memory.recurrent) / _GIB:.1f}), but {limit / _GIB:.1f} GiB of "
            f"{gpu.name} may be used; try a smaller --max-ctx, model or draft, or --device cpu."
        )
    free = machine_memory()
    parallel, parked_bytes = plan_parallel(config, model, draft, max_ctx, "f16", free)
    return Plan(
        threads=config.threads or usable_cores(),
        max_ctx=max_ctx,
        chunk=chunk,
        max_nodes=max_nodes,
        is_exact=False,
        kv_type="f16",
        prefix_bytes=plan_prefix_bytes(config, free),
        parallel=parallel,
        parked_bytes=parked_bytes,
        memory=memory,
        gpu=gpu,
        memory_limit=limit,
    )
