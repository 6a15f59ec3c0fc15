"""EngineConfig is what was asked for; Plan is what will be done. The only place where "auto" is
decided.

Memory is arithmetic on sizes, before anything is loaded; what does not fit is refused with numbers.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from math import inf

from draftree.core import DraftSize, ModelConfig
from draftree.errors import CapacityError
from draftree.kernels.quant.kv_format import (
    AUTO_NAMES,
    BYTE_NAME,
    KEY_FORMATS,
    KV_ALIASES,
    VALUE_FORMATS,
    kv_word,
)
from draftree.memory import (
    MemoryPlan,
    count_in_share,
    draft_kv_bytes,
    feature_bytes,
    machine_memory,
    plan_gpu_memory,
    plan_memory,
    plan_prefix_bytes,
    usable_cores,
)

KV_NAMES = ("f32", *KEY_FORMATS)  # of keys and of values, largest first
_ASKED_KV = ("auto", *KV_NAMES, *KV_ALIASES)
COMPRESS_NAMES = BATCHING_NAMES = ("off", "auto", "always")
_CHUNK = 128  # more rows are no faster on a CPU, and take more memory
_DEFAULT_CTX, _MAX_BUDGET = 8192, 64
_GPU_BUDGET, GPU_NODES = 23, 64  # with the root, whole buckets of rows
_GPU_CHUNKS, _LEAST_CHUNK = (4096, 2048, 1024, 512), 256  # the last where nothing else helps
_GIB, _LEAST_WINDOW = 2**30, 128
_PARALLEL, _MAX_PARALLEL = 8, 256
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


def is_share(value: object) -> bool:
    """What --compress-keep may be."""
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return value == "auto" or (is_number and 0.0 < float(str(value)) <= 1.0)


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """Options of an engine. 0 or "auto" leaves the choice to the plan."""

    device: str = "auto"  # "cpu", "cuda", or "auto": a GPU where there is one
    draft: str = "auto"  # a name, a path, "mtp", "auto" (what belongs to the model) or "none"
    budget: int | str = "auto"  # most nodes besides the root; "auto" chooses each round
    block: int = 0  # positions that the draft fills; 0: as trained
    width: int = 0  # candidates of a position that may join a tree; 1: a chain; 0: any number
    ngram: str = "auto"  # look drafts up in the text: "on", "off" or "auto"
    max_ctx: int = 0
    math: str = "auto"  # "exact": float32 arithmetic on dequantised weights
    kv_k: str = "auto"  # format of cached keys, one of KV_NAMES
    kv_v: str = "auto"  # of cached values
    threads: int = 0
    chunk: int = 0  # tokens of one prefill pass
    gpu_memory: float = 0.0  # GiB of the GPU that may be used; 0: all of it
    prefix_bytes: int | str = "auto"  # main memory for earlier conversations; 0: none
    prefix_dir: str = ""  # a folder in which they outlive the engine; "": none
    parallel: int = 0  # unfinished requests that may take turns; 1: one after the other
    batching: str = "auto"  # rows of several requests in one pass: "off", "auto" or "always"
    window: int = 0  # positions that attention looks back, besides the beginning; 0: all
    warm_up: bool = False  # make at opening what would else be made by the first requests
    persistent: bool = False  # on a GPU: short passes and rounds are one kernel each (slower)
    compress: str = "off"  # leave parts of long messages out: "off", "auto" or "always"
    compress_keep: float | str = "auto"  # share of a text that its scores keep
    compress_with: str = "self"  # who scores: "self", or a model's name or path
    chat_template: str = ""  # a file with a Jinja template, or a name, in place of the model's own

    def __post_init__(self) -> None:
        checks = (
            (self.device in ("auto", "cpu", "cuda"), "device must be auto, cpu or cuda"),
            (self.math in ("auto", "exact"), "math must be auto or exact"),
            (0.0 <= self.gpu_memory < inf, "gpu memory must be positive, or 0 for all of it"),
            (self.kv_k in _ASKED_KV, f"kv k must be auto or one of {', '.join(KV_NAMES)}"),
            (self.kv_v in _ASKED_KV, f"kv v must be auto or one of {', '.join(KV_NAMES)}"),
            (self.ngram in ("auto", "on", "off"), "ngram must be auto, on or off"),
            (self.batching in BATCHING_NAMES, "batching must be off, auto or always"),
            (self.compress in COMPRESS_NAMES, "compress must be off, auto or always"),
            (is_share(self.compress_keep), "compress keep must be auto or a number in (0, 1]"),
            (bool(self.compress_with), "compress with must be self or name a model"),
            (
                self.budget == "auto" or _is_count(self.budget, 0, 1024),
                "budget must be auto or a number of nodes from 0 to 1024",
            ),
            (_is_count(self.block, 0, 64), "block must be between 2 and 64, or 0 as trained"),
            (_is_count(self.width), "width must be at least 1, or 0 for no limit"),
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
            (
                self.window == 0 or _is_count(self.window, max(_LEAST_WINDOW, self._budget + 1)),
                f"window must be at least {_LEAST_WINDOW} and more than the budget, or 0 for none",
            ),
        )
        for is_valid, sentence in checks:
            if not is_valid:
                raise ValueError(sentence)

    @property
    def _budget(self) -> int:
        return self.budget if isinstance(self.budget, int) else _MAX_BUDGET


@dataclass(frozen=True, slots=True)
class Plan:
    threads: int
    max_ctx: int
    chunk: int
    max_nodes: int
    is_exact: bool
    kv_k: str
    kv_v: str
    prefix_bytes: int  # main memory at most, as conversations fill it
    parallel: int  # unfinished requests at most, which take turns
    swapped_bytes: int  # main memory at most for copies of them, and what drafts have yet to read
    memory: MemoryPlan
    batch: int = 0  # of them, those that may write in one pass, each in a sequence of its own
    gpu: GpuInfo | None = None  # None: the CPU
    memory_limit: int = 0  # bytes of the GPU that may be used
    batch_bytes: int = 0  # of these, for sequences of the batch
    copy_bytes: int = 0  # and for copies of conversations
    window: int = 0  # positions that attention looks back, besides the beginning; 0: all
    width: int = 0  # candidates of a position in a tree; 0: any number
    is_persistent: bool = False
    kv_note: str = ""  # why "auto" did not choose the first format, for a user to read

    @property
    def left_bytes(self) -> int:
        """Of the GPU's memory, for what comes besides."""
        return self.memory_limit - self.memory.total - self.batch_bytes

    @property
    def kv(self) -> str:
        """Both formats in a word."""
        return kv_word(self.kv_k, self.kv_v)


