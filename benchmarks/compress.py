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
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks.compress_case import KINDS, Case, make_case
from benchmarks.markdown import table
from benchmarks.parts import Deadline
from draftree.bench.machine import describe_machine
from draftree.chat import Engine
from draftree.compress import AUTO_SHARE, AUTO_TOKENS, Compressor
from draftree.compress import CompressOptions as RequestOptions
from draftree.engine.scoring import CHUNK_LEN
from draftree.text.compress import LongText, choose_chunks, chunk_places, cut_text
from draftree.text.tokenizer import Tokenizer

SHARES: Final = (0.05, 0.1, 0.2, 0.3)
FULL, AUTO = "full", "auto"


@dataclass(frozen=True, slots=True)
class CompressOptions:
    """num_chars: of a text; cases of a kind take them in turns."""

    target: str
    drafter: str
    num_chars: tuple[int, ...] = (10_000,)
    num_cases: int = 4  # of each kind
    num_replies: int = 2  # of those, that the target answers
    use_own: bool = True  # score by the target's own first layers as well
    shares: tuple[float, ...] = SHARES
    device: str = "cpu"
    max_ctx: int = 8192


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


class _Bench:
    def __init__(self, engine: Engine, options: CompressOptions) -> None:
        self.engine, self.options = engine, options
        names = {"drafter": options.drafter} | ({"self": "self"} if options.use_own else {})
        config = engine.tokens.config
        self.compressors = {
            name: Compressor(engine.tokens, engine.tokenizer, replace(config, compress_with=model))
            for name, model in names.items()
        }
        self.kept: Tallies = {}
        self.replies: Tallies = {}
        self.score_ms: dict[str, list[float]] = {}

    def run(self, case: Case, *, is_answered: bool) -> None:
        for name, compressor in self.compressors.items():
            start = time.perf_counter()
            scorer, tokenizer = compressor.open()
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
                    key = f"{case.kind}/{name}/{rules}/{share}"
                    kept_share = self._count(text) / self._count(case.text)
                    if case.needed:
                        is_right = all(piece in text for piece in case.needed)
                        self.kept.setdefault(key, Tally()).add(float(is_right), kept_share)
                    if is_answered and share and rules == "rules":
                        messages = case.messages(text)
                        self._answer(case, messages, f"{name}/{share}", kept_share, score_ms)
            if is_answered:
                self._answer_auto(case, name, compressor)
        if is_answered:
            self._answer(case, case.messages(case.text), FULL, 1.0, 0.0)

    def _answer_auto(self, case: Case, name: str, compressor: Compressor) -> None:
        messages, report = compressor.compress(
            case.messages(case.text), RequestOptions("auto"), has_tools=case.has_tools
        )
        assert report is not None
        before = report.tokens_before
        kept_share = report.tokens_kept / before if before else 1.0
        self._answer(case, messages, f"{name}/{AUTO}", kept_share, report.score_ms)

    def _answer(
        self,
        case: Case,
        messages: Sequence[Mapping[str, Any]],
        setting: str,
        kept_share: float,
        score_ms: float,
    ) -> None:
        self.engine.tokens.reset()
        generation = self.engine.chat(messages, compress="off", **case.options())
        for _ in generation:
            pass
        calls = [call["function"]["arguments"] for call in generation.message.calls]
        score = case.judge("\n".join((generation.text, *calls)))
        first_ms = generation.usage.first_token_ms + score_ms
        self.replies.setdefault(f"{case.kind}/{setting}", Tally()).add(score, kept_share, first_ms)

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
        for seed in range(options.num_cases):
            for kind in KINDS:
                say(f"{kind}: case {seed + 1} of {options.num_cases}, {deadline.left_s:.0f} s left")
                num_chars = options.num_chars[seed % len(options.num_chars)]
                case = make_case(kind, num_chars, seed)
                bench.run(case, is_answered=seed < options.num_replies)
            yield {
                "kept": {key: asdict(tally) for key, tally in bench.kept.items()},
                "replies": {key: asdict(tally) for key, tally in bench.replies.items()},
                "score_ms": bench.score_ms,
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
            "drafter": Path(options.drafter).name,
            "auto_share": AUTO_SHARE,
        },
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    for known in measure_compress(options, deadline, say):
        out.write_text(json.dumps({**result, **known}, indent=1) + "\n", encoding="utf-8")


