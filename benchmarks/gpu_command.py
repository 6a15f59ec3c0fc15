"""Commands that measure a GPU."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.llama_build import LlamaServer
from draftree.cli.bench import RESULTS, Device, Limit, NGen, Results, Threads
from draftree.cli.measurement import finish, progress

Part = Annotated[
    list[str] | None, typer.Option(help="A part; may be given several times. All if not given.")
]
LimitS = Annotated[float, typer.Option(help="Seconds after which no further part is begun.")]
Sets = Annotated[
    Path | None, typer.Option(help="Prompts, as `prompt-sets` writes them; else all data sets.")
]


def gpu_kernels(out: Annotated[Path, typer.Argument(help="Result file.")]) -> None:
    """The GPU kernels one by one, in shapes of a 27B model."""
    import json

    from benchmarks.gpu_kernel import measure_kernels

    out.write_text(json.dumps(asdict(measure_kernels()), indent=1) + "\n", encoding="utf-8")


def gpu_depth(
    folder: Annotated[Path, typer.Argument(help="Where the synthetic files are, or will be.")],
    shape: Annotated[str, typer.Option(help="27b, 27b-8, 0.8b, 0.8b-bf16 or tiny.")] = "27b",
    memory: Annotated[float, typer.Option(help="GiB that may be used.")] = 24.0,
    run: Annotated[
        list[str] | None,
        typer.Option(help="FORMAT, or FORMAT=DEPTH,DEPTH,…; may be given several times."),
    ] = None,
    limit_s: LimitS = 600.0,
    results: Results = RESULTS / "gpu",
) -> None:
    """Long texts on a GPU with synthetic weights, by format of keys and values. Formats that are
    not named stay as the same kernels measured them.
    """
    from benchmarks.gpu_depth import FORMATS, find_kept, measure_depths, read_runs
    from benchmarks.parts import Deadline
    from draftree.bench.machine import describe_machine
    from draftree.bench.record import write_result
    from draftree.bench.synthetic import identify_pair, write_pair

    with progress() as say:
        say("writing the files")
        model = identify_pair(shape, write_pair(shape, folder)[0])
        settings = {"memory": memory, "shape": shape}
        asked = read_runs(run or FORMATS)
        earlier = results / f"gpu-depth-{model.name}.json"
        kept = find_kept(earlier, asdict(describe_machine()), settings)
        line = write_result(
            *(results, "gpu-depth", model, settings),
            lambda: measure_depths(shape, folder, memory, asked, kept, Deadline(limit_s), say),
        )
    finish(line)


def gpu_phases(
    folder: Annotated[Path, typer.Argument(help="Where the synthetic files are, or will be.")],
    shape: Annotated[str, typer.Option(help="27b-8 (eight layers) or 0.8b.")] = "27b-8",
    results: Results = RESULTS / "gpu",
) -> None:
    """Where the time of a pass goes, as separate kernels and as one."""
    from benchmarks.gpu_phases import measure_phases
    from draftree.bench.record import write_result
    from draftree.bench.synthetic import identify_pair, write_pair
    from draftree.kernels.quant.formats import QuantType

    with progress() as say:
        target, _ = write_pair(shape, folder, draft_type=QuantType.Q4_K)
        line = write_result(
            *(results, "gpu-phases", identify_pair(shape, target), {"shape": shape}),
            lambda: measure_phases(shape, folder, say),
        )
    finish(line)


def prompt_sets(
    out: Annotated[Path, typer.Argument(help="File to write.")], limit: Limit = 5
) -> None:
    """The first prompts of every data set in one small file, for a machine without the network."""
    from benchmarks.gpu_writing import write_sets
    from draftree.env import cache_dir

    write_sets(out, cache_dir() / "datasets", limit)


def gpu_requests(
    model: Annotated[Path, typer.Argument(help="A GGUF file with a draft, or for `copy` any.")],
    part: Part = None,
    sets: Sets = None,
    limit: Limit = 4,
    n_gen: NGen = 96,
    limit_s: LimitS = 150.0,
    device: Device = "auto",
    results: Results = RESULTS / "gpu",
) -> None:
    """Requests of every kind beside free texts, budgets, lookup, the first request, copying."""
    from benchmarks import gpu_request, gpu_suite
    from benchmarks.gpu_writing import Bench, OpenEngines, read_sets
    from benchmarks.parts import Deadline, PartResult, choose_parts, run_parts
    from draftree.bench.record import identify_model
    from draftree.engine.gpu import find_gpu
    from draftree.env import cache_dir

    gpu = find_gpu(device)
    with progress() as say:
        deadline = Deadline(limit_s)
        prompts = read_sets(sets, cache_dir() / "datasets", limit)
        settings = {"num_tokens": n_gen, "limit": limit, "sets": sorted(prompts)}
        name = "CPU" if gpu is None else gpu.name
        result = PartResult(results, "gpu-requests", identify_model(model), settings, name)
        configs = gpu_request.CONFIGS | gpu_suite.CONFIGS
        with OpenEngines(model, device, configs, say) as engines:
            bench = Bench(engines, prompts, n_gen, deadline, say)
            known = {
                "kinds": lambda: gpu_request.measure_kinds(bench),
                "rounds": lambda: gpu_request.measure_rounds(bench),
                "first": lambda: gpu_request.measure_first(bench),
                "equal": lambda: gpu_suite.measure_equal(bench),
                "auto": lambda: gpu_suite.measure_auto(bench, 0.0),
                "auto, T = 0.8": lambda: gpu_suite.measure_auto(bench, 0.8),
                "lookup": lambda: gpu_suite.measure_lookup(bench),
                "limits": lambda: gpu_suite.measure_limits(bench),
                "copy": lambda: gpu_request.measure_copy(bench),
            }
            finish(run_parts(result, choose_parts(part or (), known), deadline, say))


def gpu_shapes(
    folder: Annotated[Path, typer.Argument(help="Where the synthetic files are, or will be.")],
    tokenizer: Annotated[Path, typer.Argument(help="A GGUF file whose tokenizer is borrowed.")],
    shape: Annotated[str, typer.Option(help="27b or tiny.")] = "27b",
    part: Part = None,
    memory: Annotated[float, typer.Option(help="GiB for compressed prompts.")] = 22.35,
    limit_s: LimitS = 240.0,
    results: Results = RESULTS / "gpu",
) -> None:
    """Grammars, several clients and long prompts with synthetic weights on a GPU."""
    from benchmarks.gpu_shape import ShapeBench, ShapeOptions, all_parts
    from benchmarks.parts import Deadline, PartResult, choose_parts, run_parts
    from draftree.bench.synthetic import identify_pair
    from draftree.engine.gpu import find_gpu
    from draftree.weights.file import open_checkpoint

    gpu = find_gpu("cuda")
    assert gpu is not None
    with progress() as say:
        options, deadline = ShapeOptions(shape, folder, memory), Deadline(limit_s)
        bench = ShapeBench(options, open_checkpoint(tokenizer).metadata, deadline, say)
        model = identify_pair(shape, bench.pair[0])
        result = PartResult(results, "gpu-shapes", model, options.settings(), gpu.name)
        try:
            parts = choose_parts(part or (), all_parts(bench))
            finish(run_parts(result, parts, deadline, say))
        finally:
            bench.close()


def gpu_agent(
    model: Annotated[Path, typer.Argument(help="A GGUF file.")],
    turns: Annotated[int, typer.Option(min=2, max=24, help="Turns of the session.")] = 24,
    n_gen: NGen = 48,
    pause: Annotated[float, typer.Option(min=0.0, help="Seconds that a tool takes.")] = 0.5,
    scale: Annotated[int, typer.Option(min=1, help="Length of the files.")] = 1,
    max_ctx: Annotated[int, typer.Option(min=1024, help="Of the server.")] = 8192,
    threads: Threads = 2,
    device: Device = "auto",
    llama_server: LlamaServer = None,
    results: Results = RESULTS / "gpu",
) -> None:
    """A coding agent's session on a server that is started for it: first tokens over cold reads."""
    from benchmarks.gpu_agent import AgentServer, measure_session
    from draftree.bench.agent import AgentOptions
    from draftree.bench.record import identify_model, write_result

    options = AgentOptions(n_gen, pause, turns, scale)
    server = AgentServer(model, threads, device, max_ctx, llama_server)
    with progress() as say:
        line = write_result(
            *(results, "agent", identify_model(model), options.settings()),
            lambda: measure_session(server, options, say),
        )
    finish(line)


COMMANDS: Final = (
    *(gpu_kernels, gpu_depth, gpu_phases, gpu_requests, gpu_shapes, gpu_agent, prompt_sets),
)
