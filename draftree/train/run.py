"""A whole training run in one folder: text, draft, record, files, card.

In: a target's checkpoint, prompts, a TrainConfig. Out: a folder that holds the draft in both
formats, the record of the run, its plot and a model card. Calling it again on the same folder goes
on where it stopped.
"""

import hashlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from draftree.errors import ModelError
from draftree.text.tokenizer import Tokenizer
from draftree.train.card import draw_curve, make_card
from draftree.train.corpus import Corpus, write_corpus
from draftree.train.draft import DraftModule, DraftSpec, resolve_shape
from draftree.train.drafted_block import DraftedBlocks
from draftree.train.export import check_formats, export_folder, export_gguf
from draftree.train.initial import compare_shapes, copy_weights, take_shape
from draftree.train.loop import CurvePoint, Feeder, Trainer
from draftree.train.own_prompt import MakeWriter, write_own_prompts
from draftree.train.prompt import Prompt, encode_prompts, spare_token
from draftree.train.selector import BlockSource, SelectorModule, SelectorPoint, train_selector
from draftree.train.selector_file import new_module, write_selector
from draftree.train.settings import SelectorConfig, SelectorPlan, TrainConfig
from draftree.train.teacher import Teacher, load_teacher
from draftree.train.writer import Writer
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint

_PROMPT_SHARE = 0.5  # of a sequence, at most
HEAD_TOKENS = 8192  # tokens that a draft proposes, of a larger vocabulary


class Measured(Protocol):
    """A point of a curve, as far as those who show it need it."""

    @property
    def step(self) -> int: ...
    @property
    def held_out_loss(self) -> float: ...
    @property
    def acceptance_length(self) -> float: ...


class Watcher(Protocol):
    """Whoever shows how the run is going."""

    def phase(self, name: str, total: int) -> None: ...
    def advance(self, done: int, note: str) -> None: ...
    def point(self, point: Measured) -> None: ...


@dataclass(frozen=True, slots=True)
class Trained:
    draft: DraftModule
    curve: list[CurvePoint]
    folder: Path
    selector: list[SelectorPoint]  # empty where none was asked for


def train_draft(
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    config: TrainConfig,
    folder: Path,
    device: torch.device,
    watcher: Watcher,
    formats: Sequence[str] = ("bf16", "q8"),
    source: str = "",
    start: Checkpoint | None = None,
) -> Trained:
    """source says in the card where the prompts come from; start is a draft to go on from."""
    check_formats(formats)
    folder.mkdir(parents=True, exist_ok=True)
    claim_folder(folder, config, checkpoint, prompts, start)
    tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
    dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
    watcher.phase("reading the target", 0)
    teacher = load_teacher(checkpoint, device, dtype)
    spec = _resolve_spec(teacher, tokenizer, config, start)
    make_writer, plan = partial(Writer, teacher), config.schedule
    corpus = write_text(
        *(make_writer, tokenizer, prompts, config, folder, watcher),
        lambda done: f"{done / 1e6:.2f} M tokens",
    )
    passed = watch_phase(watcher, "training", plan.num_steps, plan.max_minutes)
    trainer = Trainer(teacher, corpus, spec, config)
    if start is not None:
        copy_weights(start, trainer.draft)

    selector: list[SelectorPoint] = []

    def record() -> dict[str, Any]:
        curves = trainer.curve, selector
        return write_record(folder, config, spec, corpus, curves, checkpoint, source, start)

    def report(step: int, loss: float, point: CurvePoint | None) -> None:
        watcher.advance(passed(step), f"step {step:,}, loss {loss:.3f}")
        if point is not None:
            watcher.point(point)
            record()

    trainer.run(folder / "state.pt", report)
    name = f"{checkpoint.metadata.get('general.name') or checkpoint.path.stem} DFlash"
    draft_vocab = corpus.frequent_tokens(HEAD_TOKENS if spec.vocab_size > 2 * HEAD_TOKENS else 0)
    paths = _write_files(trainer.draft, folder, formats, name, draft_vocab, watcher)
    if config.selector is not None:
        feeder = Feeder(corpus, plan, spec, config.seed + 1, device)
        listed = draft_vocab or list(range(spec.vocab_size))
        blocks = DraftedBlocks(trainer.draft, teacher, feeder, listed, config.selector.top_k)
        selector += _add_selector(checkpoint, blocks, listed, config, paths, watcher)
    draw_curve(trainer.curve, folder / "curve.png")
    (folder / "README.md").write_text(make_card(record(), name), encoding="utf-8")
    return Trained(trainer.draft, trainer.curve, folder, selector)


def write_text(
    make_writer: MakeWriter,
    tokenizer: Tokenizer,
    prompts: Sequence[Prompt],
    config: TrainConfig | SelectorConfig,
    folder: Path,
    watcher: Watcher,
    describe: Callable[[int], str],
) -> Corpus:
    """Replies to these prompts and the target's own. describe: so many tokens, in words."""
    text, seed, own = config.text, config.seed, list[Prompt]()
    if text.num_own_prompts:
        watcher.phase("writing prompts", text.num_own_prompts)
        own = write_own_prompts(
            *(make_writer, tokenizer, text.num_own_prompts, text.batch_size, seed, folder),
            lambda done: watcher.advance(done, f"{done:,} prompts"),
        )
    encoded = encode_prompts([*prompts, *own], tokenizer, int(_PROMPT_SHARE * text.max_len))
    count = watch_phase(watcher, "writing text", text.num_tokens, text.max_minutes)
    return write_corpus(
        make_writer(text.batch_size, text.max_len, sorted(tokenizer.stop_ids)),
        *(encoded, text, seed, folder),
        lambda done: watcher.advance(count(done), describe(done)),
    )


