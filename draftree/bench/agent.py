"""A coding agent's session against any server that speaks OpenAI's protocol: how soon the first
token of each turn comes, beside the same prompt read cold.

Results of tools are written here, replies are the server's own and are sent back as they came.
After the session every prompt is asked once more behind a number of its own, so that no server
knows it. Prompts and replies are not stored.
"""

import json
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass
from itertools import count, islice
from typing import Any, Final

from draftree.bench.http import Endpoint, read_events
from draftree.bench.median import Samples, summarize
from draftree.errors import BenchError

Message = dict[str, Any]
SYSTEM: Final = (
    "You are a coding agent that works on a small Python package. Read a file before you edit it, "
    "make one change at a time, run the tests after each change, and end with one sentence."
)
TOPICS: Final = ("median", "variance", "quantile", "histogram", "rank", "clip")
_STRING: Final = {"type": "string", "maxLength": 60}


def _tool(name: str, description: str, *fields: str) -> Message:
    schema = {
        "type": "object",
        "properties": dict.fromkeys(fields, _STRING),
        "required": list(fields),
        "additionalProperties": False,
    }
    function = {"name": name, "description": description, "parameters": schema}
    return {"type": "function", "function": function}


def make_tools() -> list[Message]:
    return [
        _tool("read_file", "Shows a file with line numbers.", "path"),
        _tool("edit_file", "Replaces a text that occurs once in a file.", "path", "old", "new"),
        _tool("run_tests", "Runs the tests of a module and shows what failed.", "module"),
    ]


def _write_file(num_functions: int) -> str:
    lines = ['"""Figures of a list of numbers."""', "", "import math", ""]
    names = (f"{topic}{n or ''}" for n in count() for topic in TOPICS)
    for topic in islice(names, num_functions):
        lines += ["", f"def {topic}(values, share=0.5):"]
        lines += [f'    """The {topic} of the values, which need not be sorted."""']
        lines += ["    ordered = sorted(values)", "    place = share * (len(ordered) - 1)"]
        lines += ["    low, high = math.floor(place), math.ceil(place)"]
        lines += [
            f"    return ordered[low] + (ordered[high] - ordered[low]) * place  # {topic}",
            "",
        ]
    return "\n".join(f"{number:4} {line}" for number, line in enumerate(lines, 1))


@dataclass(frozen=True, slots=True)
class ScriptedTurn:
    """kind: the tool that is to be called, or "answer". follow_up: what the reply is answered
    with, by the tool or the user.
    """

    kind: str
    follow_up: str


def make_session(file_scale: int = 1) -> tuple[str, list[ScriptedTurn]]:
    """What the user asks first, and the turns that follow: four for each topic. The file that is
    read grows by so many functions with each.
    """
    asks = [f"Function {topic} in stats.py rounds wrongly; mend it." for topic in TOPICS]
    turns: list[ScriptedTurn] = []
    for number, topic in enumerate(TOPICS, 1):
        diff = f"-    return ordered[low]  # {topic}\n+    return float(ordered[low])  # {topic}"
        ran = f"test_stats.py::test_{topic} PASSED\n{number} passed, {6 - number} failed"
        thanks = asks[number] if number < len(asks) else "Thank you."
        turns += [
            ScriptedTurn("read_file", _write_file(number * file_scale)),
            ScriptedTurn("edit_file", f"stats.py was changed:\n{diff}"),
            ScriptedTurn("run_tests", ran),
            ScriptedTurn("answer", thanks),
        ]
    return asks[0], turns


@dataclass(frozen=True, slots=True)
class AgentTurn:
    kind: str
    prompt_tokens: int
    cached_tokens: int
    num_tokens: int
    first_ms: float
    total_ms: float
    cold_first_ms: float = 0.0  # of the same prompt, known to nobody


@dataclass(frozen=True, slots=True)
class AgentReport:
    turns: list[AgentTurn]
    first_over_cold: Samples  # turns from the second on
    cached_share: float  # of all prompt tokens of those turns
    tokens_per_second: dict[str, float]  # by kind of turn, after the first token
    total_s: float

    def headline(self) -> dict[str, float]:
        return {"first_over_cold": self.first_over_cold.median, "cached_share": self.cached_share}


@dataclass(frozen=True, slots=True)
class AgentOptions:
    num_tokens: int  # most of a reply
    pause_s: float  # that tools take between turns
    num_turns: int
    file_scale: int = 1  # 12: more than 30,000 tokens at the end

    def settings(self) -> dict[str, Any]:
        return asdict(self)


