"""Long texts on a GPU with synthetic weights, by format of keys and values, under a memory limit.

For each format: the engine with the longest context that the plan admits (at most the model's),
prefill, plain decoding and rounds at depths on the way. Random weights: time and memory count.
"""

import gc
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from benchmarks.parts import Deadline
from draftree.bench.gpu import BUDGET, Subject
from draftree.bench.median import Report, Samples, summarize
from draftree.bench.record import Json
from draftree.bench.synthetic import write_pair
from draftree.config import EngineConfig, resolve
from draftree.core import SamplingParams
from draftree.drafts.registry import read_draft_size
from draftree.engine.gpu import find_gpu
from draftree.errors import BenchError, CapacityError
from draftree.kernels.quant.formats import QuantType
from draftree.models.model_config import read_model_config
from draftree.weights.file import open_checkpoint

UNLIMITED, SMALL_UNLIMITED = "f16 unlimited", "q4 unlimited"
_MACHINE: Final = ("cpu", "num_cores", "gpu_kernels")  # what must be the same
FORMATS: Final = ("f16", "q8_0", "q4", "tq3_0", UNLIMITED, SMALL_UNLIMITED)
DEPTHS: Final = (512, 65536, 131072, 262144)
_ROOM: Final = 512  # tokens that are written at each depth, at most
_STEPS: Final = 24
_PAGE: Final = 4096  # contexts are tried in such steps
_GIB: Final = 2**30


@dataclass(frozen=True, slots=True)
class DepthRun:
    """By depth: seconds of prefill from nothing, tok/s, milliseconds of a round of budget 22."""

    memory_gib: float  # that may be used; 0: all
    max_ctx: int
    planned_gib: float
    peak_gib: float
    prefill_s: dict[str, float]
    plain: dict[str, Samples]
    round_ms: dict[str, Samples]
    num_equal: int  # texts of `_STEPS` tokens with a draft that equal those without
    num_texts: int


@dataclass(frozen=True, slots=True)
class GpuDepthMeasures:
    gpu: str
    draft: str
    runs: dict[str, DepthRun]  # by format; those that are unlimited have the whole GPU

    def headline(self) -> dict[str, Any]:
        return {
            name: {
                "max_ctx": run.max_ctx,
                "prefill_s": run.prefill_s,
                "plain": {depth: rate.median for depth, rate in run.plain.items()},
                "round_ms": {depth: ms.median for depth, ms in run.round_ms.items()},
                "peak_gib": run.peak_gib,
                "equal": f"{run.num_equal}/{run.num_texts}",
            }
            for name, run in self.runs.items()
        }


def find_kept(path: Path, machine: Json, settings: Json) -> dict[str, DepthRun]:
    """The runs of an earlier result of the same kernels and settings; none where it is damaged."""
    try:
        record = json.loads(path.read_text(encoding="utf-8"))
        if any(record["machine"][key] != machine[key] for key in _MACHINE):
            return {}
        runs = record["measures"]["runs"] if record["settings"] == settings else {}
        return {name: _read_run(run) for name, run in runs.items()}
    except (OSError, ValueError, KeyError, TypeError):
        return {}


def _read_run(run: Json) -> DepthRun:
    samples = {
        name: {
            depth: Samples(**found | {"samples": tuple(found["samples"])})
            for depth, found in run[name].items()
        }
        for name in ("plain", "round_ms")
    }
    return DepthRun(**(run | samples))


def longest_context(pair: tuple[Path, Path], kv: str, memory_gib: float) -> int:
    """The largest context, in whole steps, that a plan admits."""
    model = read_model_config(open_checkpoint(pair[0]))
    draft, gpu = read_draft_size(open_checkpoint(pair[1])), find_gpu("cuda")
    for max_ctx in range(model.context_length, 0, -_PAGE):
        config = EngineConfig(
            budget=BUDGET, max_ctx=max_ctx, gpu_memory=memory_gib, kv_k=kv, kv_v=kv
        )
        try:
            resolve(config, model, gpu=gpu, draft=draft)
        except CapacityError:
            continue
        return max_ctx
    return 0


