"""`draftree inspect`: what a model file holds and which machines it fits, without loading it."""

from collections import Counter
from dataclasses import dataclass
from math import prod
from typing import TYPE_CHECKING, Annotated, Final

import typer

from draftree.errors import CapacityError, DraftreeError

if TYPE_CHECKING:
    from rich.table import Table

    from draftree.core import DraftSize, ModelConfig
    from draftree.weights.checkpoint import Checkpoint

_GPU_SIZES: Final = (8, 12, 16, 24)
_SMALL_CHUNK: Final = 256  # tokens of a prefill pass where memory is short
_CONTEXTS: Final = (2048, 8192, 32768, 131072)
_KV_SIZES: Final = (16, 24)  # GB of the GPUs whose longest contexts are shown
_KV_TYPES: Final = ("q8_0", "f16", "f32")  # as config.py names them, smallest first
_NO_LIMIT: Final = 2**63


@dataclass(frozen=True, slots=True)
class Place:
    """Somewhere a model could live."""

    name: str
    num_bytes: int


def inspect(
    file: Annotated[
        str, typer.Argument(metavar="FILE", help="A GGUF file, a draft folder or a model's name.")
    ],
    draft: Annotated[
        str | None, typer.Option(help="A draft, whose memory on a GPU is planned as well.")
    ] = None,
) -> None:
    """Show what a model file holds, and where it fits."""
    from rich.console import Console

    from draftree.drafts.registry import is_draft, read_draft_size
    from draftree.engine.locate import name_draft, open_draft
    from draftree.models.model_config import read_model_config
    from draftree.weights import hub
    from draftree.weights.file import open_checkpoint

    checkpoint = open_checkpoint(hub.resolve(file))
    console = Console(highlight=False, soft_wrap=True)
    for label, value in describe(checkpoint):
        console.print(f"{label:<15}{value}", markup=False)
    console.print()
    console.print(tensor_table(checkpoint))
    console.print()
    if is_draft(checkpoint):
        kind = name_draft(checkpoint)
        console.print(f"This is a {kind} draft; its memory is planned together with its target's.")
        return
    try:
        model = read_model_config(checkpoint)
    except DraftreeError as error:
        console.print(f"Memory is not known: {error}", markup=False)
        return
    console.print(memory_table(model, list_places()))
    size = read_draft_size(open_draft(draft, checkpoint)) if draft else None
    console.print()
    console.print(gpu_table(model, size, list_gpus()))
    console.print()
    console.print(format_table(model, size, [_sized(number) for number in _KV_SIZES]))


