"""Time to the first token by turn: a conversation that begins with a long text and goes on, at once
and after another conversation; and whether a reply after a cache hit is the one without.

The budget is fixed, so that rounds can be compared one for one. Times are the engine's own, from
the prompt's ids to the first token.
"""

import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.window import make_windows
from draftree.bench.median import Ratio, Report, Samples, divide, summarize
from draftree.bench.subject import Subject
from draftree.config import EngineConfig
from draftree.core import Usage

CONTEXT: Final = 2048
BUDGET: Final = 22
_REPLY_LEN: Final = 48
_ROOM: Final = 512  # tokens of replies, questions and the template
_QUESTIONS: Final = ("What is this text about?", "Say it in one sentence.", "Who would read it?")
_INTERLUDE: Final = "Write a short poem about the sea."


@dataclass(frozen=True, slots=True)
class MultiturnMeasures:
    """Milliseconds to the first token. fresh: the prompt of `returned`, with nothing cached."""

    context: int  # tokens of the first prompt, about
    first_ms: Samples
    second_ms: Samples  # the next turn, at once
    returned_ms: Samples  # the turn after that, with another conversation in between
    fresh_ms: Samples
    second_over_first: Ratio
    returned_over_fresh: Ratio
    new_tokens: Samples  # of the second prompt
    save_ms: Samples  # copying a conversation away while nobody waits
    kept_mib: Samples
    num_replies: int
    num_equal: int  # replies after a hit with the text and the rounds of one without
    acceptance_length: dict[str, float]  # after a hit, and without

    def headline(self) -> dict[str, Any]:
        return {
            "second_over_first": self.second_over_first.value,
            "returned_over_fresh": self.returned_over_fresh.value,
            "num_equal": self.num_equal,
            "num_replies": self.num_replies,
            "acceptance_length": self.acceptance_length,
        }


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    usage: Usage

    @property
    def counts(self) -> tuple[int, ...]:
        """What speculation did, without times."""
        rounds = self.usage.rounds
        return (
            *(self.usage.completion_tokens, rounds.num_rounds, rounds.num_drafted),
            *rounds.accepted_by_depth,
        )


def measure_multiturn(
    path: Path, threads: int, rounds: int, report: Report, context: int = CONTEXT
) -> MultiturnMeasures:
    config = EngineConfig(budget=BUDGET, ngram="on", threads=threads, max_ctx=context + _ROOM)
    subject = Subject(path, config)
    try:
        windows = make_windows(subject.encode, rounds, context)
        texts = [subject.engine.tokenizer.decode(ids) for ids in windows]
        _ask(subject, [_message("user", _INTERLUDE)])  # warms up
        rows = []
        for number, text in enumerate(texts):
            report(f"multiturn: conversation {number + 1} of {rounds}")
            subject.tokens.reset()
            rows.append(_converse(subject, text))
    finally:
        subject.close()
    return _summarize(rows, context)


@dataclass(frozen=True, slots=True)
class _Row:
    first: Reply
    second: Reply
    returned: Reply
    fresh: Reply
    save_ms: float
    kept_bytes: int


def _converse(subject: Subject, text: str) -> _Row:
    tokens = subject.tokens
    messages = [_message("user", f"{text}\n\n{_QUESTIONS[0]}")]
    first = _ask(subject, messages)
    messages += [_message("assistant", first.text), _message("user", _QUESTIONS[1])]
    second = _ask(subject, messages)
    messages += [_message("assistant", second.text), _message("user", _QUESTIONS[2])]
    start = time.perf_counter()
    tokens.offload()
    save_ms = (time.perf_counter() - start) * 1000
    kept_bytes = tokens.kept_bytes
    _ask(subject, [_message("user", _INTERLUDE)])
    tokens.offload()
    returned = _ask(subject, messages)
    tokens.reset()
    fresh = _ask(subject, messages)
    return _Row(first, second, returned, fresh, save_ms, kept_bytes)


def _summarize(rows: list[_Row], context: int) -> MultiturnMeasures:
    def first_token(name: str) -> Samples:
        return summarize([getattr(row, name).usage.first_token_ms for row in rows], "ms")

    first, second, returned, fresh = map(first_token, ("first", "second", "returned", "fresh"))
    seconds = [row.second.usage for row in rows]
    pairs = [(row.returned, row.fresh) for row in rows]
    equal = [(a.text, a.counts) == (b.text, b.counts) for a, b in pairs]
    return MultiturnMeasures(
        context=context,
        first_ms=first,
        second_ms=second,
        returned_ms=returned,
        fresh_ms=fresh,
        second_over_first=divide(second, first),
        returned_over_fresh=divide(returned, fresh),
        new_tokens=summarize([u.prompt_tokens - u.cached_tokens for u in seconds], "tokens"),
        save_ms=summarize([row.save_ms for row in rows], "ms"),
        kept_mib=summarize([row.kept_bytes / 2**20 for row in rows], "MiB"),
        num_replies=len(rows),
        num_equal=sum(equal),
        acceptance_length={
            "hit": _acceptance_length([a for a, _ in pairs]),
            "fresh": _acceptance_length([b for _, b in pairs]),
        },
    )


def _acceptance_length(replies: list[Reply]) -> float:
    num_rounds = sum(reply.usage.rounds.num_rounds for reply in replies)
    return round(sum(reply.usage.completion_tokens for reply in replies) / num_rounds, 4)


def _ask(subject: Subject, messages: list[dict[str, Any]]) -> Reply:
    generation = subject.engine.generate(messages, max_tokens=_REPLY_LEN)
    for _ in generation:
        pass
    return Reply(generation.text, generation.usage)


def _message(role: str, content: str) -> dict[str, Any]:
    return {"role": role, "content": content}
