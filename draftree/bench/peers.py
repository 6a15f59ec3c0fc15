"""Ours beside llama.cpp: the same file and number of threads, in turns.

Two builds of llama.cpp can be measured: the wheel xllamacpp, through its server and its library
once and then in the way that was faster, with our token ids; and the user's own `llama-bench`. The
ratio is ours over the faster build. Each runs in a process of its own, the wheel's server and its
library too, and is idle meanwhile.
"""

import sys
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Final

from draftree.bench.median import Ratio, Report, Samples, divide, rates
from draftree.bench.peer_native import NativeBuild
from draftree.bench.record import Json
from draftree.bench.subject import PLAIN
from draftree.bench.worker import Child
from draftree.errors import BenchError

PREFILL_LENS: Final = (512, 64)
DECODE_TOKENS: Final = 128
_PROMPT_LEN: Final = 32
_MAX_CTX: Final = 1024
_WAYS: Final = ("server", "library")
NOT_INSTALLED: Final = (
    "llama.cpp cannot be measured: the package xllamacpp is not installed for {python}; "
    "run `pip install 'draftree[peers]'`, name an interpreter that has it with --peer-python, or "
    "a program that you built with --llama-bench."
)


@dataclass(frozen=True, slots=True)
class Duel:
    """One task, measured in turns. llama: by build, "wheel" and "native". trial: the wheel by each
    way, once, to find the faster one.
    """

    ours: Samples
    llama: dict[str, Samples]
    trial: dict[str, Samples]
    faster: str  # build of llama.cpp
    ratio: Ratio  # ours over that


@dataclass(frozen=True, slots=True)
class PeerMeasures:
    """builds: version and instruction sets of each, as it says itself."""

    decode: Duel
    prefill: dict[str, Duel]  # by length
    builds: dict[str, dict[str, str]]
    kv_type: str  # the format of our keys and values

    def headline(self) -> dict[str, Any]:
        return {
            "decode": self.decode.ours.median,
            "decode_ratio": self.decode.ratio.value,
            "prefill": {length: duel.ours.median for length, duel in self.prefill.items()},
            "prefill_ratio": {length: duel.ratio.value for length, duel in self.prefill.items()},
            "faster_build": self.decode.faster,
        }


@dataclass(frozen=True, slots=True)
class PeerOptions:
    threads: int
    rounds: int
    decode_tokens: int = DECODE_TOKENS
    prefill_lens: tuple[int, ...] = PREFILL_LENS
    python: str = sys.executable
    llama_bench: Path | None = None

    def settings(self) -> Json:
        return {
            "threads": self.threads,
            "rounds": self.rounds,
            "decode_tokens": self.decode_tokens,
            "decode_prompt": _PROMPT_LEN,
            "prefill_lens": list(self.prefill_lens),
            "method": (
                "in turns, each in its own process, the wheel's server and library too; a short "
                "warm-up before each timed run; greedy; the wheel reads our token ids, "
                "`llama-bench` as many of its own and samples nothing; our prefill counts the "
                "prompt and its first token"
            ),
        }


def open_wheel(
    python: str = sys.executable, module: str = "draftree.bench.peer_wheel"
) -> tuple[Child, dict[str, str]]:
    """A worker with the wheel, and what it says of itself; a sentence where it is not installed."""
    peer = Child(module, "llama.cpp", python)
    try:
        return peer, peer.ask("describe")
    except BenchError as error:
        peer.close()
        if "NotFoundError" in str(error) and "xllamacpp" in str(error):
            raise BenchError(NOT_INSTALLED.format(python=python)) from None
        raise


def measure_peers(path: Path, options: PeerOptions, report: Report) -> PeerMeasures:
    common = {"path": str(path.resolve()), "threads": options.threads, "max_ctx": _MAX_CTX}
    native, builds = None, {}
    wheels: dict[str, Child] = {}
    if options.llama_bench is not None:
        native = NativeBuild(options.llama_bench, path, options.threads)
    with ExitStack() as stack:
        try:
            for way in _WAYS:
                wheel, builds["wheel"] = open_wheel(options.python)
                wheels[way] = stack.enter_context(wheel)
        except BenchError as error:
            if native is None:
                raise
            report(f"without the wheel: {error}")
        report("loading")
        ours = stack.enter_context(Child("draftree.bench.subject", "draftree"))
        ours.ask("load", **common, **PLAIN)
        kv_type = ours.ask("kv_type")
        for way, wheel in wheels.items():
            wheel.ask("load", use_server=way == "server", **common)
        tasks = _Tasks(ours, wheels, native, options.rounds, report)
        longest = max(*options.prefill_lens, _PROMPT_LEN)
        text = ours.ask("window", window_len=longest)
        count = options.decode_tokens
        decode = tasks.measure(count, "decode", ids=text[:_PROMPT_LEN], num_tokens=count)
        prefill = {
            str(length): tasks.measure(length, "prefill", ids=text[:length])
            for length in options.prefill_lens
        }
    if native is not None:
        builds["native"] = native.description
    return PeerMeasures(decode, prefill, builds, kv_type)


@dataclass(frozen=True, slots=True)
class _Tasks:
    """Everyone who takes part; verbs and arguments are the same for all."""

    ours: Child
    wheels: Mapping[str, Child]  # by way
    native: NativeBuild | None
    rounds: int
    report: Report

    def measure(self, count: int, verb: str, **arguments: Any) -> Duel:
        self.report(f"{verb} {count}: warm-up")
        self.ours.ask(verb, **arguments)
        runs: dict[str, Callable[[], float]] = {"ours": partial(self.ours.ask, verb, **arguments)}
        trial: dict[str, float] = {}
        if self.wheels:
            trial = {way: wheel.ask(verb, **arguments) for way, wheel in self.wheels.items()}
            way = min(trial, key=trial.__getitem__)
            runs["wheel"] = partial(self.wheels[way].ask, verb, **arguments)
        if self.native is not None:
            runs["native"] = partial(getattr(self.native, verb), **arguments)
        times: dict[str, list[float]] = {name: [] for name in runs}
        for number in range(self.rounds):
            self.report(f"{verb} {count}: round {number + 1} of {self.rounds}")
            for name, run in runs.items():
                times[name].append(run())
        return judge(count, times, trial)


def judge(
    num_tokens: int, times_ms: Mapping[str, list[float]], trial_ms: Mapping[str, float]
) -> Duel:
    """Milliseconds of the same rounds, ours and each build's, to rates and a ratio."""
    sides = {name: rates(num_tokens, times) for name, times in times_ms.items()}
    ours = sides.pop("ours")
    faster = max(sides, key=lambda build: sides[build].median)
    trial = {way: rates(num_tokens, [ms]) for way, ms in trial_ms.items()}
    return Duel(ours, sides, trial, faster, divide(ours, sides[faster]))
