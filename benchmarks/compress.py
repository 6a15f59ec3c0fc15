"""What prompt compression keeps and what it costs: whether the needed places of long texts survive,
by scorer and share, and whether a target still answers.

In: a target, a scoring model. Out: a result file, written anew after each case. A case is scored
once for all shares.
"""

import json
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Final

from benchmarks.compress_case import KINDS, Case, make_case
from benchmarks.markdown import table
from draftree.bench.machine import describe_machine
from draftree.chat import Engine
from draftree.compress import AUTO_SHARE
from draftree.engine.locate import locate
from draftree.engine.scoring import CHUNK_LEN, Scorer
from draftree.text.compress import LongText, choose_chunks, chunk_places, cut_text
from draftree.text.tokenizer import Tokenizer

SHARES: Final = (0.05, 0.1, 0.2, 0.3)
FULL: Final = "full"
_REPLY_LEN: Final = 24


@dataclass(frozen=True, slots=True)
class CompressOptions:
    target: str
    drafter: str
    num_chars: int = 10_000
    num_cases: int = 4  # of each kind
    num_replies: int = 2  # of those, that the target answers
    use_own: bool = True  # score by the target's own first layers as well
    shares: tuple[float, ...] = SHARES


@dataclass(slots=True)
class Tally:
    """Cases of one kind under one setting."""

    num_cases: int = 0
    num_right: int = 0  # all needed places are kept, or the reply has all answers
    kept_shares: list[float] = field(default_factory=list)
    first_token_ms: list[float] = field(default_factory=list)

    def add(self, is_right: bool, kept_share: float, first_token_ms: float | None = None) -> None:
        self.num_cases += 1
        self.num_right += is_right
        self.kept_shares.append(round(kept_share, 4))
        if first_token_ms is not None:
            self.first_token_ms.append(round(first_token_ms, 1))


Tallies = dict[str, Tally]  # by kind, who scored, with what, and share


class _Bench:
    def __init__(self, engine: Engine, options: CompressOptions) -> None:
        self.engine, self.options = engine, options
        checkpoint = locate(options.drafter, "none").checkpoint
        self.scorers: dict[str, tuple[Scorer, Tokenizer]] = {
            "drafter": (
                engine.tokens.new_scorer(checkpoint),
                Tokenizer.from_metadata(checkpoint.metadata),
            )
        }
        if options.use_own:
            self.scorers["self"] = engine.tokens.new_scorer(None), engine.tokenizer
        self.kept: Tallies = {}
        self.replies: Tallies = {}
        self.score_ms: dict[str, list[float]] = {}

    def run(self, case: Case, *, is_answered: bool) -> None:
        for name, (scorer, tokenizer) in self.scorers.items():
            start = time.perf_counter()
            ids = _encode(tokenizer, case.text)
            places = chunk_places(tokenizer, case.text, ids, CHUNK_LEN)
            scores = scorer.score(ids, _encode(tokenizer, f"\n\n{case.question}")).tolist()
            score_ms = (time.perf_counter() - start) * 1000
            self.score_ms.setdefault(name, []).append(round(score_ms, 1))
            for share in (0.0, *self.options.shares):
                for rules in ("rules", "scores"):
                    asked = LongText(0, case.text, case.question if rules == "rules" else "")
                    is_kept = choose_chunks(scores, share, places, case.text, asked)
                    text, _ = cut_text(case.text, places, is_kept, lambda start, end: end - start)
                    is_right = all(piece in text for piece in case.needed)
                    key = f"{case.kind}/{name}/{rules}/{share}"
                    kept_share = self._count(text) / self._count(case.text)
                    self.kept.setdefault(key, Tally()).add(is_right, kept_share)
                    if is_answered and share and (name, rules) == ("drafter", "rules"):
                        self._answer(case, text, f"{case.kind}/{share}", kept_share, score_ms)
        if is_answered:
            self._answer(case, case.text, f"{case.kind}/{FULL}", 1.0, 0.0)

    def _answer(self, case: Case, text: str, key: str, kept_share: float, score_ms: float) -> None:
        self.engine.tokens.reset()
        content = f"{text}\n\n{case.question}"
        generation = self.engine.chat(
            [{"role": "user", "content": content}], max_tokens=_REPLY_LEN, compress="off"
        )
        reply = "".join(delta.text for delta in generation)
        is_right = all(answer in reply for answer in case.answers)
        first_ms = generation.usage.first_token_ms + score_ms
        self.replies.setdefault(key, Tally()).add(is_right, kept_share, first_ms)

    def _count(self, text: str) -> int:
        return len(_encode(self.engine.tokenizer, text))