def measure_agent(
    endpoint: Endpoint, model: str, options: AgentOptions, say: Callable[[str], None]
) -> AgentReport:
    first, script = make_session(options.file_scale)
    messages: list[Message] = [
        {"role": "system", "content": SYSTEM},
        {"role": "user", "content": first},
    ]
    prompts: list[list[Message]] = []
    warm: list[AgentTurn] = []
    start = time.perf_counter()
    for number, turn in enumerate(script[: options.num_turns], 1):
        say(f"turn {number} of {options.num_turns}")
        prompts.append(list(messages))
        measured, reply = _ask(endpoint, model, turn.kind, messages, options.num_tokens)
        warm.append(measured)
        messages += [reply, *_answer(reply, turn.follow_up)]
        time.sleep(options.pause_s)
    total_s = time.perf_counter() - start
    turns = []
    for number, (known, prompt) in enumerate(zip(warm, prompts, strict=True), 1):
        say(f"turn {number} of {options.num_turns}, cold")
        system = {"role": "system", "content": f"{time.time_ns()} {SYSTEM}"}
        cold, _ = _ask(endpoint, model, known.kind, [system, *prompt[1:]], 1)
        turns.append(AgentTurn(**asdict(known) | {"cold_first_ms": cold.first_ms}))
    return _summarize(turns, total_s)


def _summarize(turns: Sequence[AgentTurn], total_s: float) -> AgentReport:
    later = turns[1:]
    if not later:
        raise BenchError("A session has two turns at least.")
    speeds = {}
    for kind in dict.fromkeys(turn.kind for turn in turns):
        own = [turn for turn in turns if turn.kind == kind]
        decode_s = sum(turn.total_ms - turn.first_ms for turn in own) / 1000
        speeds[kind] = sum(turn.num_tokens for turn in own) / decode_s if decode_s else 0.0
    return AgentReport(
        list(turns),
        summarize([turn.first_ms / turn.cold_first_ms for turn in later], "ratio"),
        sum(t.cached_tokens for t in later) / max(sum(t.prompt_tokens for t in later), 1),
        speeds,
        total_s,
    )


def _ask(
    endpoint: Endpoint, model: str, kind: str, messages: Sequence[Message], num_tokens: int
) -> tuple[AgentTurn, Message]:
    """One turn, and the reply as it is sent back."""
    is_call = kind != "answer"
    body = {
        "model": model,
        "messages": messages,
        "tools": make_tools(),
        "max_tokens": num_tokens,
        "tool_choice": {"type": "function", "function": {"name": kind}} if is_call else "auto",
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    reply: Message = {"role": "assistant", "content": ""}
    calls: dict[int, Message] = {}
    usage: dict[str, Any] = {}
    first_s, start = 0.0, time.perf_counter()
    with closing(endpoint.request("POST", "chat/completions", body)) as response:
        for event in read_events(response):
            if "error" in event:
                raise BenchError(f"{endpoint.url} broke off: {str(event['error'])[:300]}")
            if _add(event, reply, calls) and not first_s:
                first_s = time.perf_counter() - start
            usage = event.get("usage") or usage
    end_s = time.perf_counter() - start
    if all(_is_json(call["function"]["arguments"]) for call in calls.values()) and calls:
        reply["tool_calls"] = [calls[index] for index in sorted(calls)]
    cached = (usage.get("prompt_tokens_details") or {}).get("cached_tokens") or 0
    counts = usage.get("prompt_tokens", 0), cached, usage.get("completion_tokens", 0)
    return AgentTurn(kind, *counts, 1000 * (first_s or end_s), 1000 * end_s), reply


def _add(event: dict[str, Any], reply: Message, calls: dict[int, Message]) -> bool:
    """Whether anything was new in an event."""
    is_new = False
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        reply["content"] += delta.get("content") or ""
        for piece in delta.get("tool_calls") or ():
            empty = {"id": piece.get("id"), "type": "function"}
            call = calls.setdefault(piece.get("index", 0), empty)
            function = call.setdefault("function", {"name": "", "arguments": ""})
            for name in function:
                function[name] += (piece.get("function") or {}).get(name) or ""
        is_new |= any(delta.get(name) for name in ("content", "reasoning_content", "tool_calls"))
    return is_new


def _answer(reply: Message, text: str) -> Iterator[Message]:
    """Results of the calls; a reply without any is answered by the user."""
    calls = reply.get("tool_calls") or ()
    for call in calls:
        yield {"role": "tool", "tool_call_id": call["id"], "content": text}
    if not calls:
        yield {"role": "user", "content": text}


def _is_json(text: str) -> bool:
    try:
        json.loads(text)
    except ValueError:
        return False
    return True
