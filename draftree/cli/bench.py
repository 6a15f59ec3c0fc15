"""`draftree bench ...`: measure, write results/*.json, and make the page of them.

Each command ends with one line of JSON on stdout; progress goes to stderr. What is measured, and
how, is in draftree/bench.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import typer

from draftree.cli.option import DEFAULT_MODEL
from draftree.errors import DraftreeError

if TYPE_CHECKING:
    from draftree.bench.record import Json, ModelId

RESULTS: Final = Path("results")
PAGE: Final = Path("docs/benchmarks.md")
ALL_MODELS: Final = (DEFAULT_MODEL, "qwen2.5-coder-0.5b")

Model = Annotated[
    str,
    typer.Argument(metavar="MODEL", help="A name (see `draftree models`) or a GGUF file."),
]
Threads = Annotated[
    int, typer.Option(min=0, help="CPU threads; 0 is one for each core.", show_default=False)
]
Rounds = Annotated[int, typer.Option(min=1, help="How often everything is measured.")]
Results = Annotated[Path, typer.Option(help="Folder for the result files.")]
Python = Annotated[
    str | None,
    typer.Option("--peer-python", help="Interpreter that has xllamacpp.", show_default=False),
]

app = typer.Typer(help="Measure speed, memory and agreement; write results and their page.")


@app.command()
def peers(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 0,
    rounds: Rounds = 5,
    results: Results = RESULTS,
    peer_python: Python = None,
) -> None:
    """Decode and prefill, ours and llama.cpp's in turns."""
    with _bench(model, threads, results) as bench:
        _finish(bench.peers(rounds, peer_python or sys.executable))


def _add_command(kind: str, num_rounds: int, help_text: str) -> None:
    """A command that takes nothing but a model and a number of rounds."""

    def command(
        model: Model = DEFAULT_MODEL,
        threads: Threads = 0,
        rounds: Rounds = num_rounds,
        results: Results = RESULTS,
    ) -> None:
        with _bench(model, threads, results) as bench:
            _finish(bench.alone(kind, rounds))

    app.command(kind, help=help_text)(command)


_add_command("decode", 10, "Our decoding: by depth, by tokens in a pass, by operation.")
_add_command("prefill", 5, "Our prefill: by length of the prompt, by operation.")
_add_command("memory", 3, "Resident memory with a full context of 2048, over the file's size.")
_add_command("start", 5, "Process start to first token, with everything warm.")
_add_command("multiturn", 5, "First token by turn of a conversation, cached and not.")


@app.command()
def synth(
    folder: Annotated[Path, typer.Argument(help="Where to write the two files.")],
    shape: Annotated[str, typer.Option(help="27b, 0.8b or tiny.")] = "27b",
) -> None:
    """Write a made-up target and draft of real shapes: for measuring, not for reading."""
    from draftree.bench.synth import SHAPES, write_pair

    if shape not in SHAPES:
        raise typer.BadParameter(f"--shape is {shape!r}; it must be one of {', '.join(SHAPES)}.")
    target, draft = write_pair(shape, folder)
    _finish({"kind": "synth", "target": str(target), "draft": str(draft)})


@app.command()
def card(
    folder: Annotated[Path, typer.Argument(help="Where the made-up files are, or will be.")],
    shape: Annotated[str, typer.Option(help="27b, 0.8b or tiny.")] = "27b",
    memory: Annotated[
        float, typer.Option(help="GiB that the arrays may take; 0 is all there is.")
    ] = 22.35,
    rounds: Rounds = 5,
    results: Results = RESULTS / "gpu",
) -> None:
    """A GPU with a made-up model: decoding, rounds, passes, prefill, depth, memory, equality."""
    from draftree.bench.card import measure_card
    from draftree.bench.headline import headline
    from draftree.bench.record import make_record, write_record
    from draftree.bench.synth import identify_pair, write_pair

    with _sentences(), _progress() as say:
        say("writing the files")
        pair = write_pair(shape, folder)
        measures = measure_card(pair, rounds, memory, say)
        settings = {"rounds": rounds, "memory": memory, "shape": shape}
        record = make_record("card", identify_pair(shape, pair[0]), settings, measures, None)
        path = write_record(results, record)
    _finish({"kind": "card", "file": str(path)} | headline(record))


