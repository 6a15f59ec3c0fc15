"""What a kind of request costs beside a free text of the same model.

Parts: `kinds` (log-probabilities, a bias of zero, tools that nobody calls: tokens per second of
the same text), `rounds` (penalty, schema, pattern: time of a round of the same rows), `first` (the
first request after ready over the tenth), `copy` (a file is copied and edited, with lookup alone).
"""

import gc
import importlib
import inspect
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict
from statistics import median
from typing import Any, Final

from benchmarks.gpu_writing import CHAT, Asker, Bench, Written, write
from draftree.bench.dataset import Prompt
from draftree.bench.median import divide, summarize
from draftree.bench.record import Json
from draftree.bench.writing import acceptance_length, total_rate
from draftree.chat import Engine
from draftree.core import Request, SamplingParams
from draftree.engine.engine import TokenEngine
from draftree.errors import BenchError
from draftree.text.grammar import FormatKind
from draftree.text.tokenizer import Tokenizer

BUDGET: Final = 23  # with the root, a whole bucket of rows
PLAIN, AUTO, FIXED, NO_LOOKUP = "plain", "auto", f"budget {BUDGET}", "auto, no lookup"
LOOKUP_ALONE: Final = "lookup alone"
CONFIGS: Final[dict[str, dict[str, Any]]] = {
    PLAIN: {"draft": "none", "budget": 0, "ngram": "off"},
    AUTO: {},
    FIXED: {"budget": BUDGET},
    NO_LOOKUP: {"ngram": "off"},
    LOOKUP_ALONE: {"draft": "none", "ngram": "on", "max_ctx": 8192},
    "plain, long": {"draft": "none", "budget": 0, "ngram": "off", "max_ctx": 8192},
}
_REPEATS: Final = 3
_SKIPPED: Final = 3  # rounds at the beginning of a text
_NUM_REQUESTS: Final = 10
_NUM_STARTS: Final = 3
_FILE_LEN: Final = 4096
_FILES: Final = ("textwrap", "heapq")


def measure_kinds(bench: Bench) -> Json:
    """Rates over all prompts, each kind in turn. The texts must be those of the free requests."""
    engine = bench.engines[AUTO]
    asker, tokens = Asker(engine, bench.num_tokens), engine.tokens
    prompts = bench.sets[CHAT]
    free = [asker.ask(prompt) for prompt in prompts]
    offered = [asker.ask_with_tools(prompt) for prompt in prompts]
    with_tools = [pair for pair in offered if _is_same(tokens, *pair)]
    if not with_tools:
        raise BenchError("Every reply called a tool; no text can be compared.")
    kinds = {
        "log-probabilities": (free, [asker.ask(p, logprobs=5) for p in prompts]),
        "bias of zero": (free, [asker.ask(p, logit_bias=((5, 0.0),)) for p in prompts]),
        "tools, none called": ([a for a, _ in with_tools], [b for _, b in with_tools]),
    }
    found = {}
    for name, sides in kinds.items():
        bench.report(f"kinds: {name}")
        pairs = [_rates(tokens, *sides) for _ in range(_REPEATS + 1)][1:]  # the first warms up
        plain, asked = (summarize(rates, "tok/s") for rates in zip(*pairs, strict=True))
        ratio = divide(asked, plain)
        found[name] = {"free": asdict(plain), "asked": asdict(asked), "ratio": asdict(ratio)}
    return {"kinds": found, "num_texts": len(prompts), "num_with_tools": len(with_tools)}


def _is_same(engine: TokenEngine, free: Request, asked: Request) -> bool:
    """Whether nothing was called: only then is the text that of a free request."""
    return write(engine, free).tokens == write(engine, asked).tokens


def _rates(
    engine: TokenEngine, free: Sequence[Request], asked: Sequence[Request]
) -> tuple[float, float]:
    texts = [(write(engine, a), write(engine, b)) for a, b in zip(free, asked, strict=True)]
    if any(a.tokens != b.tokens for a, b in texts):
        raise BenchError("A request that should not change the text changed it.")
    plain, other = ([text.usage for text in side] for side in zip(*texts, strict=True))
    return total_rate(plain), total_rate(other)


def measure_rounds(bench: Bench) -> Json:
    """Rounds of a fixed budget, so that every drafted one has the same rows."""
    engine = bench.engines[FIXED]
    asker = Asker(engine, bench.num_tokens)
    warm = SamplingParams(temperature=0.8, seed=3)
    schema, pattern = map(asker.constrain, (FormatKind.JSON_SCHEMA, FormatKind.REGEX))
    kinds: dict[str, Callable[[Prompt], Request]] = {
        "free": asker.ask,
        "free, T = 0.8": lambda p: asker.ask(p, warm),
        "penalty": lambda p: asker.ask(p, SamplingParams(repetition_penalty=1.1)),
        "schema": lambda p: asker.ask(p, grammar=schema),
        "schema, T = 0.8": lambda p: asker.ask(p, warm, grammar=schema),
        "regex": lambda p: asker.ask(p, grammar=pattern),
    }
    prompts = bench.sets[CHAT][:3]
    texts: dict[str, list[Written]] = {name: [] for name in kinds}
    for repeat in range(_REPEATS):
        bench.report(f"rounds: {repeat + 1} of {_REPEATS}")
        for name, make in kinds.items():
            found = [write(engine.tokens, make(prompt)) for prompt in prompts]
            texts[name] += found if repeat else []  # the first time warms up
    return {"budget": BUDGET, "kinds": compare_rounds(texts)}


