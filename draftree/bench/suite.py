"""Plain against speculative decoding on the same prompts: is the text equal, and how much faster
does it come?

Both run in turns in this process, greedily, to the same length. Speed-up is the ratio of decoding
times over all prompts of a set.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from draftree.bench.dataset import Prompt
from draftree.bench.fault import BenchError
from draftree.bench.sample import Samples, summarize
from draftree.chat import Engine
from draftree.config import EngineConfig
from draftree.core import Request, Usage

Report = Callable[[str], None]

_WARM_UP: Final = Prompt(
    "one two three four " * 12, is_chat=False
)  # repeats, so that it is drafted
_WARM_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class SuiteOptions:
    threads: int
    num_tokens: int
    draft: str = "auto"
    budget: int | str = "auto"
    ngram: str = "on"
    max_ctx: int = 2048


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


@dataclass(frozen=True, slots=True)
class SuiteMeasures:
    drafting: str  # what the drafts came from
    sets: dict[str, SetMeasures]


@dataclass(frozen=True, slots=True)
class Pair:
    """The same prompt, written on in two ways."""

    is_equal: bool
    plain: Usage
    speculative: Usage


def measure_suite(
    path: Path, sets: Mapping[str, Sequence[Prompt]], options: SuiteOptions, report: Report
) -> SuiteMeasures:
    report("loading")
    shared = EngineConfig(threads=options.threads, max_ctx=options.max_ctx)
    plain = Engine.open(str(path), shared, draft="none", budget=0, ngram="off")
    drafting = Engine.open(
        str(path), shared, draft=options.draft, budget=options.budget, ngram=options.ngram
    )
    try:
        warm = _encode(plain, _WARM_UP)
        _write(plain, warm, _WARM_TOKENS)
        _write(drafting, warm, _WARM_TOKENS)
        sources = ["a trained draft"] if drafting.tokens.drafter is not None else []
        sources += ["lookup in the text so far"] if options.ngram != "off" else []
        measures = {}
        for name, prompts in sets.items():
            pairs = []
            for number, prompt in enumerate(prompts):
                report(f"{name}: prompt {number + 1} of {len(prompts)}")
                ids = _encode(plain, prompt)[: options.max_ctx - options.num_tokens]
                text, usage = _write(plain, ids, options.num_tokens)
                other_text, other_usage = _write(drafting, ids, options.num_tokens)
                pairs.append(Pair(text == other_text, usage, other_usage))
            measures[name] = summarize_pairs(pairs)
    finally:
        plain.close()
        drafting.close()
    return SuiteMeasures(" and ".join(sources) or "none", measures)


def summarize_pairs(pairs: Sequence[Pair]) -> SetMeasures:
    if not pairs:
        raise BenchError("There are no prompts to measure.")
    plain, drafting = [p.plain for p in pairs], [p.speculative for p in pairs]
    num_tokens = sum(u.completion_tokens for u in drafting)
    plain_rate, rate = _rate(plain), _rate(drafting)
    num_rounds = sum(u.rounds.num_rounds for u in drafting)
    return SetMeasures(
        num_prompts=len(pairs),
        num_equal=sum(p.is_equal for p in pairs),
        num_tokens=num_tokens,
        plain=summarize([u.tokens_per_second for u in plain], "tok/s"),
        speculative=summarize([u.tokens_per_second for u in drafting], "tok/s"),
        plain_rate=round(plain_rate, 2),
        speculative_rate=round(rate, 2),
        speed_up=round(rate / plain_rate, 4),
        acceptance_length=round(num_tokens / num_rounds, 4),
        accepted_by_depth=_shares_by_depth(drafting),
        num_drafted=sum(u.rounds.num_drafted for u in drafting),
        num_accepted=sum(u.rounds.num_accepted for u in drafting),
    )


def _encode(engine: Engine, prompt: Prompt) -> list[int]:
    if prompt.is_chat and engine.has_template:
        return engine.encode_chat(prompt.text)
    return engine.tokenizer.encode(prompt.text)


def _write(engine: Engine, ids: Sequence[int], num_tokens: int) -> tuple[list[int], Usage]:
    request = Request(tuple(ids), num_tokens, stop_ids=engine.tokenizer.stop_ids)
    engine.tokens.forget()
    stream = engine.tokens.generate(request)
    tokens = [event.token for event in stream]
    return tokens, stream.usage


def _rate(usages: Sequence[Usage]) -> float:
    return 1000.0 * sum(u.completion_tokens for u in usages) / sum(u.decode_ms for u in usages)


def _shares_by_depth(usages: Sequence[Usage]) -> list[float]:
    depth = max((len(u.rounds.verified_by_depth) for u in usages), default=0)
    shares = []
    for i in range(depth):
        verified = sum(_at(u.rounds.verified_by_depth, i) for u in usages)
        accepted = sum(_at(u.rounds.accepted_by_depth, i) for u in usages)
        shares.append(round(accepted / verified, 4) if verified else 0.0)
    return shares


def _at(counts: Sequence[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0