def _write_files(
    draft: DraftModule,
    folder: Path,
    formats: Sequence[str],
    name: str,
    draft_vocab: Sequence[int],
    watcher: Watcher,
) -> list[Path]:
    """z-lab's layout, and the GGUF files that are returned."""
    watcher.phase("writing files", 0)
    export_folder(draft, folder)
    paths = [folder / f"draft-{kind}.gguf" for kind in formats]
    for path, kind in zip(paths, formats, strict=True):
        export_gguf(draft, path, kind, name, draft_vocab)
    return paths


def watch_phase(
    watcher: Watcher, name: str, total: int, max_minutes: float
) -> Callable[[int], int]:
    """Begin a phase that ends by count, or by the clock where that is limited. The result says how
    far it is, from the count so far.
    """
    started, seconds = time.monotonic(), round(60 * max_minutes)
    watcher.phase(name, seconds or total)
    return lambda done: int(time.monotonic() - started) if seconds else done


def watch_selector(
    module: SelectorModule, source: BlockSource, plan: SelectorPlan, seed: int, watcher: Watcher
) -> list[SelectorPoint]:
    passed = watch_phase(watcher, "training a selector", plan.num_steps, plan.max_minutes)

    def report(step: int, point: SelectorPoint | None) -> None:
        watcher.advance(passed(step), f"step {step:,}")
        if point is not None:
            watcher.point(point)

    return train_selector(module, source, plan, seed, report)


def _add_selector(
    checkpoint: Checkpoint,
    blocks: DraftedBlocks,
    listed: Sequence[int],
    config: TrainConfig,
    paths: Sequence[Path],
    watcher: Watcher,
) -> list[SelectorPoint]:
    """A file with a selector beside each of the draft's; what was learned stays in the folder."""
    plan = config.selector
    assert plan is not None
    module = new_module(checkpoint, listed, plan, config.seed).to(blocks.device)
    learned = paths[0].with_name("selector.pt")
    if learned.is_file():
        state = torch.load(learned, map_location=blocks.device, weights_only=True)
        module.load_state_dict(state["module"])
        curve = [SelectorPoint(**point) for point in state["curve"]]
    else:
        curve = watch_selector(module, blocks, plan, config.seed, watcher)
        state = {"module": module.state_dict(), "curve": [asdict(point) for point in curve]}
        torch.save(state, learned.with_suffix(".partial"))
        learned.with_suffix(".partial").replace(learned)
    for path in paths:
        out = path.with_name(f"{path.stem}-selector.gguf")
        write_selector(open_checkpoint(path), module.tables(), plan, listed, out)
    return curve


def write_record(
    folder: Path,
    config: TrainConfig,
    spec: DraftSpec,
    corpus: Corpus,
    curves: tuple[Sequence[CurvePoint], Sequence[SelectorPoint]],
    checkpoint: Checkpoint,
    source: str,
    start: Checkpoint | None = None,
) -> dict[str, Any]:
    """record.json: what was asked, what was read, how the draft and its selector went."""
    lengths = corpus.lengths
    record = {
        "target": str(checkpoint.metadata.get("general.name") or checkpoint.path.stem),
        "target_file": checkpoint.path.name,
        "config": asdict(config),
        "draft": asdict(spec),
        "start": None if start is None else start.path.name,
        "text": {
            "source": source,
            "num_sequences": corpus.num_sequences,
            "num_held_out": int(corpus.is_held_out.sum()),
            "num_greedy": int(corpus.is_greedy.sum()),
            "num_tokens": int(lengths.sum()),
            "num_written": corpus.num_written,
        },
        "torch": torch.__version__,
        "curve": [asdict(point) for point in curves[0]],
        "selector": [asdict(point) for point in curves[1]],
    }
    save_record(record, folder)
    return record


def save_record(record: dict[str, Any], folder: Path) -> None:
    unfinished = folder / "record.partial"
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(folder / "record.json")


def _resolve_spec(
    teacher: Teacher, tokenizer: Tokenizer, config: TrainConfig, start: Checkpoint | None
) -> DraftSpec:
    """A draft to go on from that has another shape is refused before anything is written."""
    shape = config.shape if start is None else take_shape(start, config.shape)
    if shape.mask_token >= tokenizer.vocab_size:
        raise ModelError(f"There is no token {shape.mask_token} to use as a mask.")
    mask_token = shape.mask_token if shape.mask_token >= 0 else spare_token(tokenizer)
    spec = resolve_shape(shape, teacher, mask_token, config.text.max_len)
    if start is not None:
        compare_shapes(start, spec)
    return spec


def claim_folder(
    folder: Path,
    config: TrainConfig | SelectorConfig,
    checkpoint: Checkpoint,
    prompts: Sequence[Prompt],
    start: Checkpoint | None,
) -> None:
    """A folder belongs to one run: going on with other settings would mix two."""
    name = checkpoint.path.name
    inputs = (name, *prompts) if start is None else (name, str(start.path.resolve()), *prompts)
    digest = hashlib.sha256(repr(inputs).encode()).hexdigest()
    wanted = json.dumps({"config": asdict(config), "input": digest}, indent=1) + "\n"
    path = folder / "run.json"
    if path.is_file() and path.read_text(encoding="utf-8") != wanted:
        raise ModelError(
            f"{folder} holds a run with other settings or prompts; give another folder, "
            "or repeat the settings to go on with it."
        )
    path.write_text(wanted, encoding="utf-8")
