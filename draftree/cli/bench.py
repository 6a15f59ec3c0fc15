"""`draftree bench ...`: measure a model on this machine and write results/*.json.

Each command ends with one line of JSON on stdout; progress goes to stderr. What is measured, and
how, is in draftree/bench. What we measure to develop draftree is outside the package.
"""

import sys
from pathlib import Path
from typing import Annotated, Final, Literal

import typer

from draftree import env
from draftree.cli.measurement import (
    Measurement,
    finish,
    measure_endpoint,
    open_measurement,
    progress,
    say_skipped,
)
from draftree.cli.option import DEFAULT_MODEL
from draftree.errors import require_packages

RESULTS: Final = Path("results")

Model = Annotated[
    str, typer.Argument(metavar="MODEL", help="A name (see `draftree models`) or a GGUF file.")
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
LlamaBench = Annotated[
    Path | None,
    typer.Option(
        "--llama-bench",
        help="`llama-bench` of a llama.cpp that you built, to measure as well.",
        show_default=False,
    ),
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
Clients = Annotated[
    list[int] | None,
    typer.Option(min=1, help="How many at a time; may be given several times. 1, 2, 4, 8."),
]
Requests = Annotated[int, typer.Option(min=1, help="Requests of each client.")]

app = typer.Typer(help="Measure the speed of a model, of a GPU or of a server; write results.")


@app.command()
def suite(
    model: Model = DEFAULT_MODEL,
    data: Data = None,
    prompts: PromptFile = None,
    limit: Limit = 10,
    n_gen: NGen = 128,
    draft: Draft = "auto",
    device: Device = "auto",
    temperature: Annotated[float, typer.Option(min=0, help="0 is greedy.")] = 0.0,
    threads: Threads = 0,
    results: Results = RESULTS,
) -> None:
    """Plain against speculative decoding: equal texts, speed-up, AL."""
    with open_measurement(Measurement, model, threads, results, say_skipped) as bench:
        asked = data or (), prompts, limit, n_gen, draft, device
        finish(bench.texts("suite", *asked, temperature))


@app.command("draft")
def measure_draft(
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
    """A draft: AL by data, depth and temperature, chains against trees, cost of a round."""
    with open_measurement(Measurement, model, threads, results, say_skipped) as bench:
        finish(bench.texts("draft", data or (), prompts, limit, n_gen, draft, device))


@app.command()
def decode(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 0,
    rounds: Rounds = 10,
    results: Results = RESULTS,
) -> None:
    """Our decoding: by depth, and by tokens in a pass."""
    with open_measurement(Measurement, model, threads, results, say_skipped) as bench:
        finish(bench.decode(rounds))


@app.command()
def prefill(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 0,
    rounds: Rounds = 5,
    results: Results = RESULTS,
) -> None:
    """Our prefill, by length of the prompt."""
    with open_measurement(Measurement, model, threads, results, say_skipped) as bench:
        finish(bench.prefill(rounds))


@app.command()
def peers(
    model: Model = DEFAULT_MODEL,
    threads: Threads = 0,
    rounds: Rounds = 5,
    results: Results = RESULTS,
    peer_python: Python = None,
    llama_bench: LlamaBench = None,
) -> None:
    """Decode and prefill, ours and llama.cpp's in turns."""
    with open_measurement(Measurement, model, threads, results, say_skipped) as bench:
        finish(bench.peers(rounds, peer_python or sys.executable, llama_bench))


@app.command()
def gpu(
    folder: Annotated[Path, typer.Argument(help="Where the synthetic files are, or will be.")],
    shape: Annotated[str, typer.Option(help="27b, 27b-8, 0.8b, 0.8b-bf16 or tiny.")] = "27b",
    memory: Annotated[
        float, typer.Option(help="GiB that the arrays may take; 0 is all there is.")
    ] = 22.35,
    rounds: Rounds = 5,
    results: Results = RESULTS / "gpu",
    persistent: Annotated[
        bool,
        typer.Option(
            "--persistent", help="Short passes and rounds are one kernel each; slower so far."
        ),
    ] = False,
) -> None:
    """A GPU with synthetic weights: decoding, rounds, passes, prefill, depth, memory, energy,
    equality.
    """
    require_packages("A GPU", "gpu", "torch", "gguf")
    from draftree.bench.gpu import measure_gpu
    from draftree.bench.record import write_result
    from draftree.bench.synthetic import SHAPES, identify_pair, write_pair

    if shape not in SHAPES:
        raise typer.BadParameter(f"--shape is {shape!r}; it must be one of {', '.join(SHAPES)}.")
    with progress() as say:
        say("writing the files")
        pair = write_pair(shape, folder)
        settings = {"rounds": rounds, "memory": memory, "shape": shape}
        settings |= {"persistent": persistent}
        model = identify_pair(shape, pair[0])
        line = write_result(
            *(results, "gpu", model, settings),
            lambda: measure_gpu(*(pair, rounds, memory, say), persistent=persistent),
        )
    finish(line)


@app.command()
def http(
    url: Annotated[str, typer.Argument(help="Base URL of the server.")],
    model: Annotated[
        str,
        typer.Option(
            "--model",
            "-m",
            help="The model's name there; the first that is listed if not given.",
            show_default=False,
        ),
    ] = "",
    clients: Clients = None,
    requests: Requests = 3,
    n_gen: NGen = 64,
    api_key: Annotated[
        str | None, typer.Option(help="Key to send, or DRAFTREE_API_KEY.", show_default=False)
    ] = None,
    label: Annotated[
        str, typer.Option(help="Name of the result, if not the model's.", show_default=False)
    ] = "",
    results: Results = RESULTS,
) -> None:
    """Any OpenAI-compatible server: first token, gaps, tokens per second by clients."""
    from draftree.bench.http import Endpoint

    endpoint = Endpoint(url, model, api_key or next(iter(env.api_keys()), ""))
    with progress() as say:
        counts = clients or [1, 2, 4, 8]
        finish(measure_endpoint(endpoint, label, counts, requests, n_gen, results, say))


@app.command()
def agent(
    url: Annotated[str, typer.Argument(help="Base URL of the server.")],
    model: Annotated[
        str, typer.Option("--model", "-m", help="The model's name there.", show_default=False)
    ] = "",
    turns: Annotated[int, typer.Option(min=2, max=24, help="Turns of the session.")] = 24,
    n_gen: NGen = 48,
    pause: Annotated[float, typer.Option(min=0.0, help="Seconds that a tool takes.")] = 1.0,
    scale: Annotated[
        int, typer.Option(min=1, help="Factor on the files' length; 12 ends with 30,000 tokens.")
    ] = 1,
    api_key: Annotated[
        str | None, typer.Option(help="Key to send, or DRAFTREE_API_KEY.", show_default=False)
    ] = None,
    label: Annotated[
        str, typer.Option(help="Name of the result, if not the model's.", show_default=False)
    ] = "",
    results: Results = RESULTS,
) -> None:
    """A coding agent's session on a server: first token of each turn, beside a cold read."""
    from draftree.bench.agent import AgentOptions, measure_agent
    from draftree.bench.http import Endpoint
    from draftree.bench.record import name_model, write_result

    endpoint = Endpoint(url, model, api_key or next(iter(env.api_keys()), ""))
    options = AgentOptions(n_gen, pause, turns, scale)
    with progress() as say:
        found = endpoint.find_model()
        line = write_result(
            *(results, "agent", name_model(label or found), options.settings()),
            lambda: measure_agent(endpoint, found, options, say),
        )
    finish(line)
