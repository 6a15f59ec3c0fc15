"""What prompt compression keeps and what it costs: whether the needed places of long texts survive,
by scorer and share, and whether a target still answers.

In: a target, a scoring model. Out: a result file, written anew after each case. A case is scored
once for all shares; `auto` goes the way that a request's messages go.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final, NamedTuple

from benchmarks.compress_case import KINDS, Case, make_case
from benchmarks.compress_position import Cut, find_positions, placed
from benchmarks.parts import Deadline
from draftree.bench.machine import describe_machine
from draftree.chat import Engine
from draftree.compress import AUTO_OWN_SHARE, AUTO_SHARE, Compressor
from draftree.engine.scoring import CHUNK_LEN
from draftree.text.compress import LongText, choose_chunks, cut_text, token_places
from draftree.text.tokenizer import Tokenizer

SHARES: Final = (0.05, 0.1, 0.2, 0.3)
FULL, AUTO, ORIGINAL = "full", "auto", "original"


@dataclass(frozen=True, slots=True)
class CompressOptions:
    """num_chars: of a text; cases of a kind take them in turns. original_shares: those that are
    read at original positions as well, by the first drafter's scores.
    """

    target: str
    drafters: tuple[str, ...]
    num_chars: tuple[int, ...] = (10_000,)
    num_cases: int = 4  # of each kind
    num_replies: int = 2  # of those, that the target answers
    num_auto: int = 0  # cases that it answers whole and by `auto`, if they are more
    use_own: bool = True  # score by the target's own first layers as well
    shares: tuple[float, ...] = SHARES
    original_shares: tuple[float, ...] = ()
    device: str = "cpu"
    max_ctx: int = 8192
    kinds: tuple[str, ...] = tuple(KINDS)


@dataclass(slots=True)
class Tally:
    """Cases of one kind under one setting."""

    num_cases: int = 0
    score: float = 0.0  # of all: 1 each, where all needed places are kept, or the reply is right
    kept_shares: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)

    def add(self, score: float, kept_share: float, first_token_ms: float | None = None) -> None:
        self.num_cases += 1
        self.score = round(self.score + score, 4)
        self.kept_shares.append(round(kept_share, 4))
        if first_token_ms is not None:
            self.first_token_ms.append(round(first_token_ms, 1))


Tallies = dict[str, Tally]  # by kind, who scored, with what, and share


class Answered(NamedTuple):
    score: float
    first_token_ms: float


def name_model(model: str) -> str:
    """What people call it, without the form of its weights."""
    return Path(model).name.removesuffix(".gguf").lower().partition("-instruct")[0]


class _Bench:
    def __init__(self, engine: Engine, options: CompressOptions) -> None:
        self.engine, self.options = engine, options
        names = {name_model(model): model for model in options.drafters}
        self.first = next(iter(names), "self")
        names |= {"self": "self"} if options.use_own else {}
        config = engine.tokens.config
        self.compressors = {
            name: Compressor(engine.tokens, engine.tokenizer, replace(config, compress_with=model))
            for name, model in names.items()
        }
        self.kept: Tallies = {}
        self.replies: Tallies = {}
        self.score_ms: dict[str, list[float]] = {}
        self.auto: list[dict[str, Any]] = []  # every case that `auto` shortened
        self._known: dict[str, Answered] = {}  # replies of a case, by its messages

    def run(self, case: Case, seed: int) -> None:
        self._known.clear()
        options, whole = self.options, Answered(0.0, 0.0)
        if is_answered := seed < max(options.num_replies, options.num_auto):
            whole = self._answer(case, case.messages(case.text), FULL, 1.0, 0.0)
        for name, compressor in self.compressors.items():
            if seed < options.num_cases:
                self._run_shares(case, name, compressor, is_answered=seed < options.num_replies)
            if is_answered:
                self._answer_auto(case, seed, name, compressor, whole)

    def _run_shares(
        self, case: Case, name: str, compressor: Compressor, *, is_answered: bool
    ) -> None:
        start = time.perf_counter()
        scorer, tokenizer = compressor.open()
        ids = _encode(tokenizer, case.text)
        starts = token_places(tokenizer, case.text, ids)[:-1:CHUNK_LEN].tolist()
        places = [*starts, len(case.text)]
        scores = scorer.score(ids, _encode(tokenizer, f"\n\n{case.question}")).tolist()
        score_ms = (time.perf_counter() - start) * 1000
        self.score_ms.setdefault(name, []).append(round(score_ms, 1))
        for share in (0.0, *self.options.shares):
            for rules in ("rules", "scores"):
                asked = LongText(0, case.text, case.question if rules == "rules" else "")
                is_kept = choose_chunks(scores, share, places, case.text, asked)
                cut = Cut(case.text)
                cut.shorter, _ = cut_text(case.text, places, is_kept, cut.count)
                key = f"{case.kind}/{name}/{rules}/{share}"
                kept_share = self._count(cut.shorter) / self._count(case.text)
                if case.needed:
                    is_right = all(piece in cut.shorter for piece in case.needed)
                    self.kept.setdefault(key, Tally()).add(float(is_right), kept_share)
                if is_answered and share and rules == "rules":
                    self._answer_share(case, name, share, cut, kept_share, score_ms)

    def _answer_share(
        self, case: Case, name: str, share: float, cut: Cut, kept_share: float, score_ms: float
    ) -> None:
        messages, setting = case.messages(cut.shorter), f"{name}/{share}"
        self._answer(case, messages, setting, kept_share, score_ms)
        if name != self.first or share not in self.options.original_shares:
            return
        tools = {"tools": case.options().get("tools", ())}
        prompts = [
            self.engine.encode_chat(said, **tools) for said in (case.messages(case.text), messages)
        ]
        positions = find_positions(self.engine.tokenizer, prompts[0], prompts[1], cut)
        self._known.clear()
        with placed(self.engine, positions):
            self._answer(case, messages, f"{setting}/{ORIGINAL}", kept_share, score_ms)
        self._known.clear()

    def _answer_auto(
        self, case: Case, seed: int, name: str, compressor: Compressor, whole: Answered
    ) -> None:
        messages, report = compressor.shorten(
            case.messages(case.text), AUTO, "auto", has_tools=case.has_tools
        )
        assert report is not None
        before = report.tokens_before
        kept_share = report.tokens_kept / before if before else 1.0
        found = self._answer(case, messages, f"{name}/{AUTO}", kept_share, report.score_ms)
        if report.num_texts:
            text = "\n".join(str(message["content"]) for message in messages)
            is_kept = all(piece in text for piece in case.needed)
            row = {"kind": case.kind, "seed": seed, "scorer": name, "is_kept": is_kept}
            self.auto.append(row | {"score": found.score, "whole": whole.score})

    def _answer(
        self,
        case: Case,
        messages: Sequence[Mapping[str, Any]],
        setting: str,
        kept_share: float,
        score_ms: float,
    ) -> Answered:
        """A prompt that was answered before has the same reply."""
        key = json.dumps(list(messages))
        if key not in self._known:
            self._known[key] = self._ask(case, messages)
        found = self._known[key]
        tally = self.replies.setdefault(f"{case.kind}/{setting}", Tally())
        tally.add(found.score, kept_share, found.first_token_ms + score_ms)
        return found

    def _ask(self, case: Case, messages: Sequence[Mapping[str, Any]]) -> Answered:
        self.engine.tokens.reset()
        generation = self.engine.chat(messages, compress="off", **case.options())
        for _ in generation:
            pass
        calls = [call["function"]["arguments"] for call in generation.message.calls]
        score = case.judge("\n".join((generation.text, *calls)))
        return Answered(score, generation.usage.first_token_ms)

    def _count(self, text: str) -> int:
        return len(_encode(self.engine.tokenizer, text))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False, starts_text=False)


def measure_compress(
    options: CompressOptions, deadline: Deadline, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """All that is known after each round of cases, one of each kind."""
    fields: dict[str, Any] = {"device": options.device, "max_ctx": options.max_ctx}
    opened = Engine.open(options.target, draft="none", prefix_bytes=0, **fields)
    with closing(opened) as engine:
        bench = _Bench(engine, options)
        num_cases = max(options.num_cases, options.num_auto)
        for seed in range(num_cases):
            for kind in options.kinds:
                say(f"{kind}: case {seed + 1} of {num_cases}, {deadline.left_s:.0f} s left")
                num_chars = options.num_chars[seed % len(options.num_chars)]
                case = make_case(kind, num_chars, seed)
                bench.run(case, seed)
            yield {
                "kept": {key: asdict(tally) for key, tally in bench.kept.items()},
                "replies": {key: asdict(tally) for key, tally in bench.replies.items()},
                "score_ms": bench.score_ms,
                "auto": bench.auto,
            }
            if deadline.is_over:
                return


def write_compress(
    out: Path, options: CompressOptions, deadline: Deadline, say: Callable[[str], None]
) -> None:
    result = {
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(describe_machine()),
        "settings": {
            **asdict(options),
            "target": Path(options.target).name,
            "drafters": [Path(drafter).name for drafter in options.drafters],
            "auto_share": AUTO_SHARE,
            "auto_own_share": AUTO_OWN_SHARE,
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    before = None
    if set(options.kinds) != set(KINDS) and out.exists():
        before = json.loads(out.read_text(encoding="utf-8"))
    for known in measure_compress(options, deadline, say):
        found = {**result, **known}
        if before is not None:
            found = join_results(before, found, options.kinds)
        out.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")


def join_results(
    before: Mapping[str, Any], now: Mapping[str, Any], kinds: Sequence[str]
) -> dict[str, Any]:
    """What was measured now, of these kinds, and the rest as before."""
    joined = dict(before) | {name: before[name] | now[name] for name in ("kept", "replies")}
    joined["auto"] = [row for row in before["auto"] if row["kind"] not in kinds] + now["auto"]
    where = {"timestamp": now["timestamp"], "settings": now["settings"]}
    joined["apart"] = before.get("apart", {}) | dict.fromkeys(kinds, where)
    return joined
