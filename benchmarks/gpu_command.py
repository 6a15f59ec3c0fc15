"""Commands that measure a GPU."""

from dataclasses import asdict
from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.bench import RESULTS, Results
from draftree.cli.measurement import finish, progress


def gpu_kernels(out: Annotated[Path, typer.Argument(help="Result file.")]) -> None:
    """The GPU kernels one by one, in shapes of a 27B model."""
    import json

    from benchmarks.gpu_kernel import measure_kernels

    out.write_text(json.dumps(asdict(measure_kernels()), indent=1) + "\n", encoding="utf-8")


def gpu_depth(
    folder: Annotated[Path, typer.Argument(help="Where the synthetic files are, or will be.")],
    shape: Annotated[str, typer.Option(help="27b, 0.8b or tiny.")] = "27b",
    memory: Annotated[float, typer.Option(help="GiB that may be used.")] = 24.0,
    depth: Annotated[list[int] | None, typer.Option(help="May be given several times.")] = None,
    results: Results = RESULTS / "gpu",
) -> None:
    """Long texts on a GPU with synthetic weights, by format of keys and values."""
    from benchmarks.gpu_depth import DEPTHS as LONG
    from benchmarks.gpu_depth import measure_depths
    from draftree.bench.record import write_result
    from draftree.bench.synthetic import identify_pair, write_pair

    with progress() as say:
        say("writing the files")
        model = identify_pair(shape, write_pair(shape, folder)[0])
        settings = {"memory": memory, "shape": shape}
        depths = tuple(depth) if depth else LONG
        line = write_result(
            *(results, "gpu-depth", model, settings),
            lambda: measure_depths(shape, folder, memory, depths, say),
        )
    finish(line)
