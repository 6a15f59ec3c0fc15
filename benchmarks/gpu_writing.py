"""Texts of several kinds of requests, written by engines that are open side by side.

In: a model's file, fields of EngineConfig. Out: texts with the wall-clock time and the nodes of
every round. What is made of them is in gpu_request.py and gpu_suite.py.
"""

import gc
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from types import TracebackType
from typing import Any, Final

from benchmarks.parts import Deadline
from draftree.bench.dataset import DATASETS, Prompt, chat_prompts, load_prompts, read_prompt
from draftree.bench.median import Report
from draftree.chat import Engine
from draftree.config import EngineConfig
from draftree.core import Request, SamplingParams, TokenGrammar, Usage
from draftree.decode.decoder import Round
from draftree.engine.engine import TokenEngine
from draftree.errors import BenchError
from draftree.text.constraint import CallTrigger, ReplyGrammar
from draftree.text.grammar import FormatKind, GrammarCompiler, ResponseFormat, json_rule
from draftree.text.turn import ReplyOptions, TurnPlanner

MAX_CTX: Final = 2048
CHAT: Final = "chat"  # the set of messages that come with the package
_STRING: Final = {"type": "string"}
SCHEMA: Final = {
    "type": "object",
    "properties": {
        "title": _STRING,
        "steps": {"type": "array", "items": _STRING, "minItems": 6},
        "answer": _STRING,
    },
    "required": ["title", "steps", "answer"],
    "additionalProperties": False,
}
PATTERN: Final = r"([A-Z][a-z]+( [a-z]+){2,12}\. ){20,60}"
_UNUSED: Final = ("<tool_call>", "<repo_name>", "<gh_stars>", "<file_sep>")
TOOL: Final[dict[str, Any]] = {
    "type": "function",
    "function": {
        "name": "look_up_weather",
        "description": "The weather of a town.",
        "parameters": {
            "type": "object",
            "properties": {"town": _STRING},
            "required": ["town"],
            "additionalProperties": False,
        },
    },
}


@dataclass(frozen=True, slots=True)
class Written:
    """round_ms: from one round's end to the next one's, on the wall clock."""

    tokens: list[int]
    usage: Usage
    round_ms: list[float]
    num_nodes: list[int]


def write(engine: TokenEngine, request: Request, *, use_cache: bool = False) -> Written:
    if not use_cache:
        engine.reset()
    stamps: list[float] = []
    num_nodes: list[int] = []

    def see(found: Round) -> None:
        num_nodes.append(found.tree.num_nodes)

    stream = engine.generate(request)
    stream.watch = see
    stream.on_round = lambda: stamps.append(time.perf_counter())
    tokens = [event.token for event in stream]
    spans = [1000 * (b - a) for a, b in pairwise(stamps)]
    return Written(tokens, stream.usage, spans, num_nodes)


class OpenEngines:
    """Engines of one model by name, each opened when it is first asked for."""

    def __init__(
        self, path: Path, device: str, configs: Mapping[str, Mapping[str, Any]], report: Report
    ) -> None:
        self._path, self._device, self._configs, self._report = path, device, configs, report
        self._opened: dict[str, Engine] = {}

    def __getitem__(self, name: str) -> Engine:
        if name not in self._opened:
            self._report(f"opening: {name}")
            self._opened[name] = self.open(**self._configs[name])
        return self._opened[name]

    def __enter__(self) -> "OpenEngines":
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def open(self, **config: Any) -> Engine:
        """Warmed up: kernels are compiled side by side, and no text waits for them."""
        fields: dict[str, Any] = {"device": self._device, "max_ctx": MAX_CTX, **config}
        return Engine.open(str(self._path), EngineConfig(**fields, warm_up=True))

    def close(self) -> None:
        while self._opened:
            self._opened.popitem()[1].close()
        gc.collect()


@dataclass(frozen=True, slots=True)
class Bench:
    """What parts measure with."""

    engines: OpenEngines
    sets: Mapping[str, Sequence[Prompt]]
    num_tokens: int
    deadline: Deadline
    report: Report


