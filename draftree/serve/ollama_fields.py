"""The requests of Ollama's API, field by field: what is honoured, refused, or without effect.

docs/http.md is generated from these models. Knows nothing of replies or of the engine.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from draftree.serve.openai_fields import MODEL_WORDS, ModelName, Tool
from draftree.serve.sampler_fields import SamplerFields, Zero
from draftree.serve.wire import Nothing, WireModel, ignored, optional, refused, returned

_LOADED = "The model was loaded when the server started."
_STAYS = "The model stays loaded."


class Options(SamplerFields):
    """And fields of its own."""

    num_predict: int | None = optional("Most tokens of a reply; 0 or less: the context's rest.")
    penalize_newline: Any = ignored("Penalties count all tokens.")
    num_ctx: Any = ignored("The context is as long as `--max-ctx` says.")
    num_keep: Any = ignored("Nothing of a prompt is dropped.")
    num_batch: Any = ignored(_LOADED)
    num_gpu: Any = ignored(_LOADED)
    main_gpu: Any = ignored(_LOADED)
    num_thread: Any = ignored(_LOADED)
    numa: Any = ignored(_LOADED)
    use_mmap: Any = ignored(_LOADED)
    use_mlock: Any = ignored(_LOADED)
    low_vram: Any = ignored(_LOADED)
    draft_num_predict: Any = ignored("The server chooses how much is drafted.")


class OllamaFunction(WireModel):
    name: str
    arguments: dict[str, Any]
    index: Any = returned()
    description: Any = returned()


class OllamaToolCall(WireModel):
    function: OllamaFunction
    id: str | None = optional("Names it for its result; made up if not given.")
    type: Any = returned()


class OllamaMessage(WireModel):
    role: Literal["system", "user", "assistant", "tool"]
    content: str | None = None
    thinking: str | None = optional("Passed to the model's template.")
    tool_calls: list[OllamaToolCall] | None = None
    tool_name: str | None = optional("Of a result: the function that it is of.")
    name: str | None = optional("Another name of tool_name.")
    tool_call_id: str | None = optional("Of a result: the call; the order counts if not given.")
    images: Nothing = refused("The model reads text.")


Format = Literal["json", ""] | dict[str, Any]
Think = bool | Literal["low", "medium", "high", "max"]


class OllamaRequest(WireModel):
    """What both ways of asking share."""

    model: ModelName = optional(MODEL_WORDS)
    stream: bool | None = optional("One JSON object a line as the text comes; true if not given.")
    format: Format | None = optional("`json`, or a JSON schema that the text then follows.")
    options: Options | None = optional("How tokens are chosen.")
    think: Think | None = optional(
        "Whether the model thinks first; `low` and `medium` end it after 1024 and 4096 tokens."
    )
    keep_alive: Any = ignored(_STAYS)
    truncate: Any = ignored("What is too long is refused; nothing is left out.")
    shift: Any = ignored("What is too long is refused; nothing is left out.")
    logprobs: Literal[False] | None = refused("Use POST /v1/chat/completions for them.")
    top_logprobs: Zero | None = refused("Use POST /v1/chat/completions for them.")


class OllamaChatRequest(OllamaRequest):
    """POST /api/chat"""

    messages: list[OllamaMessage] | None = optional(
        "Without any, the reply is that the model is loaded."
    )
    tools: list[Tool] | None = optional("Functions that the model may call.", max_length=512)


class OllamaGenerateRequest(OllamaRequest):
    """POST /api/generate"""

    prompt: str | None = optional("A message; without it, the reply is that the model is loaded.")
    system: str | None = optional("Instructions.")
    raw: bool | None = optional("Continue the prompt as it is, without a template.")
    suffix: Nothing = refused("Text is only continued, not filled in.")
    template: Nothing = refused("The model's own is used; or give raw.")
    context: Nothing = refused("Send the conversation to POST /api/chat.")
    images: Nothing = refused("The model reads text.")


class OllamaShowRequest(WireModel):
    """POST /api/show"""

    model: ModelName = optional(MODEL_WORDS)
    name: Any = ignored("The older name of model; there is one.")
    verbose: Any = ignored("There is nothing more to tell.")
    system: Nothing = refused("Nothing is changed here.")
    template: Nothing = refused("Nothing is changed here.")
    options: Any = ignored("Nothing is changed here.")


class OllamaEmbedRequest(WireModel):
    """POST /api/embed"""

    model: ModelName = optional(MODEL_WORDS)
    input: str | Annotated[list[str], Field(max_length=2048)] | None = optional("Texts.")
    prompt: str | None = optional("Of /api/embeddings, the older path: the only text.")
    truncate: bool | None = optional("False refuses texts that are too long, instead of cutting.")
    keep_alive: Any = ignored(_STAYS)
    options: Any = ignored("They belong to replies.")
    dimensions: Zero | None = refused("Vectors have the model's own length.")
