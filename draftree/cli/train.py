"""`draftree train`: make a draft for a model. The folder of the result goes to stdout, how it is
going to stderr.
"""

import random
import sys
import sysconfig
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final, Literal

import typer

from draftree.cli.option import DEFAULT_MODEL
from draftree.errors import ModelError, require_packages

if TYPE_CHECKING:
    from draftree.train.prompt import Prompt
    from draftree.train.run import Measured
    from draftree.train.settings import SelectorPlan, TrainConfig

_NUM_TEMPLATES: Final = 40_000
_NUM_SOURCES: Final = 10_000
_WRITE_SHARE, _TRAIN_SHARE = 0.25, 0.65  # of the hours; the rest is for reading and files
_NO_LIMIT: Final = 1_000_000_000  # the clock decides
_PACKAGE_PROMPTS: Final = "templates of the package, beginnings of Python's standard library"
_FORMATS: Final = {"bf16": "bf16", "f16": "f16", "q8_0": "q8", "q4_1": "q4"}


def panel_option(panel: str, help_text: str, *names: str, **details: Any) -> Any:
    return typer.Option(*names, help=help_text, rich_help_panel=panel, **details)


Model = Annotated[str, typer.Argument(metavar="MODEL", help="The target: a name or a GGUF file.")]
Out = Annotated[
    Path, typer.Option("--out", "-o", help="Folder of the run; an interrupted one goes on.")
]
Prompts = Annotated[
    list[Path] | None,
    typer.Option(
        help='Prompts: .jsonl with "prompt" and "chat", or text; several times. '
        "Without any, prompts that come with the package are used.",
        show_default=False,
    ),
]
Start = Annotated[
    Path | None,
    typer.Option(
        "--from", help="A draft to go on from: a folder or a GGUF file.", show_default=False
    ),
]
Device = Annotated[
    Literal["auto", "cuda", "cpu"], typer.Option(help="Where to train; auto takes a GPU.")
]
Formats = Annotated[
    list[str] | None,
    typer.Option(
        "--format",
        help="A GGUF file to write: bf16, f16, q8_0, or q4_1, which the draft then learns for; "
        "several times. bf16 and q8_0 if none.",
        show_default=False,
    ),
]
Seed = Annotated[int, typer.Option(help="The same seed gives the same run.")]
Hours = Annotated[
    float, typer.Option(help="Hours in all, shared by writing and training; 0 is no limit.", min=0)
]
Layers = Annotated[int, panel_option("Draft", "Layers of the draft.", min=1)]
Ffn = Annotated[int, panel_option("Draft", "Feed-forward width; 0 takes the target's.", min=0)]
BlockLen = Annotated[int, panel_option("Draft", "Tokens it fills in one pass.", min=2, max=64)]
Window = Annotated[
    int, panel_option("Draft", "Sliding window of its attention; 0 is --max-len, -1 none.", min=-1)
]
Mask = Annotated[int, panel_option("Draft", "Id of an unused token; -1 finds one.", min=-1)]
OwnPrompts = Annotated[
    int,
    panel_option("Text", "Prompts that the target writes; with --prompts, besides those.", min=0),
]
Tokens = Annotated[int, panel_option("Text", "Tokens that the target writes.", min=1)]
MaxLen = Annotated[int, panel_option("Text", "Longest sequence, prompt included.", min=8)]
BatchLen = Annotated[int, panel_option("Text", "Sequences written at once.", min=1)]
Greedy = Annotated[float, panel_option("Text", "Share written greedily.", min=0, max=1)]
WriteLimit = Annotated[
    float, panel_option("Text", "Stop writing after so many minutes; 0 is never.", min=0)
]
Steps = Annotated[int, panel_option("Training", "Steps.", min=1)]
StepTokens = Annotated[int, panel_option("Training", "Tokens of text read in a step.", min=8)]
Rate = Annotated[float, panel_option("Training", "Learning rate.")]
Optimizer = Annotated[
    Literal["muon", "adamw"], panel_option("Training", "What the matrices learn with.")
]
Decay = Annotated[
    float, panel_option("Training", "Rows of a block over which their weight falls by e.")
]
Distill = Annotated[
    float, panel_option("Training", "Share of the label from the target's probabilities.", min=0)
]
RoundAnchors = Annotated[
    float,
    panel_option("Training", "Share of blocks that begin where rounds do.", min=0, max=1),
]
LossTokens = Annotated[
    int,
    panel_option("Training", "Frequent tokens in the loss, others are sampled; 0 is all.", min=0),
]
TrainLimit = Annotated[
    float, panel_option("Training", "End after so many minutes; 0 is after all steps.", min=0)
]
SelectorRank = Annotated[
    int,
    panel_option("Selector", "Train one of this rank afterwards, 32, 64 … 256; 0 is none.", min=0),
]
SelectorLimit = Annotated[
    float, panel_option("Selector", "End after so many minutes; 0 is after all steps.", min=0)
]


