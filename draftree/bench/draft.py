"""What a draft is worth for its target: acceptance length by data set, shape and temperature,
chains against trees, and what a round costs.

Every text is compared with the plain one. Lookup is off, and budgets are fixed: all but the times
is the same on every machine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

from draftree.bench import writing
from draftree.bench.dataset import Prompt
from draftree.bench.median import Report
from draftree.chat import Engine
from draftree.config import EngineConfig
from draftree.core import SamplingParams
from draftree.engine.locate import count_block, locate, name_draft
from draftree.errors import BenchError

_SEED = 7


class Shape(NamedTuple):
    """A chain has one candidate a position; a tree the depth that the draft was trained for."""

    name: str
    budget: int
    block: int  # 0: as trained
    width: int = 0  # candidates of a position; 0: any number

    @classmethod
    def chain(cls, length: int) -> "Shape":
        return cls(f"chain of {length}", length, length + 1, width=1)


SHAPES = (
    *(Shape.chain(length) for length in (3, 5, 7)),
    *(Shape(f"tree of {budget}", budget, 0) for budget in (7, 22)),
)
TEMPERATURES = (0.0, 0.8)


@dataclass(frozen=True, slots=True)
class DraftRun:
    """One set in one shape. accepted_by_depth[d]: share of trees of depth d + 1 whose path got
    there. round_ms: of each stage of a round, on average.
    """

    data: str
    shape: str
    temperature: float
    num_prompts: int
    num_equal: int
    acceptance_length: float
    accepted_by_depth: list[float]
    tokens_per_second: float
    plain_tokens_per_second: float
    round_ms: dict[str, float]


@dataclass(frozen=True, slots=True)
class DraftMeasures:
    device: str
    kind: str
    runs: list[DraftRun]

    def headline(self) -> dict[str, Any]:
        lengths = {f"{r.data}, {r.shape}, {r.temperature}": r.acceptance_length for r in self.runs}
        is_equal = all(run.num_equal == run.num_prompts for run in self.runs)
        return {"kind": self.kind, "all_equal": is_equal, "acceptance_length": lengths}


def measure_draft(
    path: Path,
    sets: Mapping[str, Sequence[Prompt]],
    num_tokens: int,
    config: EngineConfig,
    report: Report,
    shapes: Sequence[Shape] = SHAPES,
) -> DraftMeasures:
    """config: of the engine, with its draft."""
    checkpoint = locate(str(path), config.draft).draft_checkpoint
    if checkpoint is None:
        raise BenchError(f"There is no draft for {path}; give one with --draft.")
    shapes = [shape for shape in shapes if shape.block <= count_block(checkpoint)]
    if not shapes:
        raise BenchError(f"There is no shape that {checkpoint.path} can fill.")
    plain = Engine.open(str(path), writing.without_drafts(config))
    known: dict[tuple[str, float], list[writing.Text]] = {}
    runs: list[DraftRun] = []
    for shape in shapes:
        options = replace(
            config, budget=shape.budget, block=shape.block, width=shape.width, ngram="off"
        )
        engine = Engine.open(str(path), options)
        for temperature in TEMPERATURES:
            for name, prompts in sets.items():
                report(f"{shape.name}, temperature {temperature}: {name}")
                key = name, temperature
                if key not in known:
                    known[key] = _write(plain, prompts, num_tokens, temperature)
                texts = _write(engine, prompts, num_tokens, temperature)
                runs.append(_summarize(name, shape, temperature, known[key], texts))
        device = writing.device_name(engine)
        engine.close()
    plain.close()
    return DraftMeasures(device, name_draft(checkpoint), runs)


def _write(
    engine: Engine, prompts: Sequence[Prompt], num_tokens: int, temperature: float
) -> list[writing.Text]:
    sampling, texts = SamplingParams(temperature=temperature, seed=_SEED), []
    for prompt in prompts:
        ids, stop_ids = writing.encode_prompt(engine, prompt, num_tokens), engine.tokenizer.stop_ids
        text = writing.write_text(engine.tokens, ids, num_tokens, sampling, stop_ids=stop_ids)
        texts.append(text)
    return texts


def _summarize(
    data: str,
    shape: Shape,
    temperature: float,
    plain: Sequence[writing.Text],
    texts: Sequence[writing.Text],
) -> DraftRun:
    usages = [text.usage for text in texts]
    num_rounds = sum(usage.rounds.num_rounds for usage in usages)
    stages = writing.stage_ms(usages)
    return DraftRun(
        data=data,
        shape=shape.name,
        temperature=temperature,
        num_prompts=len(texts),
        num_equal=sum(a.tokens == b.tokens for a, b in zip(plain, texts, strict=True)),
        acceptance_length=writing.acceptance_length(usages),
        accepted_by_depth=writing.accepted_shares(usages),
        tokens_per_second=round(writing.total_rate(usages), 2),
        plain_tokens_per_second=round(writing.total_rate([text.usage for text in plain]), 2),
        round_ms={name: round(ms / num_rounds, 3) for name, ms in stages.items()},
    )
