"""The requests of the OpenAI API, field by field: what is honoured, its range, and what is refused.

docs/http.md is generated from these models. Knows nothing of replies or of the engine.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from draftree.serve.wire import Nothing, WireModel, optional, refused, returned

StopText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class StreamOptions(WireModel):
    include_usage: bool = Field(False, description="End the stream with a chunk of usage.")
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


class SamplingFields(WireModel):
    """What chat and text completions share."""

    model: str = Field(max_length=1000, description="As /v1/models lists it; others are a 404.")
    stream: bool | None = optional("Send events as the text comes.")
    stream_options: StreamOptions | None = optional("Only with stream.")
    n: int | None = optional("Replies; each runs as a request of its own.", ge=1, le=64)
    temperature: float | None = optional(
        "0 is greedy; if not given, what the server was started with.", ge=0, le=2
    )
    top_p: float | None = optional("Nucleus sampling; 1 is off.", ge=0, le=1)
    top_k: int | None = optional("Keep the k likeliest tokens; 0 is off.", ge=0, lt=2**31)
    min_p: float | None = optional(
        "Drop tokens below this share of the likeliest; 0 is off.", ge=0, lt=1
    )
    repetition_penalty: float | None = optional(
        "Weaken every token seen so far by this factor; 1 is off.", gt=0, le=10
    )
    presence_penalty: float | None = optional(
        "Subtracted once from the logit of a token seen.", ge=-2, le=2
    )
    frequency_penalty: float | None = optional(
        "Subtracted for each time that a token was seen.", ge=-2, le=2
    )
    logit_bias: dict[TokenKey, Bias] | None = optional(
        "Token ids to what is added to their logits; at most 1,024.", max_length=1024
    )
    seed: int | None = optional(
        "The same seed gives the same text; random if not given.", ge=-(2**63), lt=2**63
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = optional(
        "End before any of these texts."
    )
    user: str | None = optional("Written to the log.", max_length=1000)
    draftree: StreamExtras | None = optional("What only this server has.")


class TextPart(WireModel):
    type: Literal["text"]
    text: str


Content = str | list[TextPart]
Name = Annotated[str | None, Field(description="Passed to the model's template.")]


class SystemMessage(WireModel):
    role: Literal["system", "developer"] = Field(description="The two mean the same.")
    content: Content
    name: Name = None


class UserMessage(WireModel):
    role: Literal["user"]
    content: Content
    name: Name = None


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


class ChosenFunction(WireModel):
    name: ToolName


class NamedToolChoice(WireModel):
    type: Literal["function"]
    function: ChosenFunction


class TextFormat(WireModel):
    type: Literal["text"]


class JsonFormat(WireModel):
    type: Literal["json_object"]


class JsonSchema(WireModel):
    name: ToolName = Field(description="For your own use.")
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
    enable_thinking: bool | None = optional("Whether the model thinks first.")


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions"""

    draftree: ChatStreamExtras | None = optional("What only this server has.")
    messages: list[Message] = Field(
        min_length=1, description="Roles system, developer, user, assistant, tool; text only."
    )
    max_completion_tokens: int | None = optional(
        "Most tokens of a reply; the rest of the context if not.", ge=1, le=2**31
    )
    max_tokens: int | None = optional("The older name of max_completion_tokens.", ge=1, le=2**31)
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
    thinking_budget: int | None = optional("End thinking after this many tokens.", ge=0, le=2**31)
    chat_template_kwargs: TemplateOptions | None = optional("Only `enable_thinking`.")
    metadata: dict[str, str] | None = optional(
        "Belongs to stored replies; nothing is stored.", max_length=16
    )
    safety_identifier: str | None = optional("Written to the log, as user.", max_length=1000)
    prompt_cache_key: str | None = optional(
        "A hint; there is one cache, which finds by content.", max_length=1000
    )
    store: Literal[False] | None = refused("Nothing is stored here; only false is taken.")
    service_tier: Literal["auto", "default"] | None = refused(
        "There is one tier; only auto and default are taken."
    )
    modalities: list[Literal["text"]] | None = refused("The model writes text.")
    verbosity: Literal["medium"] | None = refused("Ask for it in a message instead.")
    prompt_cache_retention: Literal["in_memory"] | None = refused("The cache is in memory.")
    prompt_cache_options: Nothing = refused("The cache needs no options.")
    audio: Nothing = refused("The model writes text.")
    functions: Nothing = refused("Use tools.")
    function_call: Nothing = refused("Use tool_choice.")
    prediction: Nothing = refused("Repetitions are predicted from the conversation by themselves.")
    moderation: Nothing = refused("There is no moderation here.")
    web_search_options: Nothing = refused("There is no search here; give the model a tool.")


class CompletionRequest(SamplingFields):
    """POST /v1/completions"""

    prompt: str | list[str] | list[TokenId] | list[list[TokenId]] = Field(
        description="Text or token ids, or a list of either: each runs as a request of its own.",
    )
    max_tokens: int | None = optional("Most tokens of a reply; 16 if not given.", ge=1, le=2**31)
    logprobs: int | None = optional(
        "Log-probabilities of the tokens and of the likeliest ones.", ge=0, le=20
    )
    echo: bool | None = optional("Begin with the prompt; not with logprobs.")
    best_of: int | None = refused("Only the value of n: replies are not ranked.")
    suffix: Literal[""] | None = refused("Text is only continued, not filled in.")
