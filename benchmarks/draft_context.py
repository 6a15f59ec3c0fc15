"""How far back a draft needs to look: acceptance length by depth of context and bound on the
draft's, and whether every text is the one that plain decoding gives.

In: a model and its draft. Out: a result file. A text is read once for all bounds, since a draft's
keys and values do not depend on how far it looks. With a fixed budget nothing depends on the
machine.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.markdown import table
from benchmarks.window import make_windows
from draftree.bench.machine import describe_machine
from draftree.bench.record import identify_model
from draftree.bench.writing import acceptance_length, accepted_shares
from draftree.config import EngineConfig, resolve
from draftree.core import RoundStats, SamplingParams, Usage
from draftree.decode.host_round import SpeculationOptions, SpeculativeDecoder
from draftree.decode.plain import PlainDecoder
from draftree.decode.sampler import Sampler
from draftree.drafts.drafter import Drafter
from draftree.drafts.registry import find_kind
from draftree.engine.device import Device, open_device
from draftree.errors import BenchError
from draftree.kernels.ops import Array
from draftree.models.load import load_model
from draftree.models.model_config import read_model_config
from draftree.models.target import Target
from draftree.prefill.chunked import prefill
from draftree.state.sequence import Snapshot
from draftree.text.tokenizer import Tokenizer
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint

DEPTHS: Final = (2048, 4096, 8064)
BOUNDS: Final = (512, 1024, 2048, 4096, 0)  # 0: none
_BUDGET: Final = 22


@dataclass(frozen=True, slots=True)
class DraftContextOptions:
    depths: tuple[int, ...] = DEPTHS
    bounds: tuple[int, ...] = BOUNDS
    num_texts: int = 4  # prose and code in turn
    num_tokens: int = 96  # written after each
    threads: int = 0


@dataclass(frozen=True, slots=True)
class BoundRun:
    """Texts of one depth with one bound; those of each text are in the order of the texts.

    accepted_by_depth[d]: share of rounds whose tree was that deep and whose path got there.
    """

    depth: int
    bound: int
    ring_len: int  # positions whose keys and values the draft keeps; 0: all
    num_texts: int
    num_equal: int
    num_tokens: int
    num_rounds: int
    acceptance_length: float
    acceptance_lengths: list[float]
    accepted_by_depth: list[float]


@dataclass(frozen=True, slots=True)
class _Bench:
    """A target, and its draft once for each bound."""

    target: Target
    drafters: Mapping[int, Drafter]
    ring_lens: Mapping[int, int]
    encode: Callable[[str], list[int]]
    chunk: int

    def extend(self, features: Array) -> None:
        for drafter in self.drafters.values():
            drafter.extend_context(features)

    def go_back(self, ids: Sequence[int]) -> None:
        """To a text that all have read."""
        self.target.state.restore(Snapshot(tuple(ids)))
        for drafter in self.drafters.values():
            drafter.restore((), len(ids), len(ids))


def bound_context(checkpoint: Checkpoint, bound: int) -> Checkpoint:
    """The same draft, no layer of which looks back further."""
    architecture = checkpoint.architecture
    num_layers = checkpoint.metadata[f"{architecture}.block_count"]
    keys = {
        f"{architecture}.attention.sliding_window": bound,
        f"{architecture}.attention.sliding_window_pattern": [True] * num_layers,
    }
    views = {name: checkpoint.raw(name) for name in checkpoint.tensors}
    metadata = {**checkpoint.metadata, **keys}
    return Checkpoint(checkpoint.path, metadata, checkpoint.tensors, views)


@contextmanager
def _open_bench(model: Path, draft: Path, options: DraftContextOptions) -> Iterator[_Bench]:
    checkpoint, draft_checkpoint = open_checkpoint(model), open_checkpoint(draft)
    model_config, kind = read_model_config(checkpoint), find_kind(draft_checkpoint)
    max_ctx = max(options.depths) + options.num_tokens + _BUDGET
    config = EngineConfig(
        device="cpu", budget=_BUDGET, max_ctx=max_ctx, threads=options.threads, ngram="off"
    )
    size = kind.read_size(draft_checkpoint)
    plan = resolve(config, model_config, draft=size)
    device: Device = open_device(plan)
    try:
        ops = device.new_ops()
        loaded = load_model(checkpoint, ops)
        kind.check_fit(draft_checkpoint, checkpoint, loaded)
        target = Target(loaded, ops, plan.max_ctx, size.feature_layers)
        if target.state.is_recurrent:
            raise BenchError(f"{model.name} cannot go back in its text, so it is not measured.")
        drafters: dict[int, Drafter] = {}
        ring_lens: dict[int, int] = {}
        for bound in options.bounds:
            bounded = bound_context(draft_checkpoint, bound or plan.max_ctx)
            draft_ops = device.new_draft_ops(size.block_len, bound or plan.max_ctx)
            drafters[bound] = kind.load(
                bounded, loaded, draft_ops, block_len=0, use_draft_vocab=True
            )
            ring_lens[bound] = draft_ops.ring_len
        tokenizer = Tokenizer.from_metadata(checkpoint.metadata)

        def encode(text: str) -> list[int]:
            return tokenizer.encode(text, add_special=False, parse_special=False)

        yield _Bench(target, drafters, ring_lens, encode, plan.chunk)
    finally:
        device.close()


def measure_draft_context(
    model: Path, draft: Path, options: DraftContextOptions, report: Callable[[str], None]
) -> Iterator[list[BoundRun]]:
    """After each text, the runs of all so far."""
    found: dict[tuple[int, int], list[tuple[list[int], RoundStats]]] = {}
    plain: dict[int, list[list[int]]] = {}
    depths = sorted(options.depths)
    with _open_bench(model, draft, options) as bench:
        texts = make_windows(bench.encode, options.num_texts, depths[-1])
        for number, ids in enumerate(texts):
            bench.go_back(())
            for depth in depths:
                report(f"depth {depth}: text {number + 1} of {len(texts)}")
                read = bench.target.state.committed
                prefill(bench.target, ids[read : depth - 1], bench.chunk, bench.extend)
                text, _ = _write(bench, ids[:depth], None, options.num_tokens)
                plain.setdefault(depth, []).append(text)
                for bound, drafter in bench.drafters.items():
                    bench.go_back(ids[: depth - 1])
                    run = _write(bench, ids[:depth], drafter, options.num_tokens)
                    found.setdefault((depth, bound), []).append(run)
                bench.go_back(ids[: depth - 1])
            yield [
                summarize_runs(depth, bound, bench.ring_lens[bound], runs, plain[depth])
                for (depth, bound), runs in sorted(found.items(), key=lambda item: item[0][0])
            ]


def _write(
    bench: _Bench, ids: Sequence[int], drafter: Drafter | None, num_tokens: int
) -> tuple[list[int], RoundStats]:
    """What follows the text, all but the last token of which is read."""
    target = bench.target
    sampler = Sampler(SamplingParams(), target.model.vocab_size, ids)
    options = SpeculationOptions(_BUDGET, is_auto=False, use_lookup=False)
    decoder: PlainDecoder | SpeculativeDecoder = PlainDecoder(target, sampler)
    if drafter is not None:
        decoder = SpeculativeDecoder(target, sampler, drafter, options)
    decoder.start(ids[-1])
    tokens: list[int] = []
    while len(tokens) < num_tokens:
        tokens += [emitted.token for emitted in decoder.step(num_tokens - len(tokens))]
    decoder.finish()
    return tokens[:num_tokens], decoder.stats


def summarize_runs(
    depth: int,
    bound: int,
    ring_len: int,
    runs: Sequence[tuple[list[int], RoundStats]],
    plain: Sequence[list[int]],
) -> BoundRun:
    usages = [Usage(completion_tokens=len(tokens), rounds=stats) for tokens, stats in runs]
    return BoundRun(
        depth=depth,
        bound=bound,
        ring_len=ring_len,
        num_texts=len(runs),
        num_equal=sum(tokens == text for (tokens, _), text in zip(runs, plain, strict=True)),
        num_tokens=sum(usage.completion_tokens for usage in usages),
        num_rounds=sum(usage.rounds.num_rounds for usage in usages),
        acceptance_length=acceptance_length(usages),
        acceptance_lengths=[acceptance_length([usage]) for usage in usages],
        accepted_by_depth=accepted_shares(usages),
    )


def write_draft_context(
    model: Path,
    draft: Path,
    out: Path,
    options: DraftContextOptions,
    say: Callable[[str], None],
) -> list[BoundRun]:
    """What is known is written after each text: reading a long one takes minutes on a CPU."""
    trained = find_kind(checkpoint := open_checkpoint(draft)).read_size(checkpoint).context_len
    result = {
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(describe_machine()),
        "model": asdict(identify_model(model)),
        "draft": asdict(identify_model(draft)) | {"context_len": trained},
        "settings": asdict(replace(options, threads=0)) | {"budget": _BUDGET},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    runs: list[BoundRun] = []
    for runs in measure_draft_context(model, draft, options, say):
        known = {**result, "runs": [asdict(run) for run in runs]}
        out.write_text(json.dumps(known, indent=1) + "\n", encoding="utf-8")
    return runs


def make_section(result: Mapping[str, Any]) -> list[str]:
    """Markdown: acceptance length by depth of context, one row per bound."""
    settings, runs = result["settings"], result["runs"]
    depths = sorted({run["depth"] for run in runs})
    trained = result["draft"]["context_len"]
    rows = []
    for bound in settings["bounds"]:
        members = {run["depth"]: run for run in runs if run["bound"] == bound}
        name = "none" if not bound else f"{bound:,}{', as trained' if bound == trained else ''}"
        ring_len = members[depths[0]]["ring_len"]
        equal, total = (sum(m[key] for m in members.values()) for key in ("num_equal", "num_texts"))
        lengths = [f"{members[depth]['acceptance_length']:.2f}" for depth in depths]
        kept = f"{ring_len:,}" if ring_len else "all"
        rows.append([name, kept, *lengths, f"{equal} of {total}"])
    head = ["draft looks back", "positions kept", *(f"AL at {depth:,}" for depth in depths)]
    note = (
        f"{runs[0]['num_texts']} texts, prose and code of Python's documentation and library, "
        f"{settings['num_tokens']} tokens after so many of each; greedy, budget "
        f"{settings['budget']}, no lookup."
    )
    return [*table([*head, "equal texts"], rows), "", note]
