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
from draftree.train.export import check_formats, export_folder, export_gguf
from draftree.train.initial import compare_shapes, copy_weights
from draftree.train.loop import CurvePoint, Trainer
from draftree.train.own_prompt import write_own_prompts
from draftree.train.prompt import Prompt, encode_prompts, spare_token
from draftree.train.settings import SelectorConfig, TrainConfig
from draftree.train.teacher import Teacher, load_teacher
from draftree.train.writer import Writer
from draftree.weights.checkpoint import Checkpoint

PROMPT_SHARE = 0.5  # of a sequence, at most
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
    spec = resolve_shape(config.shape, teacher, _mask_token(config, tokenizer), config.text.max_len)
    if start is not None:  # a draft of another shape is refused before anything is written
        compare_shapes(start, spec)
    own = _own_prompts(teacher, tokenizer, config, folder, watcher)
    encoded = encode_prompts([*prompts, *own], tokenizer, int(PROMPT_SHARE * config.text.max_len))
    count = watch_phase(watcher, "writing text", config.text.num_tokens, config.text.max_minutes)
    text = config.text
    corpus = write_corpus(
        Writer(teacher, text.batch_size, text.max_len, sorted(tokenizer.stop_ids)),
        encoded,
        text,
        config.seed,
        folder,
        lambda done: watcher.advance(count(done), f"{done / 1e6:.2f} M tokens"),
    )
    plan = config.schedule
    passed = watch_phase(watcher, "training", plan.num_steps, plan.max_minutes)
    trainer = Trainer(teacher, corpus, spec, config)
    if start is not None:
        copy_weights(start, trainer.draft)

    def record() -> dict[str, Any]:
        return write_record(folder, config, spec, corpus, trainer.curve, checkpoint, source, start)

    def report(step: int, loss: float, point: CurvePoint | None) -> None:
        watcher.advance(passed(step), f"step {step:,}, loss {loss:.3f}")
        if point is not None:
            watcher.point(point)
            record()

    trainer.run(folder / "state.pt", report)
    watcher.phase("writing files", 0)
    name = f"{checkpoint.metadata.get('general.name') or checkpoint.path.stem} DFlash"
    export_folder(trainer.draft, folder)
    num_listed = HEAD_TOKENS if spec.vocab_size > 2 * HEAD_TOKENS else 0
    draft_vocab = corpus.frequent_tokens(num_listed)
    for kind in formats:
        export_gguf(trainer.draft, folder / f"draft-{kind}.gguf", kind, name, draft_vocab)
    draw_curve(trainer.curve, folder / "curve.png")
    (folder / "README.md").write_text(make_card(record(), name), encoding="utf-8")
    return Trained(trainer.draft, trainer.curve, folder)


def watch_phase(
    watcher: Watcher, name: str, total: int, max_minutes: float
) -> Callable[[int], int]:
    """Begin a phase that ends by count, or by the clock where that is limited. The result says how
    far it is, from the count so far.
    """
    started, seconds = time.monotonic(), round(60 * max_minutes)
    watcher.phase(name, seconds or total)
    return lambda done: int(time.monotonic() - started) if seconds else done


def write_record(
    folder: Path,
    config: TrainConfig,
    spec: DraftSpec,
    corpus: Corpus,
    curve: Sequence[CurvePoint],
    checkpoint: Checkpoint,
    source: str,
    start: Checkpoint | None = None,
) -> dict[str, Any]:
    """record.json: what was asked, what was read, how it went."""
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
        "curve": [asdict(point) for point in curve],
    }
    save_record(record, folder)
    return record


def save_record(record: dict[str, Any], folder: Path) -> None:
    unfinished = folder / "record.partial"
    unfinished.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    unfinished.replace(folder / "record.json")


def _own_prompts(
    teacher: Teacher, tokenizer: Tokenizer, config: TrainConfig, folder: Path, watcher: Watcher
) -> list[Prompt]:
    count = config.text.num_own_prompts
    if not count:
        return []
    watcher.phase("writing prompts", count)
    return write_own_prompts(
        partial(Writer, teacher),
        tokenizer,
        count,
        config.text.batch_size,
        config.seed,
        folder,
        lambda done: watcher.advance(done, f"{done:,} prompts"),
    )


def _mask_token(config: TrainConfig, tokenizer: Tokenizer) -> int:
    token = config.shape.mask_token
    if token >= tokenizer.vocab_size:
        raise ModelError(f"There is no token {token} to use as a mask.")
    return token if token >= 0 else spare_token(tokenizer)


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
