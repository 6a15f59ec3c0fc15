"""The models that draftree knows by name, as catalogue.json lists them: what each is, its files,
where they come from.

Hashes are those of the publishers' own files, so a file may come from anywhere.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

from draftree.weights.source import HubSource, ModelFile, Source, WheelSource

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model by name. Sources are tried in order; a draft names the target it was trained for.
    is_usual: the draft that is downloaded with its target. origin: the hub's name of what the files
    were made from.
    """

    name: str
    summary: str
    files: tuple[ModelFile, ...]
    sources: tuple[Source, ...]
    target: str | None = None
    is_usual: bool = False
    origin: str | None = None

    @property
    def is_folder(self) -> bool:
        """Whether the model is opened as a folder instead of by its first file."""
        return any(file.name.endswith(".safetensors") for file in self.files)

    @property
    def num_bytes(self) -> int | None:
        """The size of all files, where every one is known."""
        total = 0
        for file in self.files:
            if file.num_bytes is None:
                return None
            total += file.num_bytes
        return total


# Drafts that may come with the package: the target's name, and a file of the folder draftree/data.
PACKAGED_DRAFTS = MappingProxyType(
    {
        DEFAULT_MODEL: "smollm2-135m-dflash.q4_1.gguf",
        "qwen2.5-coder-0.5b": "qwen2.5-coder-0.5b-dflash.q4_1.gguf",
    }
)


def _read_entry(entry: dict[str, Any]) -> ModelEntry:
    """A source with a repository is on the hub; the others are wheels."""
    files = tuple(ModelFile(**file) for file in entry.pop("files"))
    sources: list[Source] = [
        HubSource(source["repo"])
        if "repo" in source
        else WheelSource(tuple(source["requirements"]), source["member"])
        for source in entry.pop("sources")
    ]
    return ModelEntry(files=files, sources=tuple(sources), **entry)


_FILE = Path(__file__).with_name("catalogue.json")
CATALOGUE = tuple(map(_read_entry, json.loads(_FILE.read_text(encoding="utf-8"))))
