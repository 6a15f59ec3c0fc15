"""One model on its way through all measurements: those of `draftree bench`, and those that only
developers of draftree need.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from benchmarks import multiturn, operation, start
from benchmarks.budget import BUDGETS, BudgetOptions, measure_budget
from benchmarks.context import ContextOptions, measure_context
from benchmarks.kv_quality import PAIRS, KvQualityOptions, measure_kv_quality
from benchmarks.memory import measure_memory
from benchmarks.overhead import (
    LLAMA_SLOTS,
    OverheadOptions,
    measure_overhead,
    run_llama_server,
    run_server,
)
from benchmarks.parity import ParityOptions, measure_parity
from draftree.bench.dataset import OWN, chat_prompts
from draftree.bench.http import HttpMeasures, HttpOptions, measure_http
from draftree.bench.record import Json
from draftree.cli.measurement import MAX_CTX, Line, Measurement
from draftree.config import EngineConfig
from draftree.engine.gpu import find_gpu
from draftree.env import cache_dir
from draftree.errors import BenchError

ALONE: dict[str, Callable[..., Any]] = {
    "operations": operation.measure_operations,
    "memory": measure_memory,
    "start": start.measure_start,
    "multiturn": multiturn.measure_multiturn,
}


@dataclass(frozen=True, slots=True)
class ServerMeasures(HttpMeasures):
    """Of a server of our own, and of others beside it."""

    one_by_one: HttpMeasures | None = None  # of the same server where requests take no turns
    peer: HttpMeasures | None = None  # of another system's server
    unbatched: HttpMeasures | None = None  # of the same where no pass is shared

    def headline(self) -> Json:
        others = {name: getattr(self, name) for name in ("one_by_one", "unbatched", "peer")}
        found = {name: other.headline() for name, other in others.items() if other is not None}
        return HttpMeasures.headline(self) | found


class Session(Measurement):
    """Everything that is measured of a model on a CPU, or on the GPU where it says so."""

    def parity(self, num_tokens: int, exact_windows: int, python: str) -> Line:
        cache = cache_dir() / "peers"
        options = ParityOptions(self.threads, python, cache, num_tokens, exact_windows)
        return self.record(
            "parity",
            options.settings(),
            lambda: measure_parity(self.path, self.model.sha256, options, self.say),
        )

    def kv_quality(
        self, lengths: Sequence[int], num_tokens: int, pairs: Sequence[str], device: str
    ) -> Line:
        longest = self.context_length
        fitting = tuple(length for length in sorted(set(lengths)) if length <= longest)
        for length in sorted(set(lengths) - set(fitting)):
            self.skip(f"Texts of {length}: {self.path.name} was trained for {longest} tokens.")
        if not fitting:
            raise BenchError(f"No text fits the {longest} tokens of {self.path.name}.")
        cache, formats = cache_dir() / "kv-quality", tuple(pairs) or PAIRS
        gpu = find_gpu(device)
        name = gpu.name if gpu is not None else ""
        options = KvQualityOptions(self.threads, fitting, num_tokens, formats, cache, name)
        return self.record(
            "kv-quality",
            options.settings(),
            lambda: measure_kv_quality(self.path, self.model.sha256, options, self.say),
        )

    def context(
        self, depths: Sequence[int], rounds: int, n_gen: int, draft: str, device: str = "auto"
    ) -> Line:
        longest = self.context_length
        fitting = tuple(depth for depth in sorted(set(depths)) if depth + n_gen <= longest)
        for depth in sorted(set(depths) - set(fitting)):
            self.skip(f"A depth of {depth}: {self.path.name} was trained for {longest} tokens.")
        if not fitting:
            raise BenchError(f"No depth fits the {longest} tokens of {self.path.name}.")
        config = EngineConfig(device, draft, threads=self.threads)
        options = ContextOptions(config, rounds, fitting, n_gen)
        settings = {"threads": self.threads, "rounds": rounds, "num_tokens": n_gen, "draft": draft}
        return self.record(
            "context", settings, lambda: measure_context(self.path, options, self.say)
        )

    def budget(
        self,
        budgets: Sequence[str],
        data: Sequence[str],
        file: Path | None,
        limit: int,
        passes: int,
        n_gen: int,
        draft: str,
        device: str = "auto",
    ) -> Line:
        sets = self.load_sets(data or (() if file else (OWN,)), file, limit)
        prompts = [prompt for members in sets.values() for prompt in members]
        max_ctx = min(MAX_CTX, self.context_length)
        config = EngineConfig(device, draft, threads=self.threads, max_ctx=max_ctx)
        options = BudgetOptions(config, passes, n_gen, tuple(budgets) or BUDGETS)
        settings: Json = {"threads": self.threads, "passes": passes, "num_tokens": n_gen}
        settings |= {"limit": limit, "draft": draft, "sets": list(sets)}
        return self.record(
            "budget", settings, lambda: measure_budget(self.path, prompts, options, self.say)
        )

    def overhead(self, limit: int, rounds: int, n_gen: int) -> Line:
        options = OverheadOptions(self.threads, rounds, n_gen)
        settings = {"threads": self.threads, "rounds": rounds, "num_tokens": n_gen, "limit": limit}
        return self.record(
            "overhead",
            settings,
            lambda: measure_overhead(self.path, chat_prompts()[:limit], options, self.say),
        )

    def http(
        self, clients: Sequence[int], requests: int, n_gen: int, llama_server: Path | None = None
    ) -> Line:
        """A server of our own, one whose requests share no passes, and one whose requests take no
        turns; and llama.cpp's, if its program is given.
        """
        options = HttpOptions(tuple(sorted(set(clients))), requests, n_gen)

        def measure() -> Any:
            measured = []
            for more in ((), ("--batching", "off"), ("--parallel", "1")):
                self.say("starting a server")
                with run_server(self.path, self.threads, *more) as endpoint:
                    measured.append(measure_http(endpoint, chat_prompts(), options, self.say))
            own = {field.name: getattr(measured[0], field.name) for field in fields(HttpMeasures)}
            found = ServerMeasures(**own, unbatched=measured[1], one_by_one=measured[2])
            if llama_server is None:
                return found
            self.say("starting llama.cpp's server")
            with run_llama_server(llama_server, self.path, self.threads) as endpoint:
                peer = measure_http(endpoint, chat_prompts(), options, self.say)
            return replace(found, peer=peer)

        settings = options.settings(is_own=True) | {"threads": self.threads}
        settings |= {"llama_slots": LLAMA_SLOTS} if llama_server is not None else {}
        return self.record("http", settings, measure)


def all_kinds(
    session: Session, rounds: int, num_tokens: int, python: str, llama_bench: Path | None
) -> dict[str, Callable[[], Line]]:
    """Every kind but the GPU's and the very long ones, with settings that keep the whole short."""
    few = min(rounds, 3)
    texts = (), None, 10, 128, "auto", "auto"
    alone = {kind: partial(session.alone, kind, few, take) for kind, take in ALONE.items()}
    return {
        "peers": partial(session.peers, rounds, python, llama_bench),
        "decode": partial(session.decode, 2 * rounds),
        "prefill": partial(session.prefill, few),
        **alone,
        "suite": partial(session.texts, "suite", *texts),
        "suite-sampled": partial(session.texts, "suite", *texts, 0.8),
        "context": partial(session.context, (128, 512, 2048, 4096), 1, 32, "auto"),
        "budget": partial(session.budget, (), (), None, 3, 2, 40, "auto"),
        "overhead": partial(session.overhead, 3, few, 64),
        "http": partial(session.http, (1, 4, 8), 2, 48),
        "parity": partial(session.parity, num_tokens, min(4, num_tokens // 512), python),
    }
