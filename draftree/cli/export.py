"""`draftree export`: a draft as vLLM, SGLang, speculators or llama.cpp load it. The path goes to
stdout, the command that uses it to stderr.
"""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

import typer

if TYPE_CHECKING:
    from draftree.weights.checkpoint import Checkpoint

System = Literal["vllm", "sglang", "speculators", "llama.cpp"]


def export(
    draft: Annotated[
        str,
        typer.Argument(
            metavar="DRAFT",
            help="A draft: a GGUF file, a folder or a name; or a model's name, for its draft.",
        ),
    ],
    out: Annotated[
        Path | None,
        typer.Argument(
            metavar="OUT", help="A new folder, or a GGUF file for llama.cpp; named by itself."
        ),
    ] = None,
    system: Annotated[System, typer.Option("--to", help="Who is to load it.")] = "vllm",
    target: Annotated[
        str | None,
        typer.Option(help="The draft's target, a GGUF file or a name; known drafts know theirs."),
    ] = None,
    target_name: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="What the other system loads the target by: org/name on the hub, or a path.",
        ),
    ] = None,
) -> None:
    """Write a draft in the form that another system loads. No weight changes."""
    from draftree.drafts.export import export_draft
    from draftree.errors import ModelError, require_packages
    from draftree.weights.hub import find_origin

    require_packages("Exporting a draft", "export", "gguf")
    draft_checkpoint, target_checkpoint, asked = _open_pair(draft, target)
    name = target_name or find_origin(asked)
    if name is None:
        if system == "speculators":
            raise ModelError(f"Say with --target-name what vLLM loads {asked} by, as org/name.")
        name = str(target_checkpoint.metadata.get("general.name") or asked)
    stem = Path(draft_checkpoint.path).name.removesuffix(".gguf")
    ending = ".gguf" if system == "llama.cpp" else ""
    path = out or Path(f"{stem}-{system}{ending}")
    export_draft(draft_checkpoint, target_checkpoint, system, path, name)
    block_size = int(draft_checkpoint.metadata["dflash.block_size"])
    loaded = str(target_checkpoint.path) if system == "llama.cpp" else name
    print(f"use it with: {describe_use(system, path, loaded, block_size)}", file=sys.stderr)
    print(path)


def _open_pair(draft: str, target: str | None) -> tuple["Checkpoint", "Checkpoint", str]:
    """Draft and target, and the name that the target was asked for by."""
    from draftree.drafts.registry import is_draft
    from draftree.errors import ModelError
    from draftree.weights.file import open_checkpoint
    from draftree.weights.hub import draft_for, resolve, target_of

    found = open_checkpoint(resolve(draft))
    if is_draft(found):
        known = target or target_of(draft)
        if known is None:
            raise ModelError(f"Which model {draft} drafts for is not known; say it with --target.")
        return found, open_checkpoint(resolve(known)), known
    path = draft_for(draft)
    if path is None:
        raise ModelError(f"{draft} is a model without a draft of its own; give a draft.")
    return open_checkpoint(path), found, draft


def describe_use(system: str, path: Path, target_name: str, block_size: int) -> str:
    """The other system's command."""
    num_tokens = block_size - 1
    match system:
        case "vllm":
            settings = {"method": "dflash", "model": str(path)}
            text = json.dumps({**settings, "num_speculative_tokens": num_tokens})
            return f"vllm serve {target_name} --speculative-config '{text}'"
        case "speculators":
            return f"vllm serve {path}"
        case "sglang":
            return (
                f"python -m sglang.launch_server --model-path {target_name} "
                f"--speculative-algorithm DFLASH --speculative-draft-model-path {path}"
            )
    return (
        f"llama-server -m {target_name} -md {path} "
        f"--spec-type draft-dflash --spec-draft-n-max {num_tokens}"
    )