def make_section(result: Mapping[str, Any]) -> list[str]:
    """Markdown: cases whose needed places are kept, and how well the target answers."""
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
        [name, kind, _cells(result["replies"], [f"{kind}/{FULL}"])]
        + [_cells(result["replies"], [f"{kind}/{name}/{key}"]) for key in (*shares, AUTO)]
        for name in result["score_ms"]
        for kind in KINDS
        if f"{kind}/{name}/{AUTO}" in result["replies"]
    ]
    if by_kind:
        head = ["scorer", "answered by the target", "full"]
        head += [*(f"share {share:g}" for share in shares), AUTO]
        lines += ["", *table(head, by_kind), "", "Right replies, of all, and the share that was "]
        lines[-1] += "kept; of several answers, and of a module's words about itself, the share."
    return [*lines, "", _note(result)]


def worst_of_auto(result: Mapping[str, Any]) -> float:
    """Score of `auto` over that of the whole text, of the worst kind and scorer."""
    replies = result["replies"]
    ratios = [
        replies[f"{kind}/{name}/{AUTO}"]["score"] / replies[f"{kind}/{FULL}"]["score"]
        for kind in KINDS
        for name in result["score_ms"]
        if f"{kind}/{name}/{AUTO}" in replies and replies[f"{kind}/{FULL}"]["score"]
    ]
    return round(min(ratios), 4)


def draw_quality(result: Mapping[str, Any], path: Path) -> None:
    """Score over that of the whole text, against the share that was kept, kind by kind."""
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 3.4), layout="constrained")
    names, replies = list(result["score_ms"]), result["replies"]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for kind in KINDS:
            whole = replies.get(f"{kind}/{FULL}", {}).get("score")
            if not whole:
                continue
            found = [replies[f"{kind}/{name}/{share}"] for share in result["settings"]["shares"]]
            kept = [sum(tally["kept_shares"]) / tally["num_cases"] for tally in found]
            axes.plot(kept, [t["score"] / whole for t in found], marker="o", label=kind)
        axes.axhline(1.0, color="#888888", linewidth=0.8)
        axes.set(xlabel="share of the text that was kept", ylabel="score over the whole text's")
        axes.set_title(f"scored by: {name}", fontsize=9)
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _cells(tallies: Mapping[str, Any], keys: Sequence[str]) -> str:
    found = [tallies[key] for key in keys if key in tallies]
    if not found:
        return ""
    score, total = (sum(tally[name] for tally in found) for name in ("score", "num_cases"))
    kept = [share for tally in found for share in tally["kept_shares"]]
    return f"{round(score, 1):g} of {total}, {100 * sum(kept) / len(kept):.0f} %"


def _note(result: Mapping[str, Any]) -> str:
    settings = result["settings"]
    times = ", ".join(
        f"{name} {sum(values) / len(values) / 1000:.2f} s"
        for name, values in result["score_ms"].items()
    )
    lengths = ", ".join(f"{count:,}" for count in settings["num_chars"])
    place = "a shared machine" if settings["device"] == "cpu" else "a GPU"
    return (
        f"Target {settings['target']}, drafter {settings['drafter']}; texts of {lengths} "
        f"characters; `auto` takes a share of {settings['auto_share']:g}, and leaves alone texts "
        f"of up to {AUTO_TOKENS:,} tokens and questions about the whole. Mean time of scoring a "
        f"text, on {place}: {times}."
    )