def train(
    model: Model = DEFAULT_MODEL,
    out: Out = Path("draft"),
    prompts: Prompts = None,
    start: Start = None,
    device: Device = "auto",
    file_format: Formats = None,
    seed: Seed = 0,
    hours: Hours = 0.0,
    layers: Layers = 4,
    ffn: Ffn = 0,
    block: BlockLen = 8,
    window: Window = 0,
    mask_token: Mask = -1,
    own_prompts: OwnPrompts = 0,
    tokens: Tokens = 20_000_000,
    max_len: MaxLen = 512,
    batch: BatchLen = 1024,
    greedy_share: Greedy = 0.65,
    write_minutes: WriteLimit = 0.0,
    steps: Steps = 6000,
    batch_tokens: StepTokens = 16_384,
    learning_rate: Rate = 3e-3,
    optimizer: Optimizer = "muon",
    depth_decay: Decay = 4.0,
    distill: Distill = 0.0,
    round_anchors: RoundAnchors = 0.0,
    loss_tokens: LossTokens = 0,
    train_minutes: TrainLimit = 0.0,
    selector: SelectorRank = 0,
    selector_minutes: SelectorLimit = 0.0,
) -> None:
    """Train a draft for a model, on text that the model writes."""
    from draftree.train.settings import DraftShape, Schedule, TextPlan, TrainConfig

    formats = _check_formats(file_format or ["bf16", "q8_0"])
    if hours:
        tokens, steps, minutes = _NO_LIMIT, _NO_LIMIT, 60 * hours
        write_minutes = write_minutes or _WRITE_SHARE * minutes
        train_minutes = train_minutes or _TRAIN_SHARE * minutes
    shape = DraftShape(layers, ffn, block_size=block, mask_token=mask_token, sliding_window=window)
    text = TextPlan(
        *(tokens, max_len, batch, greedy_share),
        max_minutes=write_minutes,
        num_own_prompts=own_prompts,
    )
    schedule = Schedule(
        *(steps, batch_tokens),
        learning_rate=learning_rate,
        optimizer=optimizer,
        depth_decay=depth_decay,
        distill_share=distill,
        round_anchor_share=round_anchors,
        num_loss_tokens=loss_tokens,
        max_minutes=train_minutes,
    )
    own_selector = _plan_selector(selector, selector_minutes)
    config = TrainConfig(shape, text, schedule, seed, "q4_1" in formats, own_selector)
    _train(model, out, prompts or [], start, device, formats, config)
    print(out)


def _plan_selector(rank: int, minutes: float) -> "SelectorPlan | None":
    from draftree.train.settings import SelectorPlan

    if not rank:
        return None
    plan = SelectorPlan(rank=rank, max_minutes=minutes)
    return replace(plan, num_steps=_NO_LIMIT) if minutes else plan