def read_runs(words: Sequence[str]) -> dict[str, tuple[int, ...]]:
    """Depths by format, of FORMAT or FORMAT=DEPTH,DEPTH,…"""
    runs = {}
    for word in words:
        name, _, depths = word.partition("=")
        if name not in FORMATS or not all(
            depth.isdigit() for depth in filter(None, depths.split(","))
        ):
            raise BenchError(f"{word!r} names no run; formats are {', '.join(FORMATS)}.")
        runs[name] = tuple(int(depth) for depth in depths.split(",") if depth) or DEPTHS
    return runs


def measure_depths(
    shape: str,
    folder: Path,
    memory_gib: float,
    asked: Mapping[str, tuple[int, ...]],
    kept: Mapping[str, DepthRun],
    deadline: Deadline,
    report: Report,
) -> GpuDepthMeasures:
    """asked: depths by format, of which none is begun after the deadline. kept: runs by format,
    for those that are not measured.
    """
    import torch

    pair = write_pair(shape, folder, draft_type=QuantType.Q4_K)
    gpu = find_gpu("cuda")
    assert gpu is not None
    runs = dict(kept)
    for name, depths in asked.items():
        if deadline.is_over:
            report(f"{name}: left out, the time is over")
            continue
        report(f"{name}: loading")
        limit = 0.0 if name.endswith("unlimited") else memory_gib
        kv = name.split()[0]
        try:
            runs[name] = _measure(pair, kv, longest_context(pair, kv, limit), limit, depths, report)
        except torch.OutOfMemoryError as error:
            report(f"{name}: {error}")
    return GpuDepthMeasures(gpu.name, "Q4_K", runs)


def _measure(
    pair: tuple[Path, Path],
    kv: str,
    max_ctx: int,
    memory_gib: float,
    depths: tuple[int, ...],
    report: Report,
) -> DepthRun:
    import torch

    from draftree.kernels.cuda.compile import gpu
    from draftree.kernels.cuda.memory import peak_bytes

    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    subject = Subject(pair, max_ctx, memory_gib, kv=kv, budget=BUDGET)
    planned = subject.engine.plan.memory.total
    prefills, plain, rounds, num_equal, seconds = {}, {}, {}, 0, 0.0
    chunks = 2 * subject.engine.plan.chunk  # the second has kernels of its own, too
    subject.prefill(subject.prompt(min(chunks, max_ctx - _ROOM)))  # passes are captured
    subject.engine.reset()
    fitting = [min(depth, max_ctx - _ROOM) for depth in depths if depth <= max_ctx]
    for depth in fitting:
        report(f"{kv}: depth {depth}")
        read = subject.engine.target.state.committed
        more = subject.prompt(depth - read)
        seconds += subject.prefill(more[:-1], is_more=True)
        prefills[str(depth)] = round(seconds, 3)
        state = subject.engine.target.state.snapshot() if depth <= _ROOM else None
        text, times = subject.go_on(more, SamplingParams(), _STEPS, 0)
        plain[str(depth)] = summarize([1000.0 / ms for ms in times[4:]], "tok/s")
        if state is not None:  # short texts are cheap to go back to, so texts can be compared
            subject.engine.target.state.restore(state)
            drafted, times = subject.go_on(more, SamplingParams(), _STEPS, BUDGET)
            num_equal += drafted == text
        else:
            _, times = subject.go_on((*more, text[-1]), SamplingParams(), _STEPS, BUDGET)
        rounds[str(depth)] = summarize(times[4:], "ms")
    peak = peak_bytes(gpu(0)) / _GIB
    subject.engine.close()
    del subject
    gc.collect()
    return DepthRun(
        memory_gib=memory_gib,
        max_ctx=max_ctx,
        planned_gib=round(planned / _GIB, 2),
        peak_gib=round(peak, 2),
        prefill_s=prefills,
        plain=plain,
        round_ms=rounds,
        num_equal=num_equal,
        num_texts=sum(depth <= _ROOM for depth in fitting),
    )