def describe(checkpoint: "Checkpoint") -> list[tuple[str, str]]:
    from draftree.weights.mtp import split_mtp

    metadata, architecture = checkpoint.metadata, checkpoint.architecture
    num_parameters = sum(prod(tensor.shape) for tensor in checkpoint.tensors.values())
    weight_bytes = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    bits = 8 * weight_bytes / num_parameters if num_parameters else 0
    kinds = [metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")]
    tokens = metadata.get("tokenizer.ggml.tokens") or ()
    tokenizer = " / ".join(str(kind) for kind in kinds if kind is not None) or "none"
    return [
        ("file", str(checkpoint.path)),
        ("name", _shorten(metadata.get("general.name") or "-")),
        ("architecture", _shorten(architecture)),
        ("parameters", f"{format_count(num_parameters)} ({bits:.2f} bits each)"),
        ("weights", f"{format_bytes(weight_bytes)} in {len(checkpoint.tensors)} tensors"),
        ("layers", _shorten(metadata.get(f"{architecture}.block_count", "-"))),
        ("context", _shorten(metadata.get(f"{architecture}.context_length", "-"))),
        ("tokenizer", f"{_shorten(tokenizer)}, {len(tokens)} tokens" if tokens else tokenizer),
        ("chat template", "yes" if metadata.get("tokenizer.chat_template") else "no"),
        *([("draft inside", "MTP: --draft mtp")] if split_mtp(checkpoint) is not None else []),
    ]


def tensor_table(checkpoint: "Checkpoint") -> "Table":
    """Tensors by number format, the largest share first."""
    from rich.table import Table

    counts: Counter[str] = Counter()
    sizes: Counter[str] = Counter()
    for tensor in checkpoint.tensors.values():
        counts[tensor.qtype.name] += 1
        sizes[tensor.qtype.name] += tensor.nbytes
    table = Table("type", box=None, pad_edge=False)
    table.add_column("tensors", justify="right")
    table.add_column("size", justify="right")
    for name, size in sizes.most_common():
        table.add_row(name, str(counts[name]), format_bytes(size))
    return table


def _new_table(title: str, *headings: str) -> "Table":
    from rich.table import Table

    table = Table(box=None, pad_edge=False, title_justify="left", title_style="", title=title)
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    return table


def memory_table(model: "ModelConfig", places: list[Place]) -> "Table":
    """What the engine would plan for several context lengths, and which KV types fit where."""
    steps = _context_steps(model)
    title = "main memory by context length and KV type; fits"
    table = _new_table(title, "context", *_KV_TYPES, *(place.name for place in places))
    for num_tokens in steps:
        sizes = {kv_type: plan_bytes(model, num_tokens, kv_type) for kv_type in _KV_TYPES}
        fits = (fit_word(sizes, place.num_bytes) for place in places)
        table.add_row(str(num_tokens), *map(format_bytes, sizes.values()), *fits)
    return table


def gpu_table(model: "ModelConfig", draft: "DraftSize | None", gpus: list[Place]) -> "Table":
    """What the engine would plan on a GPU, by purpose, and which GPUs hold it."""
    from draftree.config import GPU_NODES
    from draftree.memory import plan_gpu_memory

    title = "memory on a GPU by context length, f16 keys and values; fits a GPU of"
    table = _new_table(
        title, "context", "weights", "draft", "KV", "other", *(gpu.name for gpu in gpus)
    )
    for num_tokens in _context_steps(model):
        memory = plan_gpu_memory(model, draft, num_tokens, _SMALL_CHUNK, GPU_NODES)
        rest = memory.scratch + memory.recurrent
        parts = (memory.weights, memory.draft, memory.kv, rest)
        fits = ("yes" if memory.total <= gpu.num_bytes else "no" for gpu in gpus)
        table.add_row(str(num_tokens), *map(format_bytes, parts), *fits)
    return table


def format_table(model: "ModelConfig", draft: "DraftSize | None", gpus: list[Place]) -> "Table":
    """The longest context by format of keys and values, as the engine would plan it."""
    from draftree.config import KV_NAMES
    from draftree.memory import kv_bytes

    title = f"longest context on a GPU, in tokens; the model's own is {model.context_length}"
    table = _new_table(title, "keys and values", "bytes a token", *(gpu.name for gpu in gpus))
    for name in KV_NAMES[1:]:
        longest = [find_longest(model, draft, name, gpu) for gpu in gpus]
        words = ("none" if length == 0 else str(length) for length in longest)
        table.add_row(name, str(kv_bytes(model, name, name)), *words)
    return table


def find_longest(model: "ModelConfig", draft: "DraftSize | None", kv: str, gpu: Place) -> int:
    """The longest context that is planned without a refusal, 0 if none is."""
    from draftree.config import EngineConfig, GpuInfo, resolve

    def fits(max_ctx: int) -> bool:
        config = EngineConfig(max_ctx=max_ctx, kv_k=kv, kv_v=kv)
        try:
            resolve(config, model, gpu=GpuInfo(0, gpu.name, gpu.num_bytes), draft=draft)
        except (CapacityError, ValueError):  # too large, or a format that cannot hold the heads
            return False
        return True

    low, high = 1, model.context_length + 1  # the first fits nothing that is asked, the last never
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return low if low > 1 else 0


def plan_bytes(model: "ModelConfig", num_tokens: int, kv_type: str) -> int:
    from draftree.config import EngineConfig, resolve

    config = EngineConfig(max_ctx=num_tokens, kv_k=kv_type, kv_v=kv_type)
    return resolve(config, model, memory_limit=_NO_LIMIT).memory.total


def fit_word(sizes: dict[str, int], room: int) -> str:
    """Which KV types fit into the room: all, or the largest that does; sizes rise."""
    fitting = [kv_type for kv_type, size in sizes.items() if size <= room]
    if len(fitting) == len(sizes):
        return "yes"
    return fitting[-1] if fitting else "no"


def _context_steps(model: "ModelConfig") -> list[int]:
    return [*(step for step in _CONTEXTS if step < model.context_length), model.context_length]


def list_places() -> list[Place]:
    from draftree.memory import machine_memory

    return [Place("here", machine_memory())]


def list_gpus() -> list[Place]:
    """The usual sizes, and the GPU that is here."""
    from draftree.engine.gpu import find_gpu

    here = find_gpu("auto")
    gpus = [_sized(size) for size in _GPU_SIZES]
    return [*gpus, *([Place("here", here.memory_bytes)] if here else [])]


def _sized(size: int) -> Place:
    return Place(f"{size} GB", size * 2**30)


def format_bytes(num_bytes: int) -> str:
    size = float(num_bytes)
    for unit in ("B", "KiB", "MiB"):
        if size < 1024:
            return f"{size:.0f} {unit}" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"


def format_count(count: int) -> str:
    for divisor, unit in ((10**9, "billion"), (10**6, "million")):
        if count >= divisor:
            return f"{count / divisor:.2f} {unit}"
    return str(count)


def _shorten(value: object) -> str:
    """One short line of a value that a stranger wrote."""
    from draftree.cli.printer import show_controls

    text = show_controls(" ".join(str(value).split()))
    return text if len(text) <= 80 else f"{text[:77]}..."