@app.command()
def parity(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 0,
    tokens: Annotated[int, typer.Option(min=512, help="Tokens to score.")] = 20_480,
    exact_windows: Annotated[
        int, typer.Option(min=1, help="Windows of 512 that exact arithmetic scores too.")
    ] = 4,
    results: Results = RESULTS,
    peer_python: Python = None,
) -> None:
    """Perplexity and first choices, ours against llama.cpp's and exact arithmetic."""
    with _bench(model, threads, results) as bench:
        _finish(bench.parity(tokens, exact_windows, peer_python or sys.executable))


@app.command()
def suite(
    model: Model = DEFAULT_MODEL,
    data: Annotated[
        list[str] | None,
        typer.Option(help="own, humaneval, gsm8k or math500; may be given several times."),
    ] = None,
    prompts: Annotated[
        Path | None, typer.Option(help='Own prompts: lines of JSON with "prompt" and "chat".')
    ] = None,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts of each set.")] = 10,
    n_gen: Annotated[int, typer.Option("--n-gen", "-n", min=1, help="Tokens for each.")] = 128,
    draft: Annotated[str, typer.Option(help="Draft, as for `draftree run`.")] = "auto",
    threads: Threads = 0,
    results: Results = RESULTS,
) -> None:
    """Plain against speculative decoding: equal texts, speed-up, AL."""
    with _bench(model, threads, results) as bench:
        _finish(bench.suite(tuple(data or ()), prompts, limit, n_gen, draft))


@app.command()
def report(
    results: Results = RESULTS,
    page: Annotated[Path, typer.Option(help="The page to write.")] = PAGE,
    plots: Annotated[bool, typer.Option(help="Draw plots as well.")] = True,
) -> None:
    """Make the page of benchmarks from the result files."""
    with _sentences():
        _finish(_write_page(results, page, plots))


