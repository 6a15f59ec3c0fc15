"""Decoding by depth of context: plain and speculative rates, time to the first token, AL.

In: a model, depths. Out: figures by depth, with the texts' equality. One engine is open at a time,
so that a GPU need not hold two; a prompt is read once a round and decoded after several times.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from draftree.bench import writing
from draftree.bench.median import Ratio, Report, Samples, divide, summarize
from draftree.bench.window import make_window
from draftree.bench.writing import Text, open_writer, write_text
from draftree.chat import Engine
from draftree.config import EngineConfig
from draftree.engine.engine import TokenEngine

DEPTHS: Final = (128, 512, 1024, 2048, 4096)
_REPEATS: Final = 3  # texts after one prompt


@dataclass(frozen=True, slots=True)
class ContextOptions:
    config: EngineConfig  # its context is as long as the depths need
    rounds: int
    depths: tuple[int, ...] = DEPTHS
    num_tokens: int = 32


@dataclass(frozen=True, slots=True)
class DepthMeasures:
    plain: Samples  # tok/s of each text
    speculative: Samples
    speed_up: Ratio
    plain_ttft_ms: Samples
    ttft_ms: Samples
    acceptance_length: float
    num_texts: int
    num_equal: int


@dataclass(frozen=True, slots=True)
class ContextMeasures:
    device: str
    drafting: str
    depths: dict[str, DepthMeasures]

    def headline(self) -> dict[str, Any]:
        rows = self.depths.values()
        names = ("plain", "speculative", "ttft_ms")
        return {n: {d: getattr(row, n).median for d, row in self.depths.items()} for n in names} | {
            "num_equal": sum(row.num_equal for row in rows),
            "num_texts": sum(row.num_texts for row in rows),
        }


@dataclass(frozen=True, slots=True)
class Texts:
    """After one prompt: the first was written with nothing cached."""

    first: Text
    again: list[Text]

    @property
    def all(self) -> list[Text]:
        return [self.first, *self.again]


def measure_context(path: Path, options: ContextOptions, report: Report) -> ContextMeasures:
    found: dict[str, dict[int, list[Texts]]] = {}
    ids: list[int] = []
    drafting = replace(options.config, max_ctx=max(options.depths) + options.num_tokens)
    ways = {"plain": writing.without_drafts(drafting), "speculative": drafting}
    for number in range(options.rounds):
        for way, config in ways.items():
            report(f"{way}: loading")
            with open_writer(path, config) as engine:
                ids = ids or _long_text(engine, max(options.depths))
                for depth in options.depths:
                    report(f"{way} at depth {depth}: round {number + 1} of {options.rounds}")
                    texts = write_at(engine.tokens, ids[:depth], options.num_tokens)
                    found.setdefault(way, {}).setdefault(depth, []).append(texts)
                device = writing.device_name(engine)
                source = writing.describe_drafts(engine)
    pairs = {d: (found["plain"][d], found["speculative"][d]) for d in options.depths}
    return ContextMeasures(device, source, summarize_depths(pairs))


def write_at(engine: TokenEngine, ids: Sequence[int], num_tokens: int) -> Texts:
    first = write_text(engine, ids, num_tokens)
    again = [write_text(engine, ids, num_tokens, use_cache=True) for _ in range(_REPEATS - 1)]
    return Texts(first, again)


def summarize_depths(
    pairs: Mapping[int, tuple[Sequence[Texts], Sequence[Texts]]],
) -> dict[str, DepthMeasures]:
    """By depth: what plain and what speculative decoding wrote in each round."""
    measures = {}
    for depth, (plain, drafted) in pairs.items():
        texts = [text for item in plain for text in item.all]
        others = [text for item in drafted for text in item.all]
        rates, other_rates = (
            summarize([text.usage.tokens_per_second for text in group], "tok/s")
            for group in (texts, others)
        )
        measures[str(depth)] = DepthMeasures(
            plain=rates,
            speculative=other_rates,
            speed_up=divide(other_rates, rates),
            plain_ttft_ms=summarize([item.first.usage.first_token_ms for item in plain], "ms"),
            ttft_ms=summarize([item.first.usage.first_token_ms for item in drafted], "ms"),
            acceptance_length=writing.acceptance_length([text.usage for text in others]),
            num_texts=len(others),
            num_equal=sum(a.tokens == b.tokens for a, b in zip(texts, others, strict=True)),
        )
    return measures


def _long_text(engine: Engine, length: int) -> list[int]:
    def encode(text: str) -> list[int]:
        return engine.tokenizer.encode(text, add_special=False, parse_special=False)

    return make_window(encode, length)