def plan_parallel(
    config: EngineConfig,
    model: ModelConfig,
    draft: DraftSize | None,
    max_ctx: int,
    kv_bytes: int,
    free_bytes: int,
) -> tuple[int, int]:
    """How many requests may take turns, and the main memory that copies of them need at most.
    kv_bytes: the target's keys and values of one.
    """
    draft_bytes = 0 if draft is None else draft_kv_bytes(draft, max_ctx)
    request_bytes = int(_COPY_SIZE * (kv_bytes + draft_bytes))
    request_bytes += _NUM_STATES * model.recurrent_bytes
    request_bytes += feature_bytes(draft) if config.batching != "off" else 0
    count = config.parallel or max(count_in_share(_PARALLEL, request_bytes, free_bytes), 1)
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
    kv_k, kv_v = _choose_cpu_kv(config, model)
    budget = _MAX_BUDGET if config.budget == "auto" else int(config.budget)
    chunk, max_nodes = max(config.chunk or _CHUNK, budget + 1), budget + 1
    memory = plan_memory(
        model, max_ctx, kv_k, kv_v, exact=is_exact, chunk=chunk, max_nodes=max_nodes
    )
    limit = memory_limit if memory_limit is not None else machine_memory()
    if memory.total > limit:
        raise CapacityError(
            f"{model.name} needs {memory.total / _GIB:.1f} GiB (weights "
            f"{memory.weights / _GIB:.1f}, context of {max_ctx} tokens {memory.kv / _GIB:.1f}), "
            f"but the machine has {limit / _GIB:.1f} GiB; try a smaller --max-ctx or model."
        )
    free = limit - memory.total
    parallel, swapped_bytes = plan_parallel(config, model, draft, max_ctx, memory.kv, free)
    batch = count_in_share(parallel, memory.kv + model.recurrent_bytes, free - swapped_bytes)
    return Plan(
        threads=config.threads or usable_cores(),
        max_ctx=max_ctx,
        chunk=chunk,
        max_nodes=max_nodes,
        is_exact=is_exact,
        kv_k=kv_k,
        kv_v=kv_v,
        prefix_bytes=plan_prefix_bytes(config.prefix_bytes, free),
        parallel=parallel,
        swapped_bytes=swapped_bytes,
        memory=memory,
        batch=batch if config.batching != "off" and batch > 1 else 0,
        window=config.window,
        width=config.width,
    )


