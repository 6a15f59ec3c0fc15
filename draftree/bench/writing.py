"""Texts that an engine writes on given token ids, and what their usages say together.

In: an engine, prompts. Out: tokens, rates, acceptance, milliseconds by stage of a round. Every text
is written from an empty cache unless asked otherwise, so that all runs do the same work.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from draftree.bench.dataset import Prompt
from draftree.chat import Engine
from draftree.config import EngineConfig
from draftree.core import Request, SamplingParams, Usage
from draftree.engine.engine import TokenEngine
from draftree.engine.gpu import find_gpu

STAGES: Final = ("draft", "tree", "verify", "accept", "commit")
_WARM_UP: Final = "one two three four " * 12  # repeats, so that it is drafted
_WARM_TOKENS: Final = 24


@dataclass(frozen=True, slots=True)
class Text:
    tokens: list[int]
    usage: Usage


def without_drafts(config: EngineConfig) -> EngineConfig:
    return replace(config, draft="none", budget=0, ngram="off")


@contextmanager
def open_writer(path: Path, config: EngineConfig) -> Iterator[Engine]:
    """An engine that has written a little already. ngram "auto": drafts are looked up on the CPU
    only, where that does not keep rounds from running on the device.
    """
    if config.ngram == "auto" and find_gpu(config.device) is None:
        config = replace(config, ngram="on")
    engine = Engine.open(str(path), config)
    try:
        ids = engine.tokenizer.encode(_WARM_UP)[: max(engine.plan.max_ctx - _WARM_TOKENS, 1)]
        write_text(engine.tokens, ids, _WARM_TOKENS)
        yield engine
    finally:
        engine.close()


def describe_drafts(engine: Engine) -> str:
    """Where an engine's drafts come from, in words."""
    tokens = engine.tokens
    sources = ["a trained draft"] if tokens.drafter is not None else []
    is_looked_up = tokens.config.ngram == "on" and tokens.plan.max_nodes > 1
    sources += ["lookup in the text so far"] if is_looked_up else []
    return " and ".join(sources) or "none"


def device_name(engine: Engine) -> str:
    return engine.plan.gpu.name if engine.plan.gpu is not None else "CPU"


def encode_prompt(engine: Engine, prompt: Prompt, num_tokens: int) -> list[int]:
    """As much of the prompt as leaves room for so many tokens."""
    is_chat = prompt.is_chat and engine.has_template
    ids = engine.encode_chat(prompt.text) if is_chat else engine.tokenizer.encode(prompt.text)
    return ids[: max(engine.plan.max_ctx - num_tokens, 1)]


def write_text(
    engine: TokenEngine,
    ids: Sequence[int],
    num_tokens: int,
    sampling: SamplingParams | None = None,
    *,
    stop_ids: frozenset[int] = frozenset(),
    use_cache: bool = False,
) -> Text:
    if not use_cache:
        engine.reset()
    request = Request(tuple(ids), num_tokens, sampling or SamplingParams(), stop_ids)
    stream = engine.generate(request)
    return Text([event.token for event in stream], stream.usage)


def total_rate(usages: Sequence[Usage]) -> float:
    """Tokens per second over all of them."""
    return 1000.0 * sum(u.completion_tokens for u in usages) / sum(u.decode_ms for u in usages)


def acceptance_length(usages: Sequence[Usage]) -> float:
    num_rounds = sum(u.rounds.num_rounds for u in usages)
    return round(sum(u.completion_tokens for u in usages) / num_rounds, 4)


def accepted_shares(usages: Sequence[Usage]) -> list[float]:
    """By depth: of the trees that were so deep, the share whose path got there."""
    verified = _add([u.rounds.verified_by_depth for u in usages])
    accepted = _add([u.rounds.accepted_by_depth for u in usages])
    accepted += [0] * (len(verified) - len(accepted))
    return [round(a / v, 4) if v else 0.0 for a, v in zip(accepted, verified, strict=True)]


def rounds_by_length(usages: Sequence[Usage]) -> list[int]:
    """How many rounds gave 1, 2, … tokens: the path without its root, and the bonus."""
    reached = [sum(u.rounds.num_rounds for u in usages)]
    reached += _add([u.rounds.accepted_by_depth for u in usages])
    return [a - b for a, b in zip(reached, [*reached[1:], 0], strict=True)]


def stage_ms(usages: Sequence[Usage]) -> dict[str, float]:
    """Milliseconds of decoding by stage; "rest" is what no stage counts."""
    times = {name: sum(getattr(u.rounds, f"{name}_ms") for u in usages) for name in STAGES}
    times["rest"] = max(sum(u.decode_ms for u in usages) - sum(times.values()), 0.0)
    return {name: round(ms, 3) for name, ms in times.items()}


def _add(lists: Sequence[Sequence[int]]) -> list[int]:
    longest = max(map(len, lists), default=0)
    return [sum(counts[i] for counts in lists if i < len(counts)) for i in range(longest)]
