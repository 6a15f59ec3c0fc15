"""Ours beside llama.cpp: the same file, the same token ids, the same number of threads, in turns.

Each runs in a process of its own and is idle while the other is measured. llama.cpp is measured
through its server and through its library, and ours is compared with the faster of the two.
"""

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from draftree.bench.fault import BenchError
from draftree.bench.record import Json
from draftree.bench.sample import Ratio, Samples, divide, rates
from draftree.bench.worker import Child

Report = Callable[[str], None]

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
    """One task, measured in turns. ratio: ours over the faster way to run llama.cpp."""

    ours: Samples
    llama_server: Samples
    llama_library: Samples
    faster_peer: str
    ratio: Ratio


@dataclass(frozen=True, slots=True)
class PeerMeasures:
    """peer: version and instruction sets of llama.cpp, as it says itself."""

    decode: Duel
    prefill: dict[str, Duel]  # by length
    peer: dict[str, str]


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
                "the same token ids; prefill counts the prompt and its first token; ratio against "
                "the faster of server and library"
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
        peer.ask("load", use_server=True, **common)
        longest = max(*options.prefill_lens, _PROMPT_LEN)
        (text,) = ours.ask("windows", num_windows=1, window_len=longest)

        def duel(label: str, counted: int, verb: str, **arguments: object) -> Duel:
            times: dict[str, list[float]] = {"ours": [], "server": [], "library": []}
            for number in range(-1, options.rounds):
                name = "warm-up" if number < 0 else f"round {number + 1} of {options.rounds}"
                report(f"{label}: {name}")
                taken = {"ours": ours.ask(verb, **arguments)}
                taken |= {way: peer.ask(verb, via=way, **arguments) for way in _WAYS}
                if number >= 0:
                    for subject, ms in taken.items():
                        times[subject].append(ms)
            return judge(counted, times["ours"], times["server"], times["library"])

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
    return PeerMeasures(decode, prefill, description)


def judge(
    num_tokens: int, ours_ms: list[float], server_ms: list[float], library_ms: list[float]
) -> Duel:
    """Milliseconds of the same rounds to rates and a ratio."""
    ours = rates(num_tokens, ours_ms)
    server, library = rates(num_tokens, server_ms), rates(num_tokens, library_ms)
    is_server = server.median >= library.median
    return Duel(
        ours=ours,
        llama_server=server,
        llama_library=library,
        faster_peer="server" if is_server else "library",
        ratio=divide(ours, server if is_server else library),
    )
