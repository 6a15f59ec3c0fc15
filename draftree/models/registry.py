"""Architecture string -> the file that builds it. A new model is one file and one line here."""

from collections.abc import Callable

from draftree.models import llama, qwen2, qwen3, qwen35
from draftree.models.model import Model

READERS: dict[str, Callable[..., Model]] = {
    "llama": llama.read_model,
    "qwen2": qwen2.read_model,
    "qwen3": qwen3.read_model,
    "qwen35": qwen35.read_model,
}
