"""A GPU with synthetic weights of real shapes: decoding, rounds, passes, prefill, depth, memory.

The weights are random, so texts mean nothing and a draft is right by luck alone; what is measured
is time, memory, and that drafting changes no token.
"""

import gc
import time
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

import numpy as np

from draftree.bench.energy import read_joules
from draftree.bench.median import Report, Samples, medians, summarize
from draftree.config import EngineConfig
from draftree.core import Request, SamplingParams
from draftree.decode.device_decoder import DeviceDecoder
from draftree.engine.engine import TokenEngine
from draftree.errors import BenchError
from draftree.prefill.chunked import prefill

WIDTHS: Final = (1, 8, 16, 24, 32)
PROMPTS: Final = (512, 2048, 13312)
DEPTHS: Final = (512, 16384, 65536)
BUDGET: Final = 22
_MAX_BUDGET: Final = 40
_SHORT_CTX: Final = 8192
_GIB: Final = 2**30
_PROMPT_LEN: Final = 256
_NUM_TOKENS: Final = 224
_STEPS: Final = 24
_ENERGY_TOKENS: Final = 600
_SAMPLINGS: Final = {
    "greedy": SamplingParams(),
    "T = 0.8": SamplingParams(temperature=0.8, seed=11),
    "T = 1, top-p 0.9": SamplingParams(temperature=1.0, top_p=0.9, seed=12),
}


@dataclass(frozen=True, slots=True)
class Equality:
    """Texts with a draft against the plain one."""

    num_tokens: int
    num_equal: int
    num_texts: int
    acceptance_length: float


@dataclass(frozen=True, slots=True)
class GpuMeasures:
    gpu: str
    load_s: Samples
    planned_gib: float
    peak_gib: Samples  # with arrays limited to memory_gib, context of 8K, draft included
    memory_gib: float
    plain: dict[str, Samples]  # tok/s by depth
    round_ms: dict[str, Samples]  # by depth, budget 22
    forward_ms: dict[str, Samples]  # by number of tokens, head included
    prefill: dict[str, Samples]  # tok/s by length
    equality: dict[str, Equality]
    joules: dict[str, float]  # of a plain token, of a round; empty where the GPU does not count

    def headline(self) -> dict[str, Any]:
        groups = ("plain", "round_ms", "forward_ms", "prefill")
        texts = self.equality.values()
        return {name: medians(getattr(self, name)) for name in groups} | {
            "peak_gib": self.peak_gib.median,
            "load_s": self.load_s.median,
            "joules": self.joules,
            "num_equal": sum(item.num_equal for item in texts),
            "num_texts": sum(item.num_texts for item in texts),
        }


class Subject:
    """An engine on the GPU, with rounds of any budget."""

    def __init__(
        self,
        pair: tuple[Path, Path],
        max_ctx: int,
        memory_gib: float = 0.0,
        *,
        kv: str = "f16",
        budget: int = _MAX_BUDGET,
        persistent: bool = False,
    ) -> None:
        config = EngineConfig(
            device="cuda",
            budget=budget,
            max_ctx=max_ctx,
            gpu_memory=memory_gib,
            kv_k=kv,
            kv_v=kv,
            persistent=persistent,
        )
        start = time.perf_counter()
        self.engine = TokenEngine.open(pair[0], config, draft=pair[1])
        self.finish()
        self.load_s = time.perf_counter() - start
        self._rng = np.random.default_rng(0)

    def finish(self) -> None:
        from draftree.kernels.cuda.compile import gpu
        from draftree.kernels.cuda.memory import synchronize

        synchronize(gpu(0))

    def prompt(self, length: int) -> tuple[int, ...]:
        return tuple(self._rng.integers(0, self.engine.model_config.vocab_size, length).tolist())

    def prefill(self, tokens: tuple[int, ...], *, is_more: bool = False) -> float:
        """Seconds; the draft reads the features too. is_more: after what was read before."""
        engine, drafter = self.engine, self.engine.drafter
        assert drafter is not None
        if not is_more:
            engine.reset()
        self.finish()
        start = time.perf_counter()
        prefill(engine.target, tokens, engine.plan.chunk, drafter.extend_context)
        drafter.flush_context()
        self.finish()
        return time.perf_counter() - start

    def decode(
        self, prompt: tuple[int, ...], sampling: SamplingParams, count: int, budget: int
    ) -> tuple[list[int], list[float]]:
        """Tokens after the prompt, and the milliseconds of each round."""
        self.prefill(prompt[:-1])
        return self.go_on(prompt, sampling, count, budget)

    def go_on(
        self, prompt: tuple[int, ...], sampling: SamplingParams, count: int, budget: int
    ) -> tuple[list[int], list[float]]:
        """The same, where all but the last token of the prompt was read."""
        engine = self.engine
        rounds, drafter = engine.rounds_of(budget), engine.drafter if budget else None
        assert rounds is not None
        decoder = DeviceDecoder(
            *(engine.target, drafter, rounds, Request(prompt, count, sampling)),
            use_draft=budget > 0,
        )
        decoder.start(prompt[-1])
        tokens: list[int] = []
        while len(tokens) < count:
            tokens += [emitted.token for emitted in decoder.step(count - len(tokens))]
        decoder.finish()
        return tokens, decoder.round_ms

    def forward_ms(self, width: int) -> float:
        """A speculative chain, logits for all of it; the mean of several in a row."""
        target = self.engine.target
        programs, step = target.programs(), target.step
        step.set_tree(np.arange(width), np.arange(-1, width - 1), np.arange(width), _PROMPT_LEN)
        step.set_rows(np.arange(width))
        self.finish()
        start = time.perf_counter()
        for _ in range(_STEPS):
            programs.body.run()
            programs.head.run()
        self.finish()
        return (time.perf_counter() - start) * 1000 / _STEPS


