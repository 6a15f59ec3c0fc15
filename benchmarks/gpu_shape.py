"""A server's work with synthetic weights of real shapes: grammars, several clients, long prompts.

Parts: `schema` (round with a JSON schema over a free one), `clients` (tokens per second of four
over one's), `beside` (first token of a short request beside three writers), `behind` (the same
behind a long prompt), `agent` (a coding agent's session over HTTP), `compress`, `compress self` and
`full` (first token of long prompts), `session` (an agent's, compressed, cached, and both).
"""

import asyncio
import gc
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.compress_session import Replay, ReplayOptions
from benchmarks.gpu_clients import Clients, Served, open_clients, run_lent
from benchmarks.gpu_request import BUDGET, compare_rounds
from benchmarks.gpu_writing import Written, write
from benchmarks.parts import Deadline
from benchmarks.synthetic_text import LongTexts, extend_tokenizer, write_scorer
from draftree.bench.agent import AgentOptions, measure_agent
from draftree.bench.median import Report, divide, summarize
from draftree.bench.record import Json
from draftree.bench.synthetic import SHAPES, write_pair
from draftree.chat import Engine
from draftree.config import EngineConfig
from draftree.core import Request, SamplingParams, TokenGrammar
from draftree.engine.engine import TokenEngine
from draftree.kernels.quant.formats import QuantType
from draftree.text.grammar import FormatKind, ResponseFormat
from draftree.text.turn import TurnPlanner

_STRINGS: Final = {"type": "array", "items": {"type": "string"}, "minItems": 64}
_GIB: Final = 2**30
_KEEP: Final = 0.05
_NUM_CLIENTS: Final = 4
SESSION: Final = AgentOptions(num_tokens=48, pause_s=0.5, num_turns=24, file_scale=12)
REPLAY: Final = ReplayOptions("auto", 16, 16, file_scale=20, num_rounds=1, is_judged=False)


@dataclass(frozen=True, slots=True)
class ShapeOptions:
    """Lengths in tokens. memory: GiB that compressed prompts may use."""

    shape: str
    folder: Path
    memory: float = 22.35
    device: str = "cuda"
    prompt_len: int = 256
    num_tokens: int = 256
    short_len: int = 100
    long_len: int = 65536
    lengths: tuple[int, ...] = (32768, 65536, 131072)
    room: int = 14336  # for a compressed prompt and its reply; whole lines take more than the share
    chunk: int = 2048  # of compressed prompts: what is left of the memory is the scorer's
    repeats: int = 2
    agent: AgentOptions = SESSION
    replay: ReplayOptions = REPLAY

    def settings(self) -> Json:
        kept = ("shape", "memory", "prompt_len", "num_tokens", "short_len", "long_len", "chunk")
        found = {key: value for key, value in asdict(self).items() if key in kept}
        return found | {"keep": _KEEP, "lengths": list(self.lengths)}


class ShapeBench:
    """One engine is open at a time; parts that follow each other share it."""

    def __init__(
        self, options: ShapeOptions, metadata: Mapping[str, Any], deadline: Deadline, report: Report
    ) -> None:
        """metadata: of the file whose tokenizer is borrowed."""
        self.options, self.deadline, self.report = options, deadline, report
        self._metadata = metadata
        report("writing the files, where they are missing")
        self.pair = write_pair(options.shape, options.folder, draft_type=QuantType.Q4_K)
        self.tokenizer = extend_tokenizer(metadata, SHAPES[options.shape][0].vocab)
        self.texts = LongTexts(self.tokenizer)
        self._opened: tuple[Json, Engine] | None = None

    def open(self, **config: Any) -> Engine:
        if self._opened is not None and self._opened[0] == config:
            return self._opened[1]
        self.close()
        self.report(f"opening: {config}")
        fields: dict[str, Any] = {"device": self.options.device, "warm_up": True, **config}
        tokens = TokenEngine.open(self.pair[0], EngineConfig(**fields), draft=self.pair[1])
        engine = Engine(tokens, self.tokenizer, f"synth-{self.options.shape}")
        self._opened = config, engine
        return engine

    def close(self) -> None:
        if self._opened is not None:
            self._opened[1].close()
            self._opened = None
        gc.collect()
        if self.options.device == "cuda":
            import torch

            if torch.cuda.is_available():
                torch.cuda.empty_cache()
                torch.cuda.reset_peak_memory_stats()

    def open_wide(self) -> Engine:
        """With room for a long prompt, and all of the GPU's memory."""
        return self.open(max_ctx=self.options.long_len + 1024, parallel=_NUM_CLIENTS)

    def write_scorer(self) -> Path:
        return write_scorer(self.options.shape, self.options.folder, self._metadata)

    @property
    def peak_gib(self) -> float:
        if self.options.device != "cuda":
            return 0.0
        from draftree.kernels.cuda.compile import gpu
        from draftree.kernels.cuda.memory import peak_bytes

        return round(peak_bytes(gpu(0)) / _GIB, 2)


