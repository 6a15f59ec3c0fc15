"""The recorded session of a coding agent, read in four ways: whole, compressed, from the cache of
conversations, and both.

In: an open engine, a scoring model. Out: times and calls of every way. The calls that are sent back
are the recorded ones, so that all ways have one conversation; those of the model are judged beside
them. Ways take turns, round by round.
"""

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from types import MappingProxyType
from typing import Any, Final, NamedTuple

from benchmarks.markdown import short, spread, table
from benchmarks.parts import Deadline
from draftree.bench.agent import SYSTEM, TOPICS, Message, make_session, make_tools
from draftree.bench.machine import describe_machine
from draftree.bench.median import Report, Samples, summarize
from draftree.bench.record import Json
from draftree.chat import Engine
from draftree.compress import Compressor

PLAIN, COMPRESSED, CACHED, BOTH = "plain", "compressed", "cached", "both"
WAYS: Final = MappingProxyType(
    {PLAIN: "whole", COMPRESSED: "compressed", CACHED: "prefix cache", BOTH: "both"}
)
ANSWER: Final = "answer"
_WARM_TURNS: Final = 6  # in which passes of all sizes are made ready
_FAR: Final = 1.5  # times the fastest way: not measured again


@dataclass(frozen=True, slots=True)
class ReplayOptions:
    """is_judged: the model may be right or wrong; one with random weights writes any text."""

    mode: str = "auto"
    num_tokens: int = 64  # most of a reply
    num_turns: int = 24
    file_scale: int = 12
    num_rounds: int = 3
    is_judged: bool = True


class RecordedTurn(NamedTuple):
    """What is asked, the reply that is sent back, and what the tool or the user answers."""

    kind: str
    topic: str
    reply: Message
    follow_up: Message


@dataclass(frozen=True, slots=True)
class ReplayTurn:
    first_ms: float
    total_ms: float
    prompt_tokens: int
    cached_tokens: int
    num_tokens: int
    score_ms: float
    calls: str  # names and arguments, or the text
    is_call: bool  # one is right
    is_right: bool