def compare_rounds(texts: dict[str, list[Written]]) -> Json:
    """Medians of drafted rounds by kind, over those of free texts at the same temperature."""
    found: Json = {}
    for name, written in texts.items():
        times = [ms for text in written for ms in drafted_ms(text)]
        if not times:
            raise BenchError(f"No round of the kind {name!r} was drafted.")
        base = "free, T = 0.8" if name.endswith("T = 0.8") else "free"
        middle = median(times)
        free = found[base]["round_ms"]["median"] if base in found else middle
        found[name] = {
            "round_ms": asdict(summarize(times, "ms")),
            "over_free": round(middle / free, 4),
            "acceptance_length": acceptance_length([text.usage for text in written]),
        }
    return found


def drafted_ms(text: Written) -> list[float]:
    """The times of rounds with a tree. The first times are left out; a time belongs to the round
    that ended it, which is one later in the list of nodes.
    """
    pairs = list(zip(text.round_ms, text.num_nodes[1:], strict=False))
    return [ms for ms, count in pairs[_SKIPPED:] if count > 1]


def measure_first(bench: Bench) -> Json:
    """Time to the first word of chats on an engine that has just said that it is ready."""
    first: list[float] = []
    tenth: list[float] = []
    opened_s: list[float] = []
    for number in range(_NUM_STARTS):
        if bench.deadline.is_over and first:
            break
        bench.report(f"first: start {number + 1} of {_NUM_STARTS}")
        start = time.perf_counter()
        engine = bench.engines.open()
        engine.prepare_chat()
        opened_s.append(time.perf_counter() - start)
        times = [_first_ms(engine, f"{i}. Why is the sky blue?") for i in range(_NUM_REQUESTS)]
        engine.close()
        del engine
        gc.collect()  # now, and not in a thread that reads the next one's weights
        first.append(times[0])
        tenth.append(times[-1])
    a, b = summarize(first, "ms"), summarize(tenth, "ms")
    return {
        "first_ms": asdict(a),
        "tenth_ms": asdict(b),
        "ratio": asdict(divide(a, b)),
        "open_s": asdict(summarize(opened_s, "s")),
    }


def _first_ms(engine: Engine, text: str) -> float:
    engine.tokens.reset()
    start = time.perf_counter()
    reply = engine.chat([{"role": "user", "content": text}], max_tokens=16)
    next(reply)
    first = time.perf_counter() - start
    for _ in reply:
        pass
    return 1000 * first


def cut_source(tokenizer: Tokenizer, module: str, num_tokens: int) -> str:
    """The first lines of a file of Python's library, about so many tokens."""
    lines = inspect.getsource(importlib.import_module(module)).splitlines()
    low, high = 1, len(lines)
    while low < high:
        middle = (low + high + 1) // 2
        is_short = len(tokenizer.encode("\n".join(lines[:middle]))) <= num_tokens
        low, high = (middle, high) if is_short else (low, middle - 1)
    return "\n".join(lines[:low])


def _editing_prompts(tokenizer: Tokenizer) -> dict[str, list[Prompt]]:
    copy = "Repeat this file exactly as it is, without any change:"
    edit = "Rename the parameter `{}` to `{}` everywhere in this file and show the whole file:"
    names = {"textwrap": ("text", "source"), "heapq": ("heap", "queue")}
    found: dict[str, list[Prompt]] = {"copy": [], "edit": []}
    for module in _FILES:
        file = f"\n\n```python\n{cut_source(tokenizer, module, _FILE_LEN)}\n```"
        found["copy"].append(Prompt(copy + file, is_chat=True))
        found["edit"].append(Prompt(edit.format(*names[module]) + file, is_chat=True))
    return found


def measure_copy(bench: Bench) -> Json:
    """A file of 4,096 tokens in the prompt, of which the reply repeats the beginning."""
    plain, looking = bench.engines["plain, long"], bench.engines[LOOKUP_ALONE]
    limit = plain.plan.max_ctx - bench.num_tokens
    found: Json = {}
    for name, prompts in _editing_prompts(plain.tokenizer).items():
        pairs = []
        for number, prompt in enumerate(prompts):
            ids = tuple(plain.encode_chat(prompt.text))[:limit]
            request = Request(ids, bench.num_tokens, SamplingParams(), plain.tokenizer.stop_ids)
            for repeat in range(2):  # the first time warms up
                bench.report(f"copy: {name}, file {number + 1}, {repeat + 1} of 2")
                texts = [write(engine.tokens, request) for engine in (plain, looking)]
            pairs.append(texts)
        a, b = (
            summarize([text.usage.tokens_per_second for text in side], "tok/s")
            for side in zip(*pairs, strict=True)
        )
        found[name] = {
            "plain": asdict(a),
            "lookup": asdict(b),
            "ratio": asdict(divide(b, a)),
            "acceptance_length": acceptance_length([text.usage for _, text in pairs]),
            "num_equal": sum(x.tokens == y.tokens for x, y in pairs),
            "num_texts": len(pairs),
            "num_tokens": sum(len(y.tokens) for _, y in pairs),
        }
    return found