def _check_formats(formats: list[str]) -> list[str]:
    unknown = next((name for name in formats if name not in _FORMATS), None)
    if unknown is not None:
        raise typer.BadParameter(f"--format is {unknown!r}; it must be {', '.join(_FORMATS)}.")
    return formats


def _train(
    model: str,
    out: Path,
    prompts: list[Path],
    start: Path | None,
    device: str,
    formats: list[str],
    config: "TrainConfig",
) -> None:
    require_packages("Training", "train", "torch", "safetensors", "gguf")
    import torch

    from draftree.train.run import train_draft
    from draftree.weights.file import open_checkpoint
    from draftree.weights.hub import resolve

    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    elif device == "cuda" and not torch.cuda.is_available():
        raise ModelError("There is no GPU that torch can use here; try --device cpu.")
    checkpoint = open_checkpoint(resolve(model))
    has_own = config.text.num_own_prompts > 0
    texts, source = collect_prompts(prompts, config.seed, has_own=has_own)
    with watch() as watcher:
        train_draft(
            *(checkpoint, texts, config, out, torch.device(device), watcher),
            *([_FORMATS[name] for name in formats], source),
            start=open_checkpoint(start) if start else None,
        )


def collect_prompts(paths: list[Path], seed: int, *, has_own: bool) -> "tuple[list[Prompt], str]":
    """And where they come from; the package's own if there would be none at all."""
    if has_own and not paths:
        return [], ""
    return _read_all(paths, seed), ", ".join(path.name for path in paths) or _PACKAGE_PROMPTS


def _read_all(paths: list[Path], seed: int) -> "list[Prompt]":
    from draftree.train.prompt import read_prompts, source_prompts, template_prompts

    if paths:
        return [prompt for path in paths for prompt in read_prompts(path)]
    library = Path(sysconfig.get_paths()["stdlib"])
    rng = random.Random(seed)
    sources = list(source_prompts(library, rng, (".py",)))
    rng.shuffle(sources)
    return [*template_prompts(_NUM_TEMPLATES, seed), *sources[:_NUM_SOURCES]]


class LineWatcher:
    """Lines for a log: every phase, every measurement, and now and then how far it is."""

    def __init__(self) -> None:
        self._total = 0
        self._shown = 0

    def phase(self, name: str, total: int) -> None:
        self._total, self._shown = total, 0
        print(name, file=sys.stderr, flush=True)

    def advance(self, done: int, note: str) -> None:
        if self._total and done * 20 // self._total > self._shown:
            self._shown = done * 20 // self._total
            print(f"  {min(100 * done // self._total, 100)}% {note}", file=sys.stderr, flush=True)

    def point(self, point: "Measured") -> None:
        print(f"  {describe_point(point)}", file=sys.stderr, flush=True)


class BarWatcher:
    """A progress bar for each phase; measurements stay above it."""

    def __init__(self, bars: Any) -> None:
        self._bars = bars
        self._task: Any = None

    def phase(self, name: str, total: int) -> None:
        if self._task is not None:
            self._bars.remove_task(self._task)
        self._task = self._bars.add_task(name, total=total or None, note="")

    def advance(self, done: int, note: str) -> None:
        self._bars.update(self._task, completed=done, note=note)

    def point(self, point: "Measured") -> None:
        self._bars.console.print(describe_point(point), highlight=False)


def describe_point(point: "Measured") -> str:
    return (
        f"step {point.step}: held-out loss {point.held_out_loss:.3f}, "
        f"acceptance length {point.acceptance_length:.2f}"
    )


@contextmanager
def watch() -> Iterator[Any]:
    if not sys.stderr.isatty():
        yield LineWatcher()
        return
    from rich import progress
    from rich.console import Console

    columns = (
        progress.TextColumn("{task.description}"),
        progress.BarColumn(),
        progress.TextColumn("{task.fields[note]}"),
        progress.TimeRemainingColumn(),
    )
    with progress.Progress(*columns, console=Console(stderr=True)) as bars:
        yield BarWatcher(bars)
