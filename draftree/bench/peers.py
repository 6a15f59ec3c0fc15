"""Ours beside llama.cpp: the same file, the same token ids, the same number of threads, in turns.

Each runs in a process of its own and is idle while the other is measured. llama.cpp is measured
through its server and through its library once, and then in the way that was faster.
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from draftree.bench.fault import BenchError
from draftree.bench.record import Json
from draftree.bench.sample import Ratio, Report, Samples, divide, rates
from draftree.bench.worker import Child

PREFILL_LENS: Final = (512, 64)
DECODE_TOKENS: Final = 128
_PROMPT_LEN: Final = 32
_MAX_CTX: Final = 1024
_WAYS: Final = ("server", "library")
NOT_INSTALLED: Final = (
    "llama.cpp cannot be measured: the package xllamacpp is not installed for {python}; "
    "run `pip install 'draftree[peers]'`, or name an interpreter that has it with --peer-python."
)


@dataclass(frozen=True, slots=True)
class Duel:
    """One task, measured in turns. trial: llama.cpp by each way, once, to find the faster one."""

    ours: Samples
    llama: Samples
    llama_way: str  # the faster one
    trial: dict[str, Samples]
    ratio: Ratio  # ours over llama


@dataclass(frozen=True, slots=True)
class PeerMeasures:
    """peer: version, instruction sets and format of keys and values of llama.cpp, as it says."""

    decode: Duel
    prefill: dict[str, Duel]  # by length
    peer: dict[str, str]
    kv_type: str  # the format of our keys and values


@dataclass(frozen=True, slots=True)
class PeerOptions:
    threads: int
    rounds: int
    decode_tokens: int = DECODE_TOKENS
    prefill_lens: tuple[int, ...] = PREFILL_LENS
    python: str = sys.executable

    def settings(self) -> Json:
        return {
            "threads": self.threads,
            "rounds": self.rounds,
            "decode_tokens": self.decode_tokens,
            "decode_prompt": _PROMPT_LEN,
            "prefill_lens": list(self.prefill_lens),
            "method": (
                "in turns, each in its own process; a short warm-up before each timed run; greedy; "
                "the same token ids; prefill counts the prompt and its first token"
            ),
        }


def open_peer(python: str = sys.executable) -> tuple[Child, dict[str, str]]:
    """A llama.cpp worker, and what it says of itself; a sentence where it is not installed."""
    peer = Child("draftree.bench.llama", "llama.cpp", python)
    try:
        return peer, peer.ask("describe")
    except BenchError as error:
        peer.close()
        if "NotFoundError" in str(error) and "xllamacpp" in str(error):
            raise BenchError(NOT_INSTALLED.format(python=python)) from None
        raise


def measure_peers(path: Path, options: PeerOptions, report: Report) -> PeerMeasures:
    peer, description = open_peer(options.python)
    with peer, Child("draftree.bench.subject", "draftree") as ours:
        report("loading both")
        common = {"path": str(path.resolve()), "threads": options.threads, "max_ctx": _MAX_CTX}
        ours.ask("load", kind="plain", **common)
        kv_type = ours.ask("kv_type")
        peer.ask("load", use_server=True, **common)
        longest = max(*options.prefill_lens, _PROMPT_LEN)
        (text,) = ours.ask("windows", num_windows=1, window_len=longest)

        def duel(label: str, counted: int, verb: str, **arguments: object) -> Duel:
            report(f"{label}: warm-up")
            ours.ask(verb, **arguments)
            trial = {way: peer.ask(verb, via=way, **arguments) for way in _WAYS}
            way = min(trial, key=lambda name: trial[name])
            ours_ms, llama_ms = [], []
            for number in range(options.rounds):
                report(f"{label}: round {number + 1} of {options.rounds}")
                ours_ms.append(ours.ask(verb, **arguments))
                llama_ms.append(peer.ask(verb, via=way, **arguments))
            return judge(counted, ours_ms, llama_ms, trial)

        num_tokens = options.decode_tokens
        decode = duel(
            f"decode {num_tokens}",
            num_tokens,
            "decode",
            ids=text[:_PROMPT_LEN],
            num_tokens=num_tokens,
        )
        prefill = {
            str(length): duel(f"prefill {length}", length, "prefill", ids=text[:length])
            for length in options.prefill_lens
        }
    return PeerMeasures(decode, prefill, description, kv_type)


def judge(
    num_tokens: int, ours_ms: list[float], llama_ms: list[float], trial_ms: dict[str, float]
) -> Duel:
    """Milliseconds of the same rounds to rates and a ratio."""
    ours, llama = rates(num_tokens, ours_ms), rates(num_tokens, llama_ms)
    return Duel(
        ours=ours,
        llama=llama,
        llama_way=min(trial_ms, key=lambda name: trial_ms[name]),
        trial={way: rates(num_tokens, [ms]) for way, ms in trial_ms.items()},
        ratio=divide(ours, llama),
    )
