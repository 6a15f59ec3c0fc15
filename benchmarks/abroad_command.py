"""The command that measures an exported draft in other systems."""

from pathlib import Path
from typing import Annotated

import typer

from draftree.cli.bench import RESULTS, Limit, Model, NGen, Results
from draftree.cli.measurement import finish, progress
from draftree.cli.option import DEFAULT_MODEL


def abroad(
    model: Model = DEFAULT_MODEL,
    data: Annotated[str, typer.Option(help="The set of prompts.")] = "own",
    limit: Limit = 10,
    n_gen: NGen = 96,
    llama: Annotated[Path | None, typer.Option(help="`llama-speculative-simple`.")] = None,
    vllm: Annotated[Path | None, typer.Option(help="A Python that has vLLM.")] = None,
    folder: Annotated[Path | None, typer.Option(help="The target as vLLM loads it.")] = None,
    results: Results = RESULTS / "draft" / "abroad",
    page: Annotated[Path | None, typer.Option(help="docs/scale.md, to renew its table.")] = None,
) -> None:
    """What llama.cpp and vLLM accept of the exported draft, beside draftree."""
    import json

    from benchmarks.abroad import fill_page, write_abroad
    from benchmarks.acceptance import load_set
    from draftree.env import cache_dir

    out = results / f"{Path(model).name.removesuffix('.gguf')}.json"
    prompts = load_set(data, limit, cache_dir() / "datasets")
    with progress() as say:
        pair = (vllm, folder) if vllm and folder else None
        runs = write_abroad(model, prompts, n_gen, out, say, llama=llama, vllm=pair)
    if page is not None:
        result = json.loads(out.read_text(encoding="utf-8"))
        page.write_text(fill_page(page.read_text(encoding="utf-8"), result), encoding="utf-8")
    finish({"file": str(out)} | {run.system: run.acceptance_length for run in runs})