def _asked_kv(config: EngineConfig) -> tuple[str, str]:
    """The names that were given, spelt out; "auto" as it is."""
    kv_k, kv_v = (KV_ALIASES.get(name, name) for name in (config.kv_k, config.kv_v))
    if "f32" in (kv_k, kv_v) and {kv_k, kv_v} - {"f32", "auto"}:
        raise ValueError("f32 is for keys and values alike: give it for both")
    return kv_k, kv_v


def _check_heads(model: ModelConfig, kv_k: str, kv_v: str) -> None:
    for name, formats, words in ((kv_k, KEY_FORMATS, "keys"), (kv_v, VALUE_FORMATS, "values")):
        if name in formats and not formats[name].can_hold(model.head_dim):
            others = [other for other, form in formats.items() if form.can_hold(model.head_dim)]
            raise ValueError(
                f"{name} cannot hold {words} of {model.head_dim} dimensions, which {model.name} "
                f"has; choose {' or '.join(others)}"
            )


def _choose_cpu_kv(config: EngineConfig, model: ModelConfig) -> tuple[str, str]:
    kv_k, kv_v = _asked_kv(config)
    usual = "f32"
    if model.is_quantized and config.math != "exact":
        usual = BYTE_NAME if model.has_even_keys else "f16"
    given = {kv_k, kv_v} - {"auto"}
    if given and usual not in given:  # beside one that was asked for
        usual = "f32" if "f32" in given else "f16"
    kv_k, kv_v = (usual if name == "auto" else name for name in (kv_k, kv_v))
    if kv_word(kv_k, kv_v) != BYTE_NAME:  # its own bytes hold any head
        _check_heads(model, kv_k, kv_v)
    return kv_k, kv_v


def _kv_choices(config: EngineConfig, model: ModelConfig) -> list[tuple[str, str]]:
    """What a GPU may take, best first."""
    kv_k, kv_v = _asked_kv(config)
    _check_heads(model, kv_k, kv_v)
    names = [name for name in AUTO_NAMES if _suits(model, name)] or AUTO_NAMES[:1]
    choices = (
        (name if kv_k == "auto" else kv_k, name if kv_v == "auto" else kv_v) for name in names
    )
    return list(dict.fromkeys(choices))


def _suits(model: ModelConfig, name: str) -> bool:
    """Whether a format may be chosen for a user, or named to one."""
    is_spoilt = model.has_key_bias and not KEY_FORMATS[name].suits_bias(model.head_dim)
    return not is_spoilt and all(
        formats[name].can_hold(model.head_dim) for formats in (KEY_FORMATS, VALUE_FORMATS)
    )


def _gpu_tries(config: EngineConfig, model: ModelConfig) -> Iterator[tuple[int, str, str]]:
    """Chunks of prefill and formats: short chunks cost less than small formats, very short ones
    more.
    """
    choices = _kv_choices(config, model)
    for kv_k, kv_v in choices:
        for chunk in (config.chunk,) if config.chunk else _GPU_CHUNKS:
            yield chunk, kv_k, kv_v
    if not config.chunk:
        yield _LEAST_CHUNK, *choices[-1]


