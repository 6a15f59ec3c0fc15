"""Plain against speculative decoding on the same prompts: is the text equal, and how much faster
does it come?

Both run in turns in this process, to the same length and with the same seed. Speed-up is the ratio
of decoding times over all prompts of a set.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from draftree.bench import writing
from draftree.bench.dataset import Prompt
from draftree.bench.median import Report, Samples, summarize
from draftree.bench.writing import encode_prompt, open_writer, without_drafts, write_text
from draftree.config import EngineConfig
from draftree.core import SamplingParams, Usage
from draftree.errors import BenchError


@dataclass(frozen=True, slots=True)
class SetMeasures:
    """One data set. accepted_by_depth[d]: share of trees of depth d + 1 whose path got there."""

    num_prompts: int
    num_equal: int
    num_tokens: int
    plain: Samples  # tok/s of each prompt
    speculative: Samples
    plain_rate: float  # tok/s over all prompts
    speculative_rate: float
    speed_up: float
    acceptance_length: float
    accepted_by_depth: list[float]
    num_drafted: int
    num_accepted: int
    plain_ttft_ms: Samples  # of each prompt, to the first token
    ttft_ms: Samples
    rounds_by_length: list[int]  # [k]: rounds that gave k + 1 tokens
    stage_ms: dict[str, float]  # of speculative decoding, over all prompts


@dataclass(frozen=True, slots=True)
class SuiteMeasures:
    device: str
    drafting: str  # what the drafts came from
    sets: dict[str, SetMeasures]

    def headline(self) -> dict[str, Any]:
        names = ("speed_up", "acceptance_length", "num_equal", "num_prompts")
        return {name: {key: getattr(s, key) for key in names} for name, s in self.sets.items()}


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt, written on in two ways."""

    is_equal: bool
    plain: Usage
    speculative: Usage


def measure_suite(
    path: Path,
    sets: Mapping[str, Sequence[Prompt]],
    num_tokens: int,
    config: EngineConfig,
    report: Report,
    temperature: float = 0.0,
) -> SuiteMeasures:
    """config: of the engine that drafts."""
    report("loading")
    with (
        open_writer(path, without_drafts(config)) as plain,
        open_writer(path, config) as drafting,
    ):
        measures = {}
        for name, prompts in sets.items():
            pairs = []
            for number, prompt in enumerate(prompts):
                report(f"{name}: prompt {number + 1} of {len(prompts)}")
                ids, stop_ids = encode_prompt(plain, prompt, num_tokens), plain.tokenizer.stop_ids
                sampling = SamplingParams(temperature=temperature, seed=number)
                a = write_text(plain.tokens, ids, num_tokens, sampling, stop_ids=stop_ids)
                b = write_text(drafting.tokens, ids, num_tokens, sampling, stop_ids=stop_ids)
                pairs.append(Pair(a.tokens == b.tokens, a.usage, b.usage))
            measures[name] = summarize_pairs(pairs)
        source = writing.describe_drafts(drafting)
        return SuiteMeasures(writing.device_name(drafting), source, measures)


def summarize_pairs(pairs: Sequence[Pair]) -> SetMeasures:
    if not pairs:
        raise BenchError("There are no prompts to measure.")
    plain, drafting = [p.plain for p in pairs], [p.speculative for p in pairs]
    plain_rate, rate = writing.total_rate(plain), writing.total_rate(drafting)
    return SetMeasures(
        num_prompts=len(pairs),
        num_equal=sum(p.is_equal for p in pairs),
        num_tokens=sum(u.completion_tokens for u in drafting),
        plain=summarize([u.tokens_per_second for u in plain], "tok/s"),
        speculative=summarize([u.tokens_per_second for u in drafting], "tok/s"),
        plain_rate=round(plain_rate, 2),
        speculative_rate=round(rate, 2),
        speed_up=round(rate / plain_rate, 4),
        acceptance_length=writing.acceptance_length(drafting),
        accepted_by_depth=writing.accepted_shares(drafting),
        num_drafted=sum(u.rounds.num_drafted for u in drafting),
        num_accepted=sum(u.rounds.num_accepted for u in drafting),
        plain_ttft_ms=summarize([u.first_token_ms for u in plain], "ms"),
        ttft_ms=summarize([u.first_token_ms for u in drafting], "ms"),
        rounds_by_length=writing.rounds_by_length(drafting),
        stage_ms=writing.stage_ms(drafting),
    )
