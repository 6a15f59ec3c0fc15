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
from typing import TYPE_CHECKING, Any, Final, Literal, TypeVar

from draftree.errors import BenchError

if TYPE_CHECKING:
    from draftree.bench.dataset import Prompt
    from draftree.bench.http import Endpoint
    from draftree.bench.record import Json, ModelId

Line = dict[str, Any]
MAX_CTX: Final = 2048  # for prompts of data sets and their texts
_COUNTED: Final = re.compile(r"(.*?)(\d+) of (\d+)$")


@dataclass(frozen=True)
class Measurement:
    """Each measurement writes a file and returns its last line. skip: told, in a sentence, what
    was left out.
    """

    path: Path
    threads: int
    results: Path
    say: Callable[[str], None]
    skip: Callable[[str], None]

    def peers(self, rounds: int, python: str, llama_bench: Path | None) -> Line:
        from draftree.bench.peers import PeerOptions, measure_peers

        options = PeerOptions(self.threads, rounds, python=python, llama_bench=llama_bench)
        return self.record(
            "peers", options.settings(), lambda: measure_peers(self.path, options, self.say)
        )

    def decode(self, rounds: int) -> Line:
        from draftree.bench.decode import measure_decode

        return self.alone("decode", rounds, measure_decode)

    def prefill(self, rounds: int) -> Line:
        from draftree.bench.prefill import measure_prefill

        return self.alone("prefill", rounds, measure_prefill)

    def texts(
        self,
        kind: Literal["suite", "draft"],
        data: Sequence[str],
        file: Path | None,
        limit: int,
        n_gen: int,
        draft: str,
        device: str,
        temperature: float = 0.0,
    ) -> Line:
        """Texts of data sets: against plain decoding, or what a draft has to do with them.
        temperature: of the first; sampled texts have a result of their own.
        """
        from draftree.bench.draft import measure_draft
        from draftree.bench.suite import measure_suite
        from draftree.config import EngineConfig

        sets, max_ctx = self.load_sets(data, file, limit), min(MAX_CTX, self.context_length)
        config = EngineConfig(device, draft, threads=self.threads, max_ctx=max_ctx)
        settings = {"threads": self.threads, "num_tokens": n_gen, "limit": limit, "draft": draft}
        settings |= {"temperature": temperature} if temperature else {}
        asked = self.path, sets, n_gen, config, self.say
        measures = {
            "suite": lambda: measure_suite(*asked, temperature),
            "draft": lambda: measure_draft(*asked),
        }
        return self.record(f"{kind}-sampled" if temperature else kind, settings, measures[kind])

    @cached_property
    def context_length(self) -> int:
        from draftree.models.model_config import read_model_config
        from draftree.weights.file import open_checkpoint

        return read_model_config(open_checkpoint(self.path)).context_length

    @cached_property
    def model(self) -> "ModelId":
        from draftree.bench.record import identify_model

        return identify_model(self.path)

    def load_sets(
        self, data: Sequence[str], file: Path | None, limit: int
    ) -> "dict[str, list[Prompt]]":
        """The named sets and the user's file, or all sets that can be had."""
        from draftree.bench.dataset import NAMES, load_prompts, read_prompt_file
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

    def alone(self, kind: str, rounds: int, measure: Callable[..., Any]) -> Line:
        """Ours, with nobody to compare with."""
        settings = {"threads": self.threads, "rounds": rounds}
        return self.record(
            kind, settings, lambda: measure(self.path, self.threads, rounds, self.say)
        )

    def record(self, kind: str, settings: "Json", measure: Callable[[], Any]) -> Line:
        from draftree.bench.record import write_result

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

    from draftree.bench.dataset import chat_prompts
    from draftree.bench.http import HttpOptions, measure_http
    from draftree.bench.record import name_model, write_result

    found = replace(endpoint, model=endpoint.find_model())
    options = HttpOptions(tuple(sorted(set(clients))), requests, n_gen)
    return write_result(
        results,
        "http",
        name_model(label or found.model),
        options.settings(is_own=False),
        lambda: measure_http(found, chat_prompts(), options, say),
    )


Kind = TypeVar("Kind", bound=Measurement)


@contextmanager
def open_measurement(
    kind: type[Kind], model: str, threads: int, results: Path, skip: Callable[[str], None]
) -> Iterator[Kind]:
    """A model that is here, and somewhere to say how far things are."""
    from draftree.memory import usable_cores
    from draftree.weights.hub import resolve

    with progress() as say:
        yield kind(resolve(model), threads or usable_cores(), results, say, skip)


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


def say_skipped(sentence: str) -> None:
    print(f"skipped: {sentence}", file=sys.stderr)


def finish(line: Line) -> None:
    import json

    print(json.dumps(line))