def _encode(tokenizer: Tokenizer, text: str) -> list[int]:
    return tokenizer.encode(text, add_special=False, parse_special=False, starts_text=False)


def measure_compress(
    options: CompressOptions, say: Callable[[str], None]
) -> Iterator[dict[str, Any]]:
    """All that is known after each case; the kinds take turns."""
    with closing(Engine.open(options.target, draft="none", device="cpu")) as engine:
        bench = _Bench(engine, options)
        for seed in range(options.num_cases):
            for kind in KINDS:
                say(f"{kind}: case {seed + 1} of {options.num_cases}")
                case = make_case(kind, options.num_chars, seed)
                bench.run(case, is_answered=seed < options.num_replies)
                yield {
                    "kept": {key: asdict(tally) for key, tally in bench.kept.items()},
                    "replies": {key: asdict(tally) for key, tally in bench.replies.items()},
                    "score_ms": bench.score_ms,
                }


def write_compress(out: Path, options: CompressOptions, say: Callable[[str], None]) -> None:
    result = {
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(describe_machine()),
        "settings": asdict(options) | {"auto_share": AUTO_SHARE},
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    for known in measure_compress(options, say):
        out.write_text(json.dumps({**result, **known}, indent=1) + "\n", encoding="utf-8")


def make_section(result: Mapping[str, Any]) -> list[str]:
    """Markdown: cases whose needed places are kept, and cases that the target answers."""
    shares = result["settings"]["shares"]
    rows = []
    for name in result["score_ms"]:
        for rules, words in (("rules", "scores and rules"), ("scores", "scores alone")):
            cells = [
                _cells(result["kept"], [f"{kind}/{name}/{rules}/{share}" for kind in KINDS])
                for share in (0.0, *shares)
            ]
            rows.append([name, words, *cells])
    head = ["scorer", "kept by", "rules only", *(f"share {share:g}" for share in shares)]
    lines = [*table(head, rows), "", "Cases with every needed place kept, of all; share of the "]
    lines[-1] += "text that was kept, ends and whole lines included."
    by_kind = [
        [kind, *(_cells(result["replies"], [f"{kind}/{key}"]) for key in (FULL, *shares))]
        for kind in KINDS
        if f"{kind}/{FULL}" in result["replies"]
    ]
    if by_kind:
        head = ["answered by the target", "full", *(f"share {share:g}" for share in shares)]
        lines += ["", *table(head, by_kind)]
    return [*lines, "", _note(result)]


def _cells(tallies: Mapping[str, Any], keys: Sequence[str]) -> str:
    found = [tallies[key] for key in keys if key in tallies]
    if not found:
        return ""
    right, total = (sum(tally[name] for tally in found) for name in ("num_right", "num_cases"))
    kept = [share for tally in found for share in tally["kept_shares"]]
    return f"{right} of {total}, {100 * sum(kept) / len(kept):.0f} %"


def _note(result: Mapping[str, Any]) -> str:
    settings = result["settings"]
    times = ", ".join(
        f"{name} {sum(values) / len(values) / 1000:.1f} s"
        for name, values in result["score_ms"].items()
    )
    return (
        f"Target {settings['target']}, drafter {settings['drafter']}; texts of "
        f"{settings['num_chars']:,} characters; `auto` takes a share of "
        f"{settings['auto_share']:g}. Mean time of scoring a text, on a shared machine: {times}."
    )