def measure_schema(bench: ShapeBench) -> Json:
    """A long list of strings: most tokens are allowed, as in a model that wants to write it."""
    options = bench.options
    engine = bench.open(max_ctx=options.room, budget=BUDGET, ngram="off")
    wanted = ResponseFormat(FormatKind.JSON_SCHEMA, _STRINGS)
    grammar = TurnPlanner(bench.tokenizer).constrain(wanted)
    warm = SamplingParams(temperature=0.8, seed=3)
    kinds: dict[str, tuple[SamplingParams, TokenGrammar | None]] = {
        "free": (SamplingParams(), None),
        "free, T = 0.8": (warm, None),
        "schema": (SamplingParams(), grammar),
        "schema, T = 0.8": (warm, grammar),
    }
    texts: dict[str, list[Written]] = {name: [] for name in kinds}
    for repeat in range(options.repeats + 1):  # the first time warms up
        ids = bench.texts.ids(options.prompt_len)
        for name, (sampling, asked) in kinds.items():
            bench.report(f"schema: {name}, {repeat} of {options.repeats}")
            request = Request(ids, options.num_tokens // 4, sampling, grammar=asked)
            text = write(engine.tokens, request)
            texts[name] += [text] if repeat else []
    return {"budget": BUDGET, "kinds": compare_rounds(texts)}


def measure_clients(bench: ShapeBench) -> Json:
    return asyncio.run(_measure_clients(bench, bench.open_wide()))


async def _measure_clients(bench: ShapeBench, engine: Engine) -> Json:
    options = bench.options
    rates: dict[int, list[float]] = {1: [], _NUM_CLIENTS: []}
    firsts: dict[int, list[float]] = {1: [], _NUM_CLIENTS: []}
    async with open_clients(engine) as clients:
        await _warm_up(bench, clients)
        for repeat in range(options.repeats):
            for count in rates:
                bench.report(f"clients: {count}, {repeat + 1} of {options.repeats}")
                prompts = [bench.texts.ids(options.prompt_len) for _ in range(count)]
                start = time.perf_counter()
                asked = [
                    clients.ask(f"client {i}", ids, options.num_tokens)
                    for i, ids in enumerate(prompts)
                ]
                served = await asyncio.gather(*asked)
                seconds = max(one.end_s for one in served) - start
                rates[count].append(sum(one.num_tokens for one in served) / seconds)
                firsts[count] += [1000 * one.first_s for one in served]
    one, all_of_them = (summarize(rates[count], "tok/s") for count in rates)
    return {
        "one": asdict(one),
        "all": asdict(all_of_them),
        "ratio": asdict(divide(all_of_them, one)),
        "num_clients": _NUM_CLIENTS,
        "first_ms": {str(n): asdict(summarize(times, "ms")) for n, times in firsts.items()},
    }


async def _warm_up(bench: ShapeBench, clients: Clients) -> None:
    """Passes of all sizes are captured, and sequences have changed places."""
    long = bench.texts.ids(min(2 * 2048 + 1, bench.options.long_len))
    short = bench.texts.ids(bench.options.short_len)
    await asyncio.gather(clients.ask("a", long, 16), clients.ask("b", short, 16))


def measure_beside(bench: ShapeBench) -> Json:
    return asyncio.run(_measure_beside(bench, bench.open_wide()))


async def _measure_beside(bench: ShapeBench, engine: Engine) -> Json:
    """Three writers that go on meanwhile."""
    options, found = bench.options, list[Served]()
    async with open_clients(engine) as clients:
        await _warm_up(bench, clients)
        alone = [
            await clients.ask("short", bench.texts.ids(options.short_len), 4)
            for _ in range(options.repeats)
        ]
        for repeat in range(2 * options.repeats):
            bench.report(f"beside: {repeat + 1} of {2 * options.repeats}")
            writers = [
                clients.send(f"writer {i}", bench.texts.ids(options.prompt_len), 8192)
                for i in range(_NUM_CLIENTS - 1)
            ]
            await clients.wait_until(writers, 8)
            found.append(await clients.ask("short", bench.texts.ids(options.short_len), 4))
            await clients.cancel(writers)
    return {
        "first_s": asdict(summarize([one.first_s for one in found], "s")),
        "alone_s": asdict(summarize([one.first_s for one in alone], "s")),
        "num_writers": _NUM_CLIENTS - 1,
    }


def measure_behind(bench: ShapeBench) -> Json:
    return asyncio.run(_measure_behind(bench, bench.open_wide()))


async def _measure_behind(bench: ShapeBench, engine: Engine) -> Json:
    """A prompt that is being read: once early, once where most of it was read."""
    options, found = bench.options, {}
    async with open_clients(engine) as clients:
        await _warm_up(bench, clients)
        for share in (0.1, 0.8):
            bench.report(f"behind: {share:.0%} of the prompt")
            long = clients.send("long", bench.texts.ids(options.long_len), 4)
            await clients.wait_read(long, int(share * options.long_len))
            short = await clients.ask("short", bench.texts.ids(options.short_len), 4)
            found[f"{share:g}"] = round(short.first_s, 4)
            await clients.cancel([long])
    return {"first_s": asdict(summarize(list(found.values()), "s")), "by_share": found}


def measure_session(bench: ShapeBench) -> Json:
    """Replies mean nothing, but they are valid calls, and prompts are those of a real session."""
    engine, options = bench.open_wide(), bench.options.agent
    with run_lent(engine) as endpoint:
        measures = measure_agent(endpoint, engine.name, options, bench.report)
    return asdict(measures) | {"settings": options.settings()}


def measure_replay(bench: ShapeBench) -> Json:
    engine, scorer = bench.open_wide(), str(bench.write_scorer())
    return Replay(engine, scorer, bench.options.replay, bench.report).measure(bench.deadline)


def measure_compress(bench: ShapeBench, scorer: str) -> Json:
    """First token of long prompts of which a twentieth is kept, scoring included."""
    options = bench.options
    engine = bench.open(
        max_ctx=options.room,
        gpu_memory=options.memory if options.device == "cuda" else 0.0,
        chunk=options.chunk,
        compress="always",
        compress_keep=_KEEP,
        compress_with=scorer,
    )
    found = _read_long(bench, engine, f"compress with {Path(scorer).name}")
    return {"lengths": found, "peak_gib": bench.peak_gib}


def measure_full(bench: ShapeBench) -> Json:
    engine = bench.open(max_ctx=max(bench.options.lengths) + 4096)
    return {"lengths": _read_long(bench, engine, "full"), "peak_gib": bench.peak_gib}


def _read_long(bench: ShapeBench, engine: Engine, words: str) -> Json:
    """Lengths for which no time is left are left out."""
    _ask_long(engine, bench.texts.question(min(6144, bench.options.lengths[0])))  # warms up
    found: Json = {}
    for length in bench.options.lengths:
        if bench.deadline.is_over:
            break
        bench.report(f"{words}: {length}, {bench.deadline.left_s:.0f} s left")
        found[str(length)] = _ask_long(engine, bench.texts.question(length))
    return found


def _ask_long(engine: Engine, text: str) -> Json:
    engine.tokens.reset()
    start = time.perf_counter()
    reply = engine.chat([{"role": "user", "content": text}], max_tokens=2)
    prepared_s = time.perf_counter() - start
    next(reply)
    first_s = time.perf_counter() - start
    for _ in reply:
        pass
    usage = reply.usage
    shorter = usage.compression
    parts = {} if shorter is None else asdict(shorter)
    return {
        "first_s": asdict(summarize([first_s], "s")),
        "prepared_s": round(prepared_s, 4),
        **{
            f"{name}_s": round(parts.get(f"{name}_ms", 0.0) / 1000, 4)
            for name in ("score", "load", "read", "select")
        },
        "prompt_tokens": usage.prompt_tokens,
        "tokens_before": shorter.tokens_before if shorter is not None else usage.prompt_tokens,
    }


def all_parts(bench: ShapeBench) -> dict[str, Callable[[], Json]]:
    """In the order of what they say; parts beside each other share an engine."""
    return {
        "clients": lambda: measure_clients(bench),
        "beside": lambda: measure_beside(bench),
        "behind": lambda: measure_behind(bench),
        "agent": lambda: measure_session(bench),
        "session": lambda: measure_replay(bench),
        "schema": lambda: measure_schema(bench),
        "compress": lambda: measure_compress(bench, str(bench.write_scorer())),
        "compress self": lambda: measure_compress(bench, "self"),
        "full": lambda: measure_full(bench),
    }