def _gpu_too_small(
    model: ModelConfig,
    gpu: GpuInfo,
    memory: MemoryPlan,
    context: str,
    limit: int,
    fitting: list[str],
) -> CapacityError:
    hint = f"--kv {' or '.join(fitting)}, " if fitting else ""
    return CapacityError(
        f"{model.name} needs {memory.total / _GIB:.1f} GiB (weights "
        f"{memory.weights / _GIB:.1f}, draft {memory.draft / _GIB:.1f}, context of {context} "
        f"{memory.kv / _GIB:.1f}, the rest "
        f"{(memory.scratch + memory.recurrent) / _GIB:.1f}), but {limit / _GIB:.1f} GiB of "
        f"{gpu.name} may be used; try {hint}a smaller --max-ctx, model or draft, or --device cpu."
    )


def _resolve_gpu(
    config: EngineConfig,
    model: ModelConfig,
    max_ctx: int,
    gpu: GpuInfo,
    draft: DraftSize | None,
    memory_limit: int | None,
) -> Plan:
    if config.math == "exact" or "f32" in (config.kv_k, config.kv_v):
        raise ValueError("exact math and f32 keys and values need the CPU: --device cpu")
    max_nodes = 1 + (_GPU_BUDGET if config.budget == "auto" else int(config.budget))
    if max_nodes > GPU_NODES:
        raise ValueError(f"on a GPU the budget is at most {GPU_NODES - 1}, not {config.budget}")
    limit = memory_limit or int(config.gpu_memory * _GIB) or gpu.memory_bytes
    first, largest = "", 0
    for chunk, kv_k, kv_v in _gpu_tries(config, model):
        chunk = max(chunk, max_nodes)
        memory = plan_gpu_memory(model, draft, max_ctx, chunk, max_nodes, kv_k, kv_v)
        first, word = first or kv_word(kv_k, kv_v), kv_word(kv_k, kv_v)
        is_extra = chunk == _GPU_CHUNKS[0] and not config.chunk  # a twentieth faster
        if memory.total <= (limit // 2 if is_extra else limit):  # so half must stay free
            break
        largest = memory.total if word == first else largest  # in the end with the shortest chunk
    else:
        fitting = [
            name
            for name in KEY_FORMATS
            if _suits(model, name)
            and plan_gpu_memory(model, draft, max_ctx, chunk, max_nodes, name, name).total <= limit
        ]
        raise _gpu_too_small(model, gpu, memory, f"{max_ctx} tokens in {word}", limit, fitting)
    needed = f"{largest / _GIB:.1f} GiB of {limit / _GIB:.1f}"
    note = "" if word == first else f"keys and values in {word}: {first} would need {needed}"
    free = machine_memory()
    parallel, swapped_bytes = plan_parallel(config, model, draft, max_ctx, memory.kv, free)
    sequence_bytes, left = memory.kv + model.recurrent_bytes, limit - memory.total
    batch = count_in_share(min(parallel, GPU_NODES), sequence_bytes, left)
    batch = batch if config.batching != "off" and batch > 1 and not config.persistent else 0
    return Plan(
        threads=config.threads or usable_cores(),
        max_ctx=max_ctx,
        chunk=chunk,
        max_nodes=max_nodes,
        is_exact=False,
        kv_k=kv_k,
        kv_v=kv_v,
        prefix_bytes=(prefix_bytes := plan_prefix_bytes(config.prefix_bytes, free)),
        parallel=parallel,
        swapped_bytes=swapped_bytes,
        memory=memory,
        gpu=gpu,
        memory_limit=limit,
        batch=batch,
        batch_bytes=batch * sequence_bytes,
        copy_bytes=min((left - batch * sequence_bytes) // 2, prefix_bytes + swapped_bytes),
        is_persistent=config.persistent,
        window=config.window,
        width=config.width,
        kv_note=note,
    )
