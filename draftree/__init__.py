"""draftree runs GGUF language models faster by speculative decoding, with the same output.

The names below are imported when first used, so that `import draftree` costs nothing.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from draftree.chat import Delta, DeltaKind, Engine, FormatKind, Generation, ResponseFormat
    from draftree.core import FinishReason, SamplingParams, TokenSource, Usage
    from draftree.errors import DraftreeError

__version__ = "0.1.0"

__all__ = [
    "Delta",
    "DeltaKind",
    "DraftreeError",
    "Engine",
    "FinishReason",
    "FormatKind",
    "Generation",
    "ResponseFormat",
    "SamplingParams",
    "TokenSource",
    "Usage",
]

_HOMES: Final = (
    (
        "draftree.chat",
        ("Delta", "DeltaKind", "Engine", "FormatKind", "Generation", "ResponseFormat"),
    ),
    ("draftree.core", ("FinishReason", "SamplingParams", "TokenSource", "Usage")),
    ("draftree.errors", ("DraftreeError",)),
)


def __getattr__(name: str) -> Any:
    for module, names in _HOMES:
        if name in names:
            return getattr(import_module(module), name)
    raise AttributeError(f"module 'draftree' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, "__version__"])