def record_session(file_scale: int) -> tuple[list[Message], list[RecordedTurn]]:
    """How the conversation begins, and how it goes on."""
    first, script = make_session(file_scale)
    turns = []
    for number, scripted in enumerate(script):
        topic, call_id = TOPICS[number // 4], f"call_{number}"
        reply: Message = {"role": "assistant", "content": ""}
        follow_up: Message = {"role": "tool", "tool_call_id": call_id}
        if scripted.kind == ANSWER:
            reply["content"] = f"Function {topic} rounds rightly now."
            follow_up = {"role": "user"}
        else:
            arguments = json.dumps(_arguments(scripted.kind, topic))
            function = {"name": scripted.kind, "arguments": arguments}
            reply["tool_calls"] = [{"id": call_id, "type": "function", "function": function}]
        follow_up["content"] = scripted.follow_up
        turns.append(RecordedTurn(scripted.kind, topic, reply, follow_up))
    return [{"role": "system", "content": SYSTEM}, {"role": "user", "content": first}], turns


def _arguments(kind: str, topic: str) -> dict[str, str]:
    old, new = (f"return {value}  # {topic}" for value in ("ordered[low]", "float(ordered[low])"))
    return {
        "read_file": {"path": "stats.py"},
        "edit_file": {"path": "stats.py", "old": old, "new": new},
        "run_tests": {"module": "stats"},
    }[kind]


def judge_calls(turn: RecordedTurn, calls: Sequence[Mapping[str, Any]]) -> bool:
    """One call, of the recorded tool, for the same file or module, and of an edit the same
    function.
    """
    if len(calls) != 1:
        return False
    try:
        arguments = json.loads(calls[0]["function"]["arguments"])
        words = {name: str(arguments[name]) for name in _arguments(turn.kind, turn.topic)}
    except (ValueError, KeyError, TypeError):
        return False
    if calls[0]["function"]["name"] != turn.kind:
        return False
    if turn.kind == "run_tests":
        return "stats" in words["module"]
    return words["path"] == "stats.py" and turn.topic in words.get("old", turn.topic)


class Replay:
    """An engine with a cache of conversations; ways without one begin every turn with nothing."""

    def __init__(self, engine: Engine, scorer: str, options: ReplayOptions, report: Report) -> None:
        self.engine, self.options, self.report = engine, options, report
        self._scorer = scorer
        self._beginning, self._turns = record_session(options.file_scale)
        self._compressors = {way: self._new_compressor(way) for way in (COMPRESSED, BOTH)}

    def measure(self, deadline: Deadline) -> Json:
        """Rounds for which no time is left are left out, but for the first, and then ways that are
        far from the fastest.
        """
        found: dict[str, list[list[ReplayTurn]]] = {way: [] for way in WAYS}
        for way in WAYS:
            self.report(f"session, warming up: {WAYS[way]}")
            self._run(way, _WARM_TURNS)
        for number in range(self.options.num_rounds):
            if number and deadline.is_over:
                break
            totals = {way: _total_s(rounds).median for way, rounds in found.items() if rounds}
            for way, rounds in found.items():
                if totals and totals[way] > _FAR * min(totals.values()):
                    continue
                left = f"{deadline.left_s:.0f} s left"
                self.report(f"session, round {number + 1}: {WAYS[way]}, {left}")
                rounds.append(self._run(way, self.options.num_turns))
        return summarize_ways(found) | {"settings": asdict(self.options)}

    def _run(self, way: str, num_turns: int) -> list[ReplayTurn]:
        self.engine.tokens.reset()
        if way in self._compressors:
            self._compressors[way].reset()
        messages, found = list(self._beginning), []
        for turn in self._turns[: min(num_turns, self.options.num_turns)]:
            if way in (PLAIN, COMPRESSED):
                self.engine.tokens.reset()
            found.append(self._ask(way, turn, messages))
            messages += [turn.reply, turn.follow_up]
        return found

    def _ask(self, way: str, turn: RecordedTurn, messages: Sequence[Message]) -> ReplayTurn:
        is_call = self.options.is_judged and turn.kind != ANSWER
        choice = "required" if is_call else "auto"
        compressor = self._compressors.get(way)
        if compressor is not None:
            self.engine._compressor = compressor
        start = time.perf_counter()
        generation = self.engine.chat(
            messages,
            tools=make_tools(),
            tool_choice=choice,
            parallel_tool_calls=False,
            max_tokens=self.options.num_tokens,
            compress="off" if compressor is None else self.options.mode,
        )
        prepared_ms = 1000 * (time.perf_counter() - start)
        for _ in generation:
            pass
        total_ms = 1000 * (time.perf_counter() - start)
        usage, calls = generation.usage, generation.message.calls
        score_ms = 0.0 if usage.compression is None else usage.compression.score_ms
        said = [f"{c['function']['name']}({c['function']['arguments']})" for c in calls]
        return ReplayTurn(
            round(prepared_ms + usage.first_token_ms - score_ms, 2),
            round(total_ms, 2),
            *(usage.prompt_tokens, usage.cached_tokens, usage.completion_tokens),
            round(score_ms, 2),
            "\n".join(said) or generation.text,
            is_call,
            is_call and judge_calls(turn, calls),
        )

    def _new_compressor(self, way: str) -> Compressor:
        """Its scoring model is open, and ready for the usual lengths."""
        config = replace(self.engine.tokens.config, compress=self.options.mode)
        config = replace(config, compress_with=self._scorer)
        if way == COMPRESSED:
            config = replace(config, prefix_bytes=0)
        compressor = Compressor(self.engine.tokens, self.engine.tokenizer, config)
        compressor.warm_up()
        compressor.open()
        return compressor


def summarize_ways(found: Mapping[str, Sequence[Sequence[ReplayTurn]]]) -> Json:
    """Times are of all rounds; calls, which are the same in each, of the first."""
    totals = {way: _total_s(rounds) for way, rounds in found.items()}
    plain = found[PLAIN][0]
    faster = min((COMPRESSED, CACHED), key=lambda way: totals[way].median)
    ways = {}
    for way, rounds in found.items():
        turns, firsts = rounds[0], zip(*rounds, strict=True)
        pairs = [(own, whole) for own, whole in zip(turns, plain, strict=True) if own.is_call]
        ways[way] = {
            "total_s": asdict(totals[way]),
            "first_ms": asdict(summarize([_median_first(same) for same in firsts], "ms")),
            "score_s": round(sum(turn.score_ms for turn in turns) / 1000, 4),
            "prompt_tokens": sum(turn.prompt_tokens for turn in turns),
            "cached_tokens": sum(turn.cached_tokens for turn in turns),
            "last_prompt": turns[-1].prompt_tokens,
            "num_tokens": sum(turn.num_tokens for turn in turns),
            "num_calls": len(pairs),
            "num_right": sum(own.is_right for own, _ in pairs),
            "num_equal": sum(own.calls == whole.calls for own, whole in pairs),
            "calls": [turn.calls for turn in turns],
        }
    both = totals[BOTH].median / totals[faster].median
    return {"ways": ways, "faster": faster, "both_over_faster": round(both, 4)}


def _total_s(rounds: Sequence[Sequence[ReplayTurn]]) -> Samples:
    return summarize([sum(turn.total_ms for turn in turns) / 1000 for turns in rounds], "s")


def _median_first(turns: Sequence[ReplayTurn]) -> float:
    return median(turn.first_ms for turn in turns)


def right_over_plain(part: Json) -> float | None:
    """Right calls of both together over those of the whole conversation; None: not judged."""
    right = {way: part["ways"][way]["num_right"] for way in (PLAIN, BOTH)}
    if not part["settings"]["is_judged"] or not right[PLAIN]:
        return None
    return round(right[BOTH] / right[PLAIN], 4)


def write_session(
    out: Path,
    engine: Engine,
    model: str,
    scorer: str,
    options: ReplayOptions,
    deadline: Deadline,
    report: Report,
) -> Json:
    """Returns the line that a command ends with."""
    part = Replay(engine, scorer, options, report).measure(deadline)
    names = {"target": Path(model).name, "drafter": Path(scorer).name}
    gpu = engine.plan.gpu
    result = {
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(describe_machine()),
        "device": "CPU" if gpu is None else gpu.name,
        **names,
        **part,
    }
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    ratios = {"both_over_faster": part["both_over_faster"], "right": right_over_plain(part)}
    totals = {way: row["total_s"]["median"] for way, row in part["ways"].items()}
    return {"file": str(out), "total_s": totals, **ratios}


def make_section(part: Json) -> list[str]:
    settings, rows = part["settings"], []
    for way, words in WAYS.items():
        row = part["ways"][way]
        cells = [words, spread(row["total_s"]), short(row["first_ms"]["median"])]
        cells += [f"{row['prompt_tokens'] - row['cached_tokens']:,}", f"{row['score_s']:.2f}"]
        if settings["is_judged"]:
            cells += [f"{row[key]} of {row['num_calls']}" for key in ("num_right", "num_equal")]
        rows.append(cells)
    head = ["conversation", "all turns, s", "first token, ms", "tokens read", "scoring, s"]
    head += ["right calls", "the same as whole"] if settings["is_judged"] else []
    last = part["ways"][PLAIN]["last_prompt"]
    note = (
        f"The recorded session of a coding agent, {settings['num_turns']} turns, {last:,} tokens "
        f"at the end, `{settings['mode']}`; pauses are not counted. The recorded calls are sent "
        f"back; both together take {part['both_over_faster']:.3f} of the time of "
        f"{WAYS[part['faster']]} alone."
    )
    return [*table(head, rows), "", note]
