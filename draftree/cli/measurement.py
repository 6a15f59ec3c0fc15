"""One model on its way through the measurements of `draftree bench`.

In: what was asked for. Out: a result file for each, and the line that its command ends with. What
is measured, and how, is in draftree/bench.
"""

import re
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from draftree.errors import DraftreeError

if TYPE_CHECKING:
    from draftree.bench.dataset import Prompt
    from draftree.bench.http import Endpoint
    from draftree.bench.record import Json, ModelId

Line = dict[str, Any]
_MAX_CTX: Final = 2048  # for prompts of data sets and their texts
_COUNTED: Final = re.compile(r"(.*?)(\d+) of (\d+)$")


@dataclass(frozen=True)
class Bench:
    """Each measurement writes a file and returns its last line. skip: told, in a sentence, what
    was left out.
    """

    path: Path
    threads: int
    results: Path
    say: Callable[[str], None]
    skip: Callable[[str], None]

    def peers(self, rounds: int, python: str) -> Line:
        from draftree.bench.peers import PeerOptions, measure_peers

        options = PeerOptions(self.threads, rounds, python=python)
        return self._record(
            "peers", options.settings(), lambda: measure_peers(self.path, options, self.say)
        )

    def alone(self, kind: str, rounds: int) -> Line:
        """decode, prefill, memory, start or multiturn: ours, with nobody to compare with."""
        from draftree.bench.decode import measure_decode
        from draftree.bench.memory import measure_memory
        from draftree.bench.multiturn import measure_multiturn
        from draftree.bench.prefill import measure_prefill
        from draftree.bench.start import measure_start

        measures: dict[str, Callable[..., Any]] = {
            "decode": measure_decode,
            "prefill": measure_prefill,
            "memory": measure_memory,
            "start": measure_start,
            "multiturn": measure_multiturn,
        }
        return self._record(
            kind,
            {"threads": self.threads, "rounds": rounds},
            lambda: measures[kind](self.path, self.threads, rounds, self.say),
        )

    def parity(self, num_tokens: int, exact_windows: int, python: str) -> Line:
        from draftree.bench.parity import ParityOptions, measure_parity
        from draftree.env import cache_dir

        cache = cache_dir() / "peers"
        options = ParityOptions(self.threads, python, cache, num_tokens, exact_windows)
        return self._record(
            "parity",
            options.settings(),
            lambda: measure_parity(self.path, self.model.sha256, options, self.say),
        )

    def suite(
        self,
        data: Sequence[str],
        file: Path | None,
        limit: int,
        n_gen: int,
        draft: str,
        device: str = "auto",
    ) -> Line:
        from draftree.bench.suite import SuiteOptions, measure_suite
        from draftree.bench.writing import Drafting

        sets = self._load_sets(data, file, limit)
        max_ctx = min(_MAX_CTX, self.context_length)
        options = SuiteOptions(self.threads, n_gen, Drafting(draft, device=device), max_ctx)
        settings = {"threads": self.threads, "num_tokens": n_gen, "limit": limit, "draft": draft}
        return self._record(
            "suite", settings, lambda: measure_suite(self.path, sets, options, self.say)
        )

    def context(
        self, depths: Sequence[int], rounds: int, n_gen: int, draft: str, device: str = "auto"
    ) -> Line:
        from draftree.bench.context import ContextOptions, measure_context
        from draftree.bench.writing import Drafting

        longest = self.context_length
        fitting = tuple(depth for depth in sorted(set(depths)) if depth + n_gen <= longest)
        for depth in sorted(set(depths) - set(fitting)):
            self.skip(f"A depth of {depth}: {self.path.name} was trained for {longest} tokens.")
        if not fitting:
            raise DraftreeError(f"No depth fits the {longest} tokens of {self.path.name}.")
        drafting = Drafting(draft, device=device)
        options = ContextOptions(self.threads, rounds, drafting, fitting, n_gen)
        settings = {"threads": self.threads, "rounds": rounds, "num_tokens": n_gen, "draft": draft}
        return self._record(
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
        from draftree.bench.budget import BUDGETS, BudgetOptions, measure_budget
        from draftree.bench.dataset import OWN
        from draftree.bench.writing import Drafting

        sets = self._load_sets(data or (() if file else (OWN,)), file, limit)
        prompts = [prompt for members in sets.values() for prompt in members]
        drafting = Drafting(draft, device=device)
        chosen, max_ctx = tuple(budgets) or BUDGETS, min(_MAX_CTX, self.context_length)
        options = BudgetOptions(self.threads, passes, n_gen, drafting, chosen, max_ctx)
        settings: Json = {"threads": self.threads, "passes": passes, "num_tokens": n_gen}
        settings |= {"limit": limit, "draft": draft, "sets": list(sets)}
        return self._record(
            "budget", settings, lambda: measure_budget(self.path, prompts, options, self.say)
        )

    def overhead(self, limit: int, rounds: int, n_gen: int) -> Line:
        from draftree.bench.overhead import OverheadOptions, measure_overhead

        options = OverheadOptions(self.threads, rounds, n_gen)
        settings = {"threads": self.threads, "rounds": rounds, "num_tokens": n_gen}
        return self._record(
            "overhead",
            settings | {"limit": limit},
            lambda: measure_overhead(self.path, chat_prompts()[:limit], options, self.say),
        )

    def http(self, clients: Sequence[int], requests: int, n_gen: int) -> Line:
        """A server of our own."""
        from draftree.bench.overhead import run_server

        def measure() -> Any:
            self.say("starting a server")
            with run_server(self.path, self.threads) as endpoint:
                return _measure_http(endpoint, clients, requests, n_gen, self.say)

        settings = _http_settings(clients, requests, n_gen, is_own=True)
        return self._record("http", settings | {"threads": self.threads}, measure)

    @cached_property
    def context_length(self) -> int:
        from draftree.models.facts import read_facts
        from draftree.weights.file import open_checkpoint

        return read_facts(open_checkpoint(self.path)).context_length

    @cached_property
    def model(self) -> "ModelId":
        from draftree.bench.record import identify_model

        return identify_model(self.path)

    def _load_sets(
        self, data: Sequence[str], file: Path | None, limit: int
    ) -> "dict[str, list[Prompt]]":
        """The named sets and the user's file, or all sets that can be had."""
        from draftree.bench.dataset import NAMES, load_prompts, read_prompt_file
        from draftree.bench.fault import BenchError
        from draftree.env import cache_dir

        sets = {} if file is None else {file.name: read_prompt_file(file)[:limit]}
        for name in data or (() if file is not None else NAMES):
            self.say(f"data set {name}")
            try:
                sets[name] = load_prompts(name, cache_dir() / "datasets")[:limit]
            except BenchError as error:
                if data:
                    raise
                self.skip(str(error))  # nobody asked for this one by name
        return sets

    def _record(self, kind: str, settings: "Json", measure: Callable[[], Any]) -> Line:
        return write_result(self.results, kind, self.model, settings, measure)


def measure_endpoint(
    endpoint: "Endpoint",
    label: str,
    clients: Sequence[int],
    requests: int,
    n_gen: int,
    results: Path,
    say: Callable[[str], None],
) -> Line:
    """Somebody's server. Its address and key go into no file."""
    from dataclasses import replace

    from draftree.bench.record import name_model

    found = replace(endpoint, model=endpoint.find_model())
    settings = _http_settings(clients, requests, n_gen, is_own=False)
    return write_result(
        results,
        "http",
        name_model(label or found.model),
        settings,
        lambda: _measure_http(found, clients, requests, n_gen, say),
    )


def _measure_http(
    endpoint: "Endpoint",
    clients: Sequence[int],
    requests: int,
    n_gen: int,
    say: Callable[[str], None],
) -> Any:
    from draftree.bench.http import HttpOptions, measure_http

    options = HttpOptions(tuple(sorted(set(clients))), requests, n_gen)
    return measure_http(endpoint, chat_prompts(), options, say)


def _http_settings(
    clients: Sequence[int], requests: int, n_gen: int, *, is_own: bool
) -> dict[str, Any]:
    counts = sorted(set(clients))
    return {"clients": counts, "requests": requests, "num_tokens": n_gen, "is_own": is_own}


def chat_prompts() -> list[str]:
    from draftree.bench.dataset import OWN, load_prompts

    return [prompt.text for prompt in load_prompts(OWN, Path()) if prompt.is_chat]


def write_result(
    results: Path, kind: str, model: "ModelId", settings: "Json", measure: Callable[[], Any]
) -> Line:
    """Measure, look how busy the machine was meanwhile, write the file."""
    from draftree.bench.disturbance import foreign_share, look
    from draftree.bench.headline import headline
    from draftree.bench.record import make_record, write_record
    from draftree.config import usable_cores

    before = look()
    measures = measure()
    share = foreign_share(before, look(), usable_cores())
    record = make_record(kind, model, settings, measures, share)
    path = write_record(results, record)
    line = {"kind": kind, "model": model.name, "file": str(path), "disturbance": share}
    return line | headline(record)


@contextmanager
def open_bench(
    model: str, threads: int, results: Path, skip: Callable[[str], None]
) -> Iterator[Bench]:
    """A model that is here, and somewhere to say how far things are."""
    from draftree.config import usable_cores
    from draftree.weights.hub import resolve

    with sentences(), progress() as say:
        yield Bench(resolve(model), threads or usable_cores(), results, say, skip)


@contextmanager
def sentences() -> Iterator[None]:
    """What a measurement cannot go on with is the user's to know, not a bug."""
    from draftree.bench.fault import BenchError

    try:
        yield
    except BenchError as error:
        raise DraftreeError(str(error)) from error


@contextmanager
def progress() -> Iterator[Callable[[str], None]]:
    """A bar on a terminal, which moves with "… 2 of 5"; elsewhere a line for each step."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, SpinnerColumn, TextColumn, TimeElapsedColumn

    columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bars:
        task = bars.add_task("starting", total=None)

        def say(text: str) -> None:
            counted = _COUNTED.match(text)
            done, total = (int(counted[2]) - 1, int(counted[3])) if counted else (0, None)
            bars.update(task, description=text, completed=done, total=total)

        yield say
