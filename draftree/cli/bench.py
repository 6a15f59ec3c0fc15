"""`draftree bench ...`: measure, write results/*.json, and make the page of them.

Each command ends with one line of JSON on stdout; progress goes to stderr. What is measured, and
how, is in draftree/bench.
"""

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Final, Literal

import typer

from draftree import env
from draftree.cli.measurement import Bench, Line, measure_endpoint, open_bench, progress, sentences
from draftree.cli.option import DEFAULT_MODEL
from draftree.errors import DraftreeError, require_packages

RESULTS: Final = Path("results")
PAGE: Final = Path("docs/benchmarks.md")
HTML: Final = "report.html"
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
Data = Annotated[
    list[str] | None,
    typer.Option(help="own, humaneval, gsm8k or math500; may be given several times."),
]
PromptFile = Annotated[
    Path | None, typer.Option(help='Own prompts: lines of JSON with "prompt" and "chat".')
]
Limit = Annotated[int, typer.Option(min=1, help="Most prompts of each set.")]
NGen = Annotated[int, typer.Option("--n-gen", "-n", min=1, help="Tokens for each.")]
Draft = Annotated[str, typer.Option(help="Draft, as for `draftree run`.")]
Device = Annotated[
    Literal["auto", "cpu", "cuda"],
    typer.Option(help="Where to run; `auto` takes a GPU where there is one."),
]
Page = Annotated[Path, typer.Option(help="The page to write.")]

app = typer.Typer(help="Measure speed, memory and agreement; write results and their page.")


def _say_skipped(sentence: str) -> None:
    print(f"skipped: {sentence}", file=sys.stderr)


@app.command()
def peers(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 0,
    rounds: Rounds = 5,
    results: Results = RESULTS,
    peer_python: Python = None,
) -> None:
    """Decode and prefill, ours and llama.cpp's in turns."""
    with open_bench(model, threads, results, _say_skipped) as bench:
        _finish(bench.peers(rounds, peer_python or sys.executable))


def _add_command(kind: str, num_rounds: int, help_text: str) -> None:
    """A command that takes nothing but a model and a number of rounds."""

    def command(
        model: Model = DEFAULT_MODEL,
        threads: Threads = 0,
        rounds: Rounds = num_rounds,
        results: Results = RESULTS,
    ) -> None:
        with open_bench(model, threads, results, _say_skipped) as bench:
            _finish(bench.alone(kind, rounds))

    app.command(kind, help=help_text)(command)


_add_command("decode", 10, "Our decoding: by depth, by tokens in a pass, by operation.")
_add_command("prefill", 5, "Our prefill: by length of the prompt, by operation.")
_add_command("memory", 3, "Resident memory with a full context of 2048, over the files' size.")
_add_command("start", 5, "Process start to first token, with everything warm.")
_add_command("multiturn", 5, "First token by turn of a conversation, cached and not.")


@app.command()
def synth(
    folder: Annotated[Path, typer.Argument(help="Where to write the two files.")],
    shape: Annotated[str, typer.Option(help="27b, 0.8b or tiny.")] = "27b",
) -> None:
    """Write a made-up target and draft of real shapes: for measuring, not for reading."""
    require_packages("Writing GGUF files", "bench", "gguf")
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
    require_packages("A GPU", "gpu", "torch", "gguf")
    from draftree.bench.card import measure_card
    from draftree.bench.headline import headline
    from draftree.bench.record import make_record, write_record
    from draftree.bench.synth import identify_pair, write_pair

    with sentences(), progress() as say:
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
    with open_bench(model, threads, results, _say_skipped) as bench:
        _finish(bench.parity(tokens, exact_windows, peer_python or sys.executable))


@app.command()
def suite(
    model: Model = DEFAULT_MODEL,
    data: Data = None,
    prompts: PromptFile = None,
    limit: Limit = 10,
    n_gen: NGen = 128,
    draft: Draft = "auto",
    device: Device = "auto",
    threads: Threads = 0,
    results: Results = RESULTS,
) -> None:
    """Plain against speculative decoding: equal texts, speed-up, AL."""
    with open_bench(model, threads, results, _say_skipped) as bench:
        _finish(bench.suite(data or (), prompts, limit, n_gen, draft, device))


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
    from draftree.bench.context import DEPTHS

    with open_bench(model, threads, results, _say_skipped) as bench:
        _finish(bench.context(depth or DEPTHS, rounds, n_gen, draft, device))


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
    with open_bench(model, threads, results, _say_skipped) as bench:
        chosen = budget or ()
        _finish(bench.budget(chosen, data or (), prompts, limit, passes, n_gen, draft, device))


@app.command()
def overhead(
    model: Model = DEFAULT_MODEL,
    limit: Annotated[int, typer.Option(min=1, help="Most prompts.")] = 6,
    n_gen: NGen = 128,
    threads: Threads = 0,
    rounds: Rounds = 5,
    results: Results = RESULTS,
) -> None:
    """`draftree serve` beside an engine in this process, in turns."""
    with open_bench(model, threads, results, _say_skipped) as bench:
        _finish(bench.overhead(limit, rounds, n_gen))


