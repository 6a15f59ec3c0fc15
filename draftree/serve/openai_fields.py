"""The requests of the OpenAI API, field by field: what is honoured, its range, and what is refused.

docs/http.md is generated from these models. Knows nothing of replies or of the engine.
"""

from typing import Annotated, Any, Literal

from pydantic import Field, StringConstraints

from draftree.serve.wire import Nothing, WireModel, refused, returned

StopText = Annotated[str, StringConstraints(min_length=1, max_length=1000)]
Bias = Annotated[float, Field(ge=-100, le=100)]
TokenKey = Annotated[str, StringConstraints(pattern=r"^[0-9]{1,9}$")]
TokenId = Annotated[int, Field(ge=0, lt=2**31)]
ToolName = Annotated[str, StringConstraints(pattern=r"^[a-zA-Z0-9_.:-]{1,128}$")]
ReasoningEffort = Literal["none", "minimal", "low", "medium", "high", "xhigh"]


class StreamOptions(WireModel):
    include_usage: bool = Field(False, description="End the stream with a chunk of usage.")
    include_obfuscation: Literal[False] | None = Field(
        None, description="Only false: chunks are never padded."
    )


class StatisticsOptions(WireModel):
    stats: bool = Field(
        False,
        description="Add statistics to usage; a stream then ends with a chunk of usage. "
        "The header `X-Draftree-Stats: 1` does the same.",
    )


class StreamExtras(StatisticsOptions):
    rounds: bool = Field(
        False,
        description="Add events of the rounds: every tree, what was accepted, the bonus. Only with "
        "stream.",
    )


class SamplingFields(WireModel):
    """What chat and text completions share."""

    model: str = Field(max_length=1000, description="As /v1/models lists it; others are a 404.")
    stream: bool | None = Field(None, description="Send events as the text comes.")
    stream_options: StreamOptions | None = Field(None, description="Only with stream.")
    n: int | None = Field(
        None, ge=1, le=64, description="Replies; each runs as a request of its own."
    )
    temperature: float | None = Field(
        None, ge=0, le=2, description="0 is greedy; if not given, what the server was started with."
    )
    top_p: float | None = Field(None, ge=0, le=1, description="Nucleus sampling; 1 is off.")
    top_k: int | None = Field(
        None, ge=0, lt=2**31, description="Keep the k likeliest tokens; 0 is off."
    )
    min_p: float | None = Field(
        None, ge=0, lt=1, description="Drop tokens below this share of the likeliest; 0 is off."
    )
    repetition_penalty: float | None = Field(
        None, gt=0, le=10, description="Weaken every token seen so far by this factor; 1 is off."
    )
    presence_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted once from the logit of a token seen."
    )
    frequency_penalty: float | None = Field(
        None, ge=-2, le=2, description="Subtracted for each time that a token was seen."
    )
    logit_bias: dict[TokenKey, Bias] | None = Field(
        None,
        max_length=1024,
        description="Token ids to what is added to their logits; at most 1,024.",
    )
    seed: int | None = Field(
        None,
        ge=-(2**63),
        lt=2**63,
        description="The same seed gives the same text; random if not given.",
    )
    stop: StopText | Annotated[list[StopText], Field(max_length=64)] | None = Field(
        None, description="End before any of these texts."
    )
    user: str | None = Field(None, max_length=1000, description="Written to the log.")
    draftree: StreamExtras | None = Field(None, description="What only this server has.")


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
    index: int | None = Field(None, description="As in deltas; the list's own order counts.")


class AssistantMessage(WireModel):
    role: Literal["assistant"]
    content: Content | None = None
    reasoning_content: str | None = Field(None, description="Passed to the model's template.")
    tool_calls: list[MessageToolCall] | None = None
    name: Name = None
    refusal: str | None = Field(None, description="The text, if there is no content.")
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
    description: str | None = Field(None, description="Shown to the model.")
    parameters: dict[str, Any] | None = Field(None, description="A JSON schema of the arguments.")
    strict: bool | None = Field(
        None, description="True refuses schemas of which a part cannot be enforced."
    )


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
    description: str | None = Field(None, description="For your own use.")
    schema_: dict[str, Any] | None = Field(
        None, alias="schema", description="A JSON schema, enforced token by token; any JSON if not."
    )
    strict: bool | None = Field(None, description="The schema is enforced in any case.")


class JsonSchemaFormat(WireModel):
    type: Literal["json_schema"]
    json_schema: JsonSchema


ResponseFormatField = Annotated[
    TextFormat | JsonFormat | JsonSchemaFormat, Field(discriminator="type")
]


class TemplateOptions(WireModel):
    enable_thinking: bool | None = Field(None, description="Whether the model thinks first.")


class ChatRequest(SamplingFields):
    """POST /v1/chat/completions"""

    messages: list[Message] = Field(
        min_length=1, description="Roles system, developer, user, assistant, tool; text only."
    )
    max_completion_tokens: int | None = Field(
        None, ge=1, le=2**31, description="Most tokens of a reply; the rest of the context if not."
    )
    max_tokens: int | None = Field(
        None, ge=1, le=2**31, description="The older name of max_completion_tokens."
    )
    logprobs: bool | None = Field(None, description="Log-probabilities of the tokens.")
    top_logprobs: int | None = Field(
        None, ge=0, le=20, description="And of this many likeliest ones; needs logprobs."
    )
    response_format: ResponseFormatField | None = Field(
        None, description="`text`, `json_object` or `json_schema`."
    )
    tools: list[Tool] | None = Field(
        None, max_length=512, description="Functions that the model may call."
    )
    tool_choice: Literal["none", "auto", "required"] | NamedToolChoice | None = Field(
        None, description="Whether, or which, function is called; needs tools."
    )
    parallel_tool_calls: bool | None = Field(
        None, description="False ends the reply after its first call."
    )
    reasoning_effort: ReasoningEffort | None = Field(
        None,
        description="`none` turns thinking off; `minimal`, `low`, `medium` end it after 256, 1024, "
        "4096 tokens.",
    )
    thinking_budget: int | None = Field(
        None, ge=0, le=2**31, description="End thinking after this many tokens."
    )
    chat_template_kwargs: TemplateOptions | None = Field(
        None, description="Only `enable_thinking`."
    )
    metadata: dict[str, str] | None = Field(
        None, max_length=16, description="Belongs to stored replies; nothing is stored."
    )
    safety_identifier: str | None = Field(
        None, max_length=1000, description="Written to the log, as user."
    )
    prompt_cache_key: str | None = Field(
        None, max_length=1000, description="A hint; there is one cache, which finds by content."
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
    max_tokens: int | None = Field(
        None, ge=1, le=2**31, description="Most tokens of a reply; 16 if not given."
    )
    logprobs: int | None = Field(
        None, ge=0, le=20, description="Log-probabilities of the tokens and of the likeliest ones."
    )
    echo: bool | None = Field(None, description="Begin with the prompt; not with logprobs.")
    best_of: int | None = refused("Only the value of n: replies are not ranked.")
    suffix: Literal[""] | None = refused("Text is only continued, not filled in.")