def measure_gpu(
    pair: tuple[Path, Path],
    rounds: int,
    memory_gib: float,
    report: Report,
    *,
    persistent: bool = False,
) -> GpuMeasures:
    from draftree.kernels.cuda.compile import gpu
    from draftree.kernels.cuda.memory import peak_bytes

    report("loading")
    new_subject = partial(Subject, pair, persistent=persistent)
    subject = new_subject(_SHORT_CTX, memory_gib)
    found = subject.engine.plan.gpu
    if found is None:
        raise BenchError("There is no GPU to measure.")
    load_s, planned = subject.load_s, subject.engine.plan.memory.total / _GIB
    equality = {
        name: _compare(subject, sampling, report, name) for name, sampling in _SAMPLINGS.items()
    }
    forward = _forward(subject, rounds, report)
    joules = _joules(subject, report)
    subject.prefill(subject.prompt(_SHORT_CTX - 64))
    peak = peak_bytes(gpu(0)) / _GIB
    subject.engine.close()
    del subject  # its memory is taken again by the next one
    gc.collect()
    report("loading with a long context")
    subject = new_subject(DEPTHS[-1] + 1024)
    lengths = {
        str(n): summarize(
            [n / subject.prefill(subject.prompt(n)) for _ in range(rounds + 1)][1:], "tok/s"
        )
        for n in PROMPTS
    }
    plain, drafted = {}, {}
    for depth in DEPTHS:
        report(f"decoding at depth {depth}")
        prompt = subject.prompt(depth)
        times = [subject.decode(prompt, SamplingParams(), _STEPS, b)[1] for b in (0, BUDGET)]
        plain[str(depth)] = summarize([1000.0 / ms for ms in times[0][4:]], "tok/s")
        drafted[str(depth)] = summarize(times[1][4:], "ms")
    return GpuMeasures(
        gpu=found.name,
        load_s=summarize([load_s, subject.load_s], "s"),
        planned_gib=round(planned, 2),
        peak_gib=summarize([peak], "GiB"),
        memory_gib=round(memory_gib, 2),
        plain=plain,
        round_ms=drafted,
        forward_ms=forward,
        prefill=lengths,
        equality=equality,
        joules=joules,
    )


def _compare(subject: Subject, sampling: SamplingParams, report: Report, name: str) -> Equality:
    prompt = subject.prompt(_PROMPT_LEN)
    report(f"texts, {name}: plain")
    expected, _ = subject.decode(prompt, sampling, _NUM_TOKENS, 0)
    num_equal, lengths = 0, []
    budgets = (8, BUDGET, _MAX_BUDGET)
    for budget in budgets:
        report(f"texts, {name}: budget {budget}")
        tokens, times = subject.decode(prompt, sampling, _NUM_TOKENS, budget)
        num_equal += tokens == expected
        lengths.append(len(tokens) / len(times))
    return Equality(_NUM_TOKENS, num_equal, len(budgets), round(sum(lengths) / len(lengths), 3))


def _joules(subject: Subject, report: Report) -> dict[str, float]:
    """The counter moves a few times a second: over some seconds."""
    read, prompt, found = read_joules(), subject.prompt(_PROMPT_LEN), {}
    if read is None:
        return {}
    for name, budget in (("plain", 0), ("round", BUDGET)):
        report(f"energy: {name}")
        start = read()
        _, times = subject.decode(prompt, SamplingParams(), _ENERGY_TOKENS, budget)
        found[name] = round((read() - start) / len(times), 3)
    return found


def _forward(subject: Subject, rounds: int, report: Report) -> dict[str, Samples]:
    subject.prefill(subject.prompt(_PROMPT_LEN))
    report("passes of several tokens")
    for width in WIDTHS:
        subject.forward_ms(width)
    times = {width: [subject.forward_ms(width) for _ in range(rounds)] for width in WIDTHS}
    return {str(width): summarize(values, "ms") for width, values in times.items()}
