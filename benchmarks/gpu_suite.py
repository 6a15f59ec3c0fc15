"""Budgets, lookup and memory limits of one model beside each other, on the same prompts.

Parts: `auto` and `auto, T = 0.8` (the automatic budget over the best fixed one, by
data set), `lookup` (with over without), `equal` (texts of every kind of request and every budget
against plain ones, read cold and after a hit), `limits` (the same under less memory).
"""

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, Final

from benchmarks.gpu_request import AUTO, NO_LOOKUP, PLAIN
from benchmarks.gpu_writing import CHAT, Asker, Bench, Written, write
from draftree.bench.median import Samples, divide, summarize
from draftree.bench.record import Json
from draftree.bench.writing import acceptance_length, total_rate
from draftree.config import Plan
from draftree.core import Request, SamplingParams

FIXED_BUDGETS: Final = (7, 15, 23, 31)
CONFIGS: Final[dict[str, dict[str, Any]]] = {f"budget {n}": {"budget": n} for n in FIXED_BUDGETS}
_PASSES: Final = 2
_EQUAL_TOKENS: Final = 48
_LESS_MEMORY: Final = 0.98  # of what was planned: enough for shorter chunks in the same format


def _requests(bench: Bench, temperature: float) -> dict[str, list[Request]]:
    asker = Asker(bench.engines[PLAIN], bench.num_tokens)
    return {
        name: [
            asker.ask(prompt, SamplingParams(temperature=temperature, seed=seed))
            for seed, prompt in enumerate(prompts)
        ]
        for name, prompts in bench.sets.items()
    }


def _take_turns(
    bench: Bench, names: Sequence[str], requests: Mapping[str, Sequence[Request]], words: str
) -> dict[str, dict[str, list[list[Written]]]]:
    """Texts by data set and engine, for each pass. Every prompt goes to all engines in a row."""
    found: dict[str, dict[str, list[list[Written]]]] = {
        key: {name: [] for name in names} for key in requests
    }
    for number in range(_PASSES + 1):  # the first one, of one prompt each, warms up
        for key, asked in requests.items():
            bench.report(f"{words}: {key}, pass {number} of {_PASSES}")
            if number > 1 and bench.deadline.is_over:
                continue
            rows = [
                [write(bench.engines[name].tokens, request) for name in names]
                for request in (asked if number else asked[:1])
            ]
            if number:
                for name, texts in zip(names, zip(*rows, strict=True), strict=True):
                    found[key][name].append(list(texts))
    return found


def _rate(passes: Sequence[Sequence[Written]]) -> Samples:
    return summarize([total_rate([t.usage for t in texts]) for texts in passes], "tok/s")


def measure_auto(bench: Bench, temperature: float) -> Json:
    """The best fixed budget is the one with the highest median, plain decoding included."""
    fixed, words = (PLAIN, *CONFIGS), f"T = {temperature:g}"
    found: Json = {}
    turns = _take_turns(bench, (*fixed, AUTO), _requests(bench, temperature), words)
    for key, by_name in turns.items():
        rates = {name: _rate(passes) for name, passes in by_name.items()}
        _, best = max((rates[name].median, name) for name in fixed)
        texts = [text for texts in by_name[AUTO] for text in texts]
        found[key] = {
            "rates": {name: asdict(rate) for name, rate in rates.items()},
            "best": best,
            "ratio": asdict(divide(rates[AUTO], rates[best])),
            "acceptance_length": acceptance_length([text.usage for text in texts]),
            **_count_equal(by_name),
        }
    return found


def _count_equal(by_name: Mapping[str, Sequence[Sequence[Written]]]) -> Json:
    expected = [text.tokens for text in by_name[PLAIN][0]]
    others = [texts for name, passes in by_name.items() if name != PLAIN for texts in passes]
    pairs = [(a, text.tokens) for texts in others for a, text in zip(expected, texts, strict=True)]
    return {"num_equal": sum(a == b for a, b in pairs), "num_texts": len(pairs)}


def measure_lookup(bench: Bench) -> Json:
    found: Json = {}
    for key, by_name in _take_turns(
        bench, (NO_LOOKUP, AUTO), _requests(bench, 0.0), "lookup"
    ).items():
        off, on = _rate(by_name[NO_LOOKUP]), _rate(by_name[AUTO])
        found[key] = {"off": asdict(off), "on": asdict(on), "ratio": asdict(divide(on, off))}
    return found


def measure_equal(bench: Bench) -> Json:
    """Every kind of request on two prompts, with every budget, cold and after a hit."""
    asker = Asker(bench.engines[PLAIN], _EQUAL_TOKENS)
    prompts = bench.sets[CHAT][-2:]
    names = (*CONFIGS, AUTO)
    kinds: Json = {}
    times = []
    for seed, prompt in enumerate(prompts):
        for kind, request in asker.every_kind(prompt, seed).items():
            bench.report(f"equal: {kind}, prompt {seed + 1} of {len(prompts)}")
            expected = write(bench.engines[PLAIN].tokens, request)
            times.append(expected.usage.decode_ms)
            row = kinds.setdefault(kind, {"num_equal": 0, "num_texts": 0, "unequal": []})
            for name in names:
                for use_cache in (False, True):
                    text = write(bench.engines[name].tokens, request, use_cache=use_cache)
                    is_equal = text.tokens == expected.tokens
                    row["num_equal"] += is_equal
                    row["num_texts"] += 1
                    if not is_equal:
                        row["unequal"].append(f"{name}, {'hit' if use_cache else 'cold'}")
    return {"kinds": kinds, "plain_ms": asdict(summarize(times, "ms"))}


def measure_limits(bench: Bench) -> Json:
    """A prompt of more than a chunk, and every kind, under a limit that makes chunks shorter, with
    keys and values in the same format. Others are closed first: a limit is the process's.
    """
    requests, expected, plan = _write_unlimited(bench)
    bench.engines.close()
    limit = plan.memory.total * _LESS_MEMORY / 2**30
    less = {"gpu_memory": limit} if plan.gpu is not None else {"chunk": plan.chunk // 2}
    bench.report(f"limits: {less}")
    limited = bench.engines.open(**less, kv_k=plan.kv_k, kv_v=plan.kv_v)
    try:
        texts = [write(limited.tokens, request) for request in requests]
        chunks = [plan.chunk, limited.plan.chunk]
    finally:
        limited.close()
    pairs = list(zip(expected, texts, strict=True))
    return {
        "num_equal": sum(a.tokens == b.tokens for a, b in pairs),
        "num_texts": len(texts),
        "is_long_equal": expected[0].tokens == texts[0].tokens,
        "chunks": chunks,
        "first_token_ms": asdict(summarize([t.usage.first_token_ms for t in texts], "ms")),
    }


def _write_unlimited(bench: Bench) -> tuple[list[Request], list[Written], Plan]:
    """The engine is not held on to, so that it can be closed."""
    whole = bench.engines[AUTO]
    asker, plan = Asker(whole, _EQUAL_TOKENS), whole.plan
    prompts = [p for prompts in bench.sets.values() for p in prompts]
    text, ids = "\n\n".join(p.text for p in prompts), tuple[int, ...]()
    while len(ids) < plan.max_ctx - _EQUAL_TOKENS:
        ids += tuple(whole.tokenizer.encode(text))
    long = Request(ids[: plan.max_ctx - _EQUAL_TOKENS], _EQUAL_TOKENS)
    requests = [long, *asker.every_kind(prompts[0]).values()]
    return requests, [write(whole.tokens, request) for request in requests], plan
