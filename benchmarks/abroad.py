"""What other systems accept of an exported draft, beside a chain of as many tokens here.

In: a model with a draft, llama.cpp's `llama-speculative-simple`, and a Python with vLLM and the
target's folder. Out: a result file. Greedy; every system gets the same token ids or the text that
they come from. Only counts are compared: no time of a busy machine.
"""

import json
import re
import subprocess
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

from draftree.bench.dataset import Prompt
from draftree.bench.machine import describe_machine
from draftree.bench.record import identify_model
from draftree.bench.writing import encode_prompt, write_text
from draftree.chat import Engine
from draftree.config import EngineConfig
from draftree.drafts.export import export_draft
from draftree.errors import BenchError
from draftree.weights.file import open_checkpoint
from draftree.weights.hub import draft_for, resolve

BEGIN: Final = "<!-- counts, by `python -m benchmarks abroad` -->"
END: Final = "<!-- end of counts -->"
_MAX_CTX: Final = 1024
_COUNTS: Final = re.compile(r"n_(predict|drafted|accept)\s*=\s*(\d+)")
_LAST_CHARACTERS: Final = 300


@dataclass(frozen=True, slots=True)
class Abroad:
    """Counts over all prompts. A round gives what was accepted and one token of the target's."""

    system: str
    version: str
    num_prompts: int
    num_rounds: int
    num_accepted: int

    @property
    def acceptance_length(self) -> float:
        return round(1 + self.num_accepted / self.num_rounds, 3)


@dataclass(frozen=True, slots=True)
class Work:
    """What every system is given. block_size counts the anchor."""

    target: Path
    draft: Path
    ids: list[list[int]]
    texts: list[str]
    num_tokens: int
    block_size: int


def draft_here(engine: Engine, work: Work, name: str) -> Abroad:
    usages = [
        write_text(engine.tokens, ids, work.num_tokens, stop_ids=engine.tokenizer.stop_ids).usage
        for ids in work.ids
    ]
    num_rounds = sum(usage.rounds.num_rounds for usage in usages)
    num_accepted = sum(sum(usage.rounds.accepted_by_depth) for usage in usages)
    return Abroad(name, "", len(work.ids), num_rounds, num_accepted)


def draft_with_llama(program: Path, work: Work, out: Path) -> Abroad:
    """One process a prompt; it stops where the model ends its text."""
    export_draft(open_checkpoint(work.draft), open_checkpoint(work.target), "llama.cpp", out, "")
    counts = []
    for text in work.texts:
        command = [str(program), "-m", str(work.target), "-md", str(out), "--no-escape", "-p", text]
        command += ["--spec-type", "draft-dflash", "--spec-draft-n-max", str(work.block_size - 1)]
        command += ["-n", str(work.num_tokens), "--temp", "0", "-t", "1", "-c", str(_MAX_CTX)]
        counts.append(read_counts(_run(command)))
    version = _run([str(program), "--version"])
    found = re.search(r"version: .*", version)
    num_accepted = sum(accepted for _, accepted in counts)
    num_rounds = sum(predicted - accepted for predicted, accepted in counts)
    name = found.group() if found else ""
    return Abroad("llama.cpp", name, len(counts), num_rounds, num_accepted)


def read_counts(output: str) -> tuple[int, int]:
    """Tokens written and tokens accepted, as `llama-speculative-simple` says at its end."""
    found = {name: int(count) for name, count in _COUNTS.findall(output)}
    if not {"predict", "accept"} <= found.keys():
        raise BenchError(f"It did not say what was accepted: {output[-_LAST_CHARACTERS:]}")
    return found["predict"], found["accept"]


def draft_with_vllm(python: Path, folder: Path, work: Work, out: Path) -> Abroad:
    """folder: the target as vLLM loads it."""
    export_draft(open_checkpoint(work.draft), open_checkpoint(work.target), "vllm", out, "")
    script = str(files("benchmarks") / "abroad_vllm.py")
    given = {"model": str(folder), "draft": str(out), "max_ctx": _MAX_CTX, "ids": work.ids}
    given |= {"num_tokens": work.num_tokens, "num_drafted": work.block_size - 1}
    # -P: files beside the script have names of the standard library's modules.
    output = _run([str(python), "-P", script], json.dumps(given))
    # Workers go on talking when all is done.
    found = json.loads(next(line for line in output.splitlines() if line.startswith("{")))
    return Abroad(
        "vLLM", found["version"], len(work.ids), found["num_rounds"], found["num_accepted"]
    )