@app.command("all")
def run_all(
    model: Annotated[
        list[str] | None,
        typer.Option("--model", "-m", help="Models; may be given several times."),
    ] = None,
    threads: Threads = 0,
    rounds: Rounds = 5,
    tokens: Annotated[int, typer.Option(min=512, help="Tokens to score for parity.")] = 20_480,
    results: Results = RESULTS,
    page: Annotated[Path, typer.Option(help="The page to write.")] = PAGE,
    peer_python: Python = None,
) -> None:
    """Everything, for the page: takes about ten minutes of a quiet machine."""
    python = peer_python or sys.executable
    lines: list[dict[str, Any]] = []
    skipped: list[str] = []

    @contextmanager
    def skipping() -> Iterator[None]:
        """What cannot be had does not keep us from the rest."""
        try:
            with _sentences():
                yield
        except DraftreeError as error:
            print(f"skipped: {error}", file=sys.stderr)
            skipped.append(str(error))

    def attempt(take: Callable[[], dict[str, Any]]) -> None:
        with skipping():
            lines.append(take())

    for name in model or ALL_MODELS:
        with skipping(), _bench(name, threads, results) as bench:
            attempt(partial(bench.peers, rounds, python))
            attempt(partial(bench.alone, "decode", 2 * rounds))
            attempt(partial(bench.alone, "prefill", min(rounds, 3)))
            attempt(partial(bench.alone, "memory", min(rounds, 3)))
            attempt(partial(bench.alone, "start", rounds))
            attempt(partial(bench.alone, "multiturn", rounds))
            attempt(partial(bench.suite, (), None, 4, 96, "auto"))
            attempt(partial(bench.parity, tokens, min(4, tokens // 512), python))
    with skipping():
        _write_page(results, page, plots=True)
    with _sentences():
        written = _write_page(results, page, plots=False)
    _finish({**written, "results": lines, "skipped": skipped})
    if not lines:
        raise DraftreeError("Nothing could be measured.")


@dataclass(frozen=True, slots=True)
class Bench:
    """One model on its way through measurements; each writes a file and returns its last line."""

    path: Path
    threads: int
    results: Path
    say: Callable[[str], None]

    def peers(self, rounds: int, python: str) -> dict[str, Any]:
        from draftree.bench.peers import PeerOptions, measure_peers

        options = PeerOptions(self.threads, rounds, python=python)
        return self._record(
            "peers", options.settings(), lambda model: measure_peers(self.path, options, self.say)
        )

    def alone(self, kind: str, rounds: int) -> dict[str, Any]:
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
            lambda model: measures[kind](self.path, self.threads, rounds, self.say),
        )

    def parity(self, num_tokens: int, exact_windows: int, python: str) -> dict[str, Any]:
        from draftree.bench.parity import ParityOptions, measure_parity
        from draftree.env import cache_dir

        cache = cache_dir() / "peers"
        options = ParityOptions(self.threads, python, cache, num_tokens, exact_windows)
        return self._record(
            "parity",
            options.settings(),
            lambda model: measure_parity(self.path, model.sha256, options, self.say),
        )

    def suite(
        self, data: tuple[str, ...], file: Path | None, limit: int, n_gen: int, draft: str
    ) -> dict[str, Any]:
        from draftree.bench.dataset import NAMES, load_prompts, read_prompt_file
        from draftree.bench.fault import BenchError
        from draftree.bench.suite import SuiteOptions, measure_suite
        from draftree.env import cache_dir

        sets = {}
        if file is not None:
            sets[file.name] = read_prompt_file(file)[:limit]
        for name in data or (() if file is not None else NAMES):
            self.say(f"data set {name}")
            try:
                sets[name] = load_prompts(name, cache_dir() / "datasets")[:limit]
            except BenchError as error:
                if data:
                    raise
                print(f"skipped: {error}", file=sys.stderr)  # nobody asked for this one by name
        options = SuiteOptions(self.threads, n_gen, draft)
        settings = {"threads": self.threads, "num_tokens": n_gen, "limit": limit}
        return self._record(
            "suite",
            {**settings, "budget": options.budget, "ngram": options.ngram},
            lambda model: measure_suite(self.path, sets, options, self.say),
        )

    def _record(
        self, kind: str, settings: "Json", measure: "Callable[[ModelId], Any]"
    ) -> dict[str, Any]:
        from draftree.bench.disturbance import foreign_share, look
        from draftree.bench.headline import headline
        from draftree.bench.record import identify_model, make_record, write_record
        from draftree.config import usable_cores

        model = identify_model(self.path)
        before = look()
        measures = measure(model)
        share = foreign_share(before, look(), usable_cores())
        record = make_record(kind, model, settings, measures, share)
        path = write_record(self.results, record)
        line = {"kind": kind, "model": model.name, "file": str(path), "disturbance": share}
        return line | headline(record)


@contextmanager
def _bench(model: str, threads: int, results: Path) -> Iterator[Bench]:
    """A model that is here, and somewhere to say how far things are."""
    from draftree.config import usable_cores
    from draftree.weights.hub import resolve

    with _sentences(), _progress() as say:
        yield Bench(resolve(model), threads or usable_cores(), results, say)


@contextmanager
def _sentences() -> Iterator[None]:
    """What a measurement cannot go on with is the user's to know, not a bug."""
    from draftree.bench.fault import BenchError

    try:
        yield
    except BenchError as error:
        raise DraftreeError(str(error)) from error


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A line that changes on a terminal; elsewhere a line for each step."""
    if not sys.stderr.isatty():
        yield lambda text: print(text, file=sys.stderr, flush=True)
        return
    from rich.console import Console

    with Console(stderr=True).status("starting") as status:
        yield status.update


def _write_page(results: Path, page: Path, plots: bool) -> dict[str, Any]:
    from draftree.bench.plot import draw_plots
    from draftree.bench.record import read_records
    from draftree.bench.report import make_page

    folder = page.parent / "plots"
    if plots:
        draw_plots(read_records(results).values(), folder)
    names = sorted(path.name for path in folder.glob("*.png"))
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(make_page(results, names), encoding="utf-8")
    return {"page": str(page), "plots": names}


def _finish(line: dict[str, Any]) -> None:
    import json

    print(json.dumps(line))