@app.command()
def http(
    url: Annotated[
        str | None, typer.Argument(help="Base URL; without one, a server is started for MODEL.")
    ] = None,
    model: Annotated[
        str | None,
        typer.Option(
            "--model",
            "-m",
            help="The model's name there (the first if not given), or the one to start.",
            show_default=False,
        ),
    ] = None,
    clients: Annotated[
        list[int] | None,
        typer.Option(min=1, help="How many at a time; may be given several times. 1, 2, 4, 8."),
    ] = None,
    requests: Annotated[int, typer.Option(min=1, help="Requests of each client.")] = 3,
    n_gen: NGen = 64,
    api_key: Annotated[
        str | None, typer.Option(help="Key to send, or DRAFTREE_API_KEY.", show_default=False)
    ] = None,
    label: Annotated[
        str, typer.Option(help="Name of the result, if not the model's.", show_default=False)
    ] = "",
    threads: Threads = 0,
    results: Results = RESULTS,
) -> None:
    """Any OpenAI-compatible server: first token, gaps, tokens per second by clients."""
    counts = clients or [1, 2, 4, 8]
    if url is None:
        with open_bench(model or DEFAULT_MODEL, threads, results, _say_skipped) as bench:
            _finish(bench.http(counts, requests, n_gen))
        return
    from draftree.bench.http import Endpoint

    endpoint = Endpoint(url, model or "", api_key or next(iter(env.api_keys()), ""))
    with sentences(), progress() as say:
        _finish(measure_endpoint(endpoint, label, counts, requests, n_gen, results, say))


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
    with sentences():
        _finish(_write_pages(results, page, html, plots))


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
) -> None:
    """Everything, for the pages: takes about twelve minutes of a quiet machine."""
    lines: list[Line] = []
    skipped: list[str] = []

    def skip(sentence: str) -> None:
        _say_skipped(sentence)
        skipped.append(sentence)

    @contextmanager
    def skipping(what: str) -> Iterator[None]:
        """What cannot be had does not keep us from the rest."""
        try:
            with sentences():
                yield
        except DraftreeError as error:
            skip(f"{what}: {error}")

    for name in model or ALL_MODELS:
        with skipping(name), open_bench(name, threads, results, skip) as bench:
            kinds = _all_kinds(bench, rounds, tokens, peer_python or sys.executable)
            for kind, take in kinds.items():
                with skipping(f"{kind} of {name}"):
                    lines.append(take())
    written: dict[str, Any] = {}
    with skipping("plots"):
        written = _write_pages(results, page, None, plots=True)
    if not written:
        with sentences():
            written = _write_pages(results, page, None, plots=False)
    _finish({**written, "results": lines, "skipped": skipped})
    if not lines:
        raise DraftreeError("Nothing could be measured.")


def _all_kinds(
    bench: Bench, rounds: int, num_tokens: int, python: str
) -> dict[str, Callable[[], Line]]:
    """Every kind but the card's, with settings that keep the whole short."""
    few = min(rounds, 3)
    return {
        "peers": partial(bench.peers, rounds, python),
        "decode": partial(bench.alone, "decode", 2 * rounds),
        "prefill": partial(bench.alone, "prefill", few),
        "memory": partial(bench.alone, "memory", few),
        "start": partial(bench.alone, "start", rounds),
        "multiturn": partial(bench.alone, "multiturn", few),
        "suite": partial(bench.suite, (), None, 4, 96, "auto"),
        "context": partial(bench.context, (128, 512, 2048, 4096), 1, 32, "auto"),
        "budget": partial(bench.budget, (), (), None, 3, 2, 40, "auto"),
        "overhead": partial(bench.overhead, 3, few, 64),
        "http": partial(bench.http, (1, 2, 4), 1, 48),
        "parity": partial(bench.parity, num_tokens, min(4, num_tokens // 512), python),
    }


def _write_pages(results: Path, page: Path, html: Path | None, plots: bool) -> dict[str, Any]:
    from draftree.bench.html import make_html
    from draftree.bench.plot import draw_pictures, draw_plots
    from draftree.bench.report import make_page

    folder = page.parent / "plots"
    if plots:
        draw_plots(results, folder)
    names = sorted(path.name for path in folder.glob("*.png"))
    text = make_page(results, names)
    page.parent.mkdir(parents=True, exist_ok=True)
    page.write_text(text, encoding="utf-8")
    html = html or results / HTML
    pictures = draw_pictures(results) if plots else {}
    html.parent.mkdir(parents=True, exist_ok=True)
    html.write_text(make_html(make_page(results, pictures), pictures), encoding="utf-8")
    return {"page": str(page), "html": str(html), "plots": names}


def _finish(line: dict[str, Any]) -> None:
    import json

    print(json.dumps(line))