def _run(command: Sequence[str], given: str | None = None) -> str:
    """stdout and stderr; what is asked for is last on stdout."""
    try:
        result = subprocess.run(command, input=given, capture_output=True, text=True)
    except OSError as error:
        raise BenchError(f"{command[0]} could not be started: {error.strerror}.") from error
    if result.returncode != 0:
        said = (result.stderr.strip() or "it said nothing")[-_LAST_CHARACTERS:]
        raise BenchError(f"{command[0]} ended with status {result.returncode}: {said}")
    return f"{result.stderr}\n{result.stdout}"


def make_table(result: dict[str, Any]) -> str:
    """Markdown, for docs/scale.md."""
    lines = ["| | rounds | accepted | AL, tokens a round |", "|---|---|---|---|"]
    for run in result["runs"]:
        counts = f"{run['num_rounds']} | {run['num_accepted']}"
        lines.append(f"| {run['system']} | {counts} | {run['acceptance_length']:.2f} |")
    return "\n".join(lines)


def fill_page(text: str, result: dict[str, Any]) -> str:
    """docs/scale.md with its table made anew."""
    before, _, rest = text.partition(BEGIN)
    return f"{before}{BEGIN}\n{make_table(result)}\n{END}{rest.partition(END)[2]}"


def _chain(draft: Path, block_size: int) -> EngineConfig:
    """All that a block holds, one candidate a position."""
    budget = block_size - 1
    return EngineConfig(
        draft=str(draft), budget=budget, block=block_size, width=1, ngram="off", max_ctx=_MAX_CTX
    )


def write_abroad(
    model: str,
    prompts: Sequence[Prompt],
    num_tokens: int,
    out: Path,
    say: Callable[[str], None],
    *,
    llama: Path | None = None,
    vllm: tuple[Path, Path] | None = None,
) -> list[Abroad]:
    """vllm: its Python, and the target's folder. Of systems that are not asked for, the file keeps
    what it has.
    """
    target, draft = resolve(model), draft_for(model)
    if draft is None:
        raise BenchError(f"{model} has no draft.")
    block_size = int(open_checkpoint(draft).metadata["dflash.block_size"])
    chain = _chain(draft, block_size)
    result: dict[str, Any] = {
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(describe_machine()),
        "model": asdict(identify_model(target)),
        "draft": asdict(identify_model(draft)),
        "settings": {"num_tokens": num_tokens, "block_size": block_size, "budget": block_size - 1},
        "runs": json.loads(out.read_text(encoding="utf-8"))["runs"] if out.is_file() else [],
    }
    found: list[Abroad] = []

    def keep(run: Abroad) -> None:
        found.append(run)
        runs = [known for known in result["runs"] if known["system"] != run.system]
        runs.append(asdict(run) | {"acceptance_length": run.acceptance_length})
        result["runs"] = sorted(runs, key=lambda known: str(known["system"]))
        out.parent.mkdir(parents=True, exist_ok=True)
        out.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")

    with closing(Engine.open(model, chain)) as engine:
        ids = [encode_prompt(engine, prompt, num_tokens) for prompt in prompts]
        texts = [engine.tokenizer.decode(row) for row in ids]
        work = Work(target, draft, ids, texts, num_tokens, block_size)
        say("draftree")
        keep(draft_here(engine, work, "draftree"))
    with TemporaryDirectory() as scratch:
        say("draftree in float32, which is what vLLM computes in")
        folder = Path(scratch) / "float32"
        export_draft(open_checkpoint(draft), open_checkpoint(target), "vllm", folder, "")
        exact = replace(chain, draft=str(folder), math="exact")
        with closing(Engine.open(model, exact)) as engine:
            keep(draft_here(engine, work, "draftree, float32"))
        if llama is not None:
            say("llama.cpp")
            keep(draft_with_llama(llama, work, Path(scratch) / "draft.gguf"))
        if vllm is not None:
            say("vLLM")
            keep(draft_with_vllm(*vllm, work, Path(scratch) / "draft"))
    return found
