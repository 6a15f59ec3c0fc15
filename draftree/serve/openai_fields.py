"""The requests of the OpenAI API, field by field: what is honoured, its range, and what is refused.

docs/http.md is generated from these models. Knows nothing of replies or of the engine.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from draftree.serve.sampler_fields import UNUSED, SamplerFields, Zero
from draftree.serve.wire import Nothing, WireModel, ignored, optional, refused, returned
from draftree.text.grammar import FormatKind, ResponseFormat

ModelName = Annotated[str | None, Field(max_length=1000)]
TokenLimit = Annotated[int, Field(ge=-1, le=2**31)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
MODEL_WORDS = (
    "As /v1/models lists it; others as --any-model says. There is one, so it may be left out."
)
_CACHED = "Prompts are cached without being asked."
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class StreamOptions(WireModel):
    include_usage: bool = Field(
        False,
        description="End the stream with a chunk of usage. Without `stream_options`, the last "
        "chunk of a single reply has it.",
    )
    include_obfuscation: Literal[False] | None = optional("Only false: chunks are never padded.")


class StatisticsOptions(WireModel):
    stats: bool = Field(
        False,
        description="Add statistics to usage; a stream then ends with a chunk of usage. "
        "The header `X-Draftree-Stats: 1` does the same.",
    )


class ChatExtras(StatisticsOptions):
    compress: Literal["off", "auto", "always"] | None = optional(
        "Leave parts of long messages out that the question does not look at; if not given, what "
        "the server was started with."
    )
    compress_keep: Annotated[float, Field(gt=0, le=1)] | Literal["auto"] | None = optional(
        "Share of a long message that its scores keep."
    )


def compress_options(asked: ChatExtras | None) -> dict[str, Any]:
    """For Engine.chat; what was not given is left to it."""
    if asked is None:
        return {}
    given = {"compress": asked.compress, "compress_keep": asked.compress_keep}
    return {name: value for name, value in given.items() if value is not None}


class StreamExtras(StatisticsOptions):
    rounds: bool = Field(
        False,
        description="Add events of the rounds: every tree, what was accepted, the bonus. Only with "
        "stream.",
    )


class ChatStreamExtras(StreamExtras, ChatExtras):
    """Both."""


class PeerFields(SamplerFields):
    """What llama.cpp's server takes beside OpenAI's fields: honoured, or only where it is off, or
    without effect on the text.
    """

    n_predict: TokenLimit | None = optional("llama.cpp's name of max_tokens.")
    grammar: str | None = optional("A GBNF grammar that the text then follows.", max_length=2**16)
    json_schema: dict[str, Any] | None = optional("A JSON schema that the text then follows.")
    dynatemp_range: Zero | None = refused("Only 0, which is off.")
    xtc_probability: Zero | None = refused("Only 0, which is off.")
    dry_multiplier: Zero | None = refused("Only 0, which is off.")
    top_n_sigma: Annotated[float, Field(le=0)] | None = refused("Only -1 or 0, which is off.")
    n_probs: Zero | None = refused("Use logprobs.")
    ignore_eos: Literal[False] | None = refused("Replies end where the model ends them.")
    dynatemp_exponent: Any = ignored(UNUSED)
    xtc_threshold: Any = ignored(UNUSED)
    dry_base: Any = ignored(UNUSED)
    dry_allowed_length: Any = ignored(UNUSED)
    dry_penalty_last_n: Any = ignored(UNUSED)
    dry_sequence_breakers: Any = ignored(UNUSED)
    cache_prompt: Any = ignored(_CACHED)
    cache_control: Any = ignored(_CACHED)
    n_keep: Any = ignored("Nothing of a prompt is dropped.")
    id_slot: Any = ignored("Requests need no slot.")
    timings_per_token: bool | None = optional("Add llama.cpp's `timings` to what is sent.")
    verbose: bool | None = optional("Show the prompt of a whole chat reply in `__verbose`.")
    return_tokens: Any = ignored("Replies are text.")
    return_progress: bool | None = optional(
        "Say in a stream how much of the prompt was read, as `prompt_progress`."
    )


class SamplingFields(PeerFields):
    """What chat and text completions share."""

    model: ModelName = optional(MODEL_WORDS)
    stream: bool | None = optional("Send events as the text comes.")
    stream_options: StreamOptions | None = optional("Only with stream.")
    n: int | None = optional("Replies; each runs as a request of its own.", ge=1, le=64)
    repetition_penalty: float | None = optional("Another name of repeat_penalty.", gt=0, le=10)
    logit_bias: dict[TokenKey, Bias] | None = optional(
        "Token ids to what is added to their logits; at most 1,024.", max_length=1024
    )
    user: str | None = optional("Written to the log.", max_length=1000)
    draftree: StreamExtras | None = optional("What only this server has.")
    metadata: Any = ignored("Belongs to stored replies; nothing is stored.")
    store: Any = ignored("Nothing is stored here.")
    service_tier: Any = ignored("There is one tier.")
    safety_identifier: str | None = optional("Written to the log, as user.", max_length=1000)
    prompt_cache_key: Any = ignored("There is one cache, which finds by content.")
    prompt_cache_retention: Any = ignored("There is one cache.")
    prompt_cache_options: Any = ignored("There is one cache.")


class TextPart(WireModel):
    type: Literal["text"]
    text: str
    cache_control: Any = returned(_CACHED)


Content = str | list[TextPart]
Name = Annotated[str | None, Field(description="Passed to the model's template.")]


class SystemMessage(WireModel):
    role: Literal["system", "developer"] = Field(description="The two mean the same.")
    content: Content
    name: Name = None
    cache_control: Any = returned(_CACHED)


class UserMessage(WireModel):
    role: Literal["user"]
    content: Content
    name: Name = None
    cache_control: Any = returned(_CACHED)


class CalledFunction(WireModel):
    name: str
    arguments: str = Field(description="JSON text.")
    parsed_arguments: Any = returned()
    provider_specific_fields: Any = returned()


class MessageToolCall(WireModel):
    id: str
    type: Literal["function"] | None = None
    function: CalledFunction
    provider_specific_fields: Any = returned()
    caller: Any = returned()
    index: int | None = optional("As in deltas; the list's own order counts.")


class AssistantMessage(WireModel):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = optional("Passed to the model's template.")
    tool_calls: list[MessageToolCall] | None = None
    name: Name = None
    cache_control: Any = returned(_CACHED)
    refusal: str | None = optional("The text, if there is no content.")
    annotations: list[Any] | None = returned()
    parsed: Any = returned()
    thinking_blocks: list[Any] | None = returned("Not used: reasoning_content has the same.")
    reasoning_items: list[Any] | None = returned("Not used: reasoning_content has the same.")
    provider_specific_fields: Any = returned()
    audio: Nothing = refused("The model reads text.")
    images: Nothing = refused("The model reads text.")
    function_call: Nothing = refused("Use tool_calls.")


class ToolMessage(WireModel):
    role: Literal["tool"]
    content: Content
    tool_call_id: str
    name: Name = None
    cache_control: Any = returned(_CACHED)


Message = Annotated[
    SystemMessage | UserMessage | AssistantMessage | ToolMessage, Field(discriminator="role")
]


class FunctionDefinition(WireModel):
    name: ToolName
    description: str | None = optional("Shown to the model.")
    parameters: dict[str, Any] | None = optional("A JSON schema of the arguments.")
    strict: bool | None = optional("True refuses schemas of which a part cannot be enforced.")


class Tool(WireModel):
    type: Literal["function"]
    function: FunctionDefinition
    cache_control: Any = returned(_CACHED)


class ChosenFunction(WireModel):
    name: ToolName


class NamedToolChoice(WireModel):
    type: Literal["function"]
    function: ChosenFunction


class TextFormat(WireModel):
    type: Literal["text"]


class JsonFormat(WireModel):
    type: Literal["json_object"]
    schema_: dict[str, Any] | None = optional("As in json_schema; llama.cpp's way.", alias="schema")

    def read(self) -> ResponseFormat:
        if self.schema_ is None:
            return ResponseFormat(FormatKind.JSON_OBJECT)
        return ResponseFormat(FormatKind.JSON_SCHEMA, self.schema_)


class JsonSchema(WireModel):
    name: ToolName | None = optional("For your own use.")
    description: str | None = optional("For your own use.")
    schema_: dict[str, Any] | None = optional(
        "A JSON schema, enforced token by token; any JSON if not.", alias="schema"
    )
    strict: bool | None = optional("The schema is enforced in any case.")


class JsonSchemaFormat(WireModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormatField = Annotated[
    TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")
]


class TemplateOptions(WireModel):
    enable_thinking: bool | None = optional(
        "Whether the model thinks first; ignored where it cannot."
    )


class EffortOptions(WireModel):
    effort: ReasoningEffort | None = optional("The same as reasoning_effort.")


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions"""

    draftree: ChatStreamExtras | None = optional("What only this server has.")
    messages: list[Message] = Field(
        min_length=1, description="Roles system, developer, user, assistant, tool; text only."
    )
    continue_final_message: bool | None = optional(
        "Whether the reply goes on from the last message; if not given, where that is the "
        "assistant's."
    )
    add_generation_prompt: bool | None = optional("Only the opposite of continue_final_message.")
    max_completion_tokens: TokenLimit | None = optional(
        "Most tokens of a reply; the rest of the context if -1 or not given."
    )
    max_tokens: TokenLimit | None = optional("The older name of max_completion_tokens.")
    logprobs: bool | None = optional("Log-probabilities of the tokens.")
    top_logprobs: int | None = optional(
        "And of this many likeliest ones; needs logprobs.", ge=0, le=20
    )
    response_format: ResponseFormatField | None = optional(
        "`text`, `json_object` or `json_schema`."
    )
    tools: list[Tool] | None = optional("Functions that the model may call.", max_length=512)
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = optional(
        "Whether, or which, function is called; needs tools."
    )
    parallel_tool_calls: bool | None = optional("False ends the reply after its first call.")
    reasoning_effort: ReasoningEffort | None = optional(
        "`none` turns thinking off; `minimal`, `low`, `medium` end it after 256, 1024, 4096 tokens."
    )
    reasoning: EffortOptions | None = optional("As in responses: `effort` is reasoning_effort.")
    thinking_budget: int | None = optional("End thinking after this many tokens.", ge=0, le=2**31)
    chat_template_kwargs: TemplateOptions | None = optional("Only `enable_thinking`.")
    prediction: Any = ignored("Repetitions are predicted from the conversation by themselves.")
    modalities: list[Literal["text"]] | None = refused("The model writes text.")
    verbosity: Literal["medium"] | None = refused("Ask for it in a message instead.")
    audio: Nothing = refused("The model writes text.")
    functions: Nothing = refused("Use tools.")
    function_call: Nothing = refused("Use tool_choice.")
    moderation: Nothing = refused("There is no moderation here.")
    web_search_options: Nothing = refused("There is no search here; give the model a tool.")


class CompletionRequest(SamplingFields):
    """POST /v1/completions"""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        description="Text or token ids, or a list of either: each runs as a request of its own."
    )
    max_tokens: TokenLimit | None = optional(
        "Most tokens of a reply; 16 if not given, the rest of the context if -1."
    )
    logprobs: int | None = optional(
        "Log-probabilities of the tokens and of the likeliest ones.", ge=0, le=20
    )
    echo: bool | None = optional("Begin with the prompt; not with logprobs.")
    best_of: int | None = refused("Only the value of n: replies are not ranked.")
    suffix: Literal[""] | None = refused("Text is only continued, not filled in.")