class Asker:
    """Requests of every kind on one prompt, for one model's tokenizer."""

    def __init__(self, engine: Engine, num_tokens: int) -> None:
        self._tokenizer, self._num_tokens = engine.tokenizer, num_tokens
        self._planner = TurnPlanner(engine.tokenizer)
        self._has_template = engine.has_template

    def ask(self, prompt: Prompt, sampling: SamplingParams | None = None, **more: Any) -> Request:
        ids = self._ids(prompt)[: MAX_CTX - self._num_tokens]
        limits = self._num_tokens, sampling or SamplingParams(), self._tokenizer.stop_ids
        return Request(tuple(ids), *limits, **more)

    def ask_with_tools(self, prompt: Prompt) -> tuple[Request, Request]:
        """A prompt that offers a tool, free, and under the tool's grammar."""
        messages = [{"role": "user", "content": prompt.text}]
        turn = self._planner.plan(messages, ReplyOptions(tools=(TOOL,)))
        limits = self._num_tokens, SamplingParams(), self._tokenizer.stop_ids
        free = Request(turn.prompt_ids, *limits)
        grammar = turn.grammar or self._watch_for_calls()
        return free, Request(turn.prompt_ids, *limits, grammar=grammar)

    def _watch_for_calls(self) -> TokenGrammar:
        """What models with a token for calls get; here it is one of those that they never write."""
        token = next(filter(None, map(self._tokenizer.find, _UNUSED)), None)
        if token is None:
            raise BenchError("The model has no token that could begin a call.")
        rules = json_rule("content", TOOL["function"]["parameters"])
        call = GrammarCompiler(self._tokenizer).compile(f"start: content\n{rules}")
        return ReplyGrammar(self._tokenizer, trigger=CallTrigger(token, call, is_single=False))

    def constrain(self, kind: FormatKind) -> TokenGrammar:
        definition = SCHEMA if kind is FormatKind.JSON_SCHEMA else PATTERN
        grammar = self._planner.constrain(ResponseFormat(kind, definition))
        assert grammar is not None
        return grammar

    def every_kind(self, prompt: Prompt, seed: int = 7) -> dict[str, Request]:
        warm = SamplingParams(temperature=0.8, seed=seed)
        schema, pattern = map(self.constrain, (FormatKind.JSON_SCHEMA, FormatKind.REGEX))
        return {
            "free": self.ask(prompt),
            "T = 0.8": self.ask(prompt, warm),
            "top-p": self.ask(prompt, SamplingParams(temperature=1.0, top_p=0.9, seed=seed)),
            "top-k, min-p": self.ask(
                prompt, SamplingParams(temperature=1.0, top_k=40, min_p=0.05, seed=seed)
            ),
            "log-probabilities": self.ask(prompt, logprobs=5),
            "bias": self.ask(prompt, logit_bias=((5, 1.5), (9, -2.0))),
            "penalty": self.ask(prompt, SamplingParams(repetition_penalty=1.1)),
            "schema": self.ask(prompt, grammar=schema),
            "schema, T = 0.8": self.ask(prompt, warm, grammar=schema),
            "regex": self.ask(prompt, grammar=pattern),
            "tools": self.ask_with_tools(prompt)[1],
        }

    def _ids(self, prompt: Prompt) -> Sequence[int]:
        if prompt.is_chat and self._has_template:
            return self._planner.plan([{"role": "user", "content": prompt.text}]).prompt_ids
        return self._tokenizer.encode(prompt.text)


def read_sets(file: Path | None, cache: Path, limit: int) -> dict[str, list[Prompt]]:
    """All data sets, or what a file holds of them: see write_sets."""
    if file is None:
        chats = [Prompt(text, is_chat=True) for text in chat_prompts()]
        others = {dataset.name: load_prompts(dataset.name, cache) for dataset in DATASETS}
        return {name: prompts[:limit] for name, prompts in ({CHAT: chats} | others).items()}
    sets: dict[str, list[Prompt]] = {}
    for line in file.read_text(encoding="utf-8").splitlines():
        item = json.loads(line)
        prompts = sets.setdefault(item["set"], [])
        if len(prompts) < limit:
            prompts.append(read_prompt(item, file.name))
    if not sets:
        raise BenchError(f"{file} holds no prompts.")
    return sets


def write_sets(file: Path, cache: Path, limit: int) -> None:
    """The first prompts of every data set as lines of JSON, for a machine without the wheels."""
    lines = [
        json.dumps({"set": name, "prompt": prompt.text, "chat": prompt.is_chat})
        for name, prompts in read_sets(None, cache, limit).items()
        for prompt in prompts
    ]
    file.write_text("\n".join(lines) + "\n", encoding="utf-8")
