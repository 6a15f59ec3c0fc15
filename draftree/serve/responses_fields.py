"""The requests of OpenAI's Responses API, field by field: what is honoured, and what is refused.

docs/http.md is generated from these models. Knows nothing of replies or of the engine.
"""

from typing import Annotated, Any, Literal

from pydantic import Discriminator, Field, Tag

from draftree.serve.openai_fields import (
    MODEL_WORDS,
    ChatExtras,
    JsonFormat,
    ModelName,
    ReasoningEffort,
    TextFormat,
    ToolName,
)
from draftree.serve.wire import Nothing, WireModel, ignored, optional, refused, returned

_OWN = "Names it for the client; not used."
Status = Literal["in_progress", "completed", "incomplete"]


class InputText(WireModel):
    type: Literal["input_text", "output_text"]
    text: str
    annotations: list[Any] | None = returned()
    logprobs: list[Any] | None = returned()
    parsed: Any = returned()


class RefusalText(WireModel):
    type: Literal["refusal"]
    refusal: str = Field(description="Taken as text.")


class InputMessage(WireModel):
    type: Literal["message"] | None = None
    role: Literal["user", "assistant", "system", "developer"] = Field(
        description="The last two mean the same; past the beginning, they are shown as the user's."
    )
    content: str | list[Annotated[InputText | RefusalText, Field(discriminator="type")]]
    id: str | None = optional(_OWN)
    status: Status | None = optional(_OWN)
    phase: Literal["commentary", "final_answer"] | None = optional(_OWN)


class FunctionCall(WireModel):
    type: Literal["function_call"]
    call_id: str
    name: str
    arguments: str = Field(description="JSON text.")
    namespace: str | None = optional("Of the function, if it has one.")
    caller: Any = returned()
    created_by: Any = returned()
    parsed_arguments: Any = returned()
    id: str | None = optional(_OWN)
    status: Status | None = optional(_OWN)


class FunctionCallOutput(WireModel):
    type: Literal["function_call_output"]
    call_id: str
    output: str | list[InputText]
    caller: Any = returned()
    created_by: Any = returned()
    id: str | None = optional(_OWN)
    status: Status | None = optional(_OWN)


class ReasoningText(WireModel):
    type: Literal["reasoning_text"]
    text: str = Field(description="Passed to the model's template.")


class SummaryText(WireModel):
    type: Literal["summary_text"]
    text: str = Field(description="Left out: the reasoning itself is read.")


class ReasoningItem(WireModel):
    type: Literal["reasoning"]
    content: list[ReasoningText] | None = None
    summary: list[SummaryText] | None = None
    encrypted_content: str | None = optional("Left out: only OpenAI can read it.")
    id: str | None = optional(_OWN)
    status: Status | None = optional(_OWN)


def item_type(item: Any) -> Any:
    """Messages need not say that they are."""
    return item.get("type") or "message" if isinstance(item, dict) else "message"


Item = Annotated[
    Annotated[InputMessage, Tag("message")]
    | Annotated[FunctionCall, Tag("function_call")]
    | Annotated[FunctionCallOutput, Tag("function_call_output")]
    | Annotated[ReasoningItem, Tag("reasoning")],
    Discriminator(item_type),
]


class FunctionTool(WireModel):
    type: Literal["function"]
    name: ToolName
    description: str | None = optional("Shown to the model.")
    parameters: dict[str, Any] | None = optional("A JSON schema of the arguments.")
    strict: bool | None = optional("True refuses schemas of which a part cannot be enforced.")
    allowed_callers: list[Literal["direct"]] | None = optional("The model.")
    output_schema: dict[str, Any] | None = optional("Not used by calls.")
    defer_loading: Literal[False] | None = refused("All tools are shown to the model.")


class NamespaceTool(WireModel):
    type: Literal["namespace"]
    name: ToolName
    description: str | None = optional("Shown with each of its functions.")
    tools: list[FunctionTool] = Field(
        description="The model knows them as NAMESPACE.NAME; calls name the two apart."
    )


class WebSearchTool(WireModel):
    """Left out: the model does not learn of it. Codex lists it whether or not there is one."""

    __pydantic_extra__: dict[str, Any]
    type: Literal["web_search"] = Field(
        description="Left out, with all its members: there is no search here, but Codex lists it."
    )


ResponseTool = Annotated[FunctionTool | NamespaceTool | WebSearchTool, Field(discriminator="type")]


class FunctionChoice(WireModel):
    type: Literal["function"]
    name: ToolName
    namespace: ToolName | None = None


class SchemaFormat(WireModel):
    type: Literal["json_schema"]
    name: ToolName = Field(description="For your own use.")
    schema_: dict[str, Any] = Field(alias="schema", description="Enforced token by token.")
    description: str | None = optional("For your own use.")
    strict: bool | None = optional("The schema is enforced in any case.")


OutputFormat = Annotated[TextFormat | JsonFormat | SchemaFormat, Field(discriminator="type")]


class TextOptions(WireModel):
    format: OutputFormat | None = optional("What the text must look like.")
    verbosity: Literal["medium"] | None = refused("Ask for it in a message instead.")


class ReasoningOptions(WireModel):
    effort: ReasoningEffort | Literal["max"] | None = optional(
        "`none` turns thinking off; `minimal`, `low`, `medium` end it after 256, 1024, 4096 tokens."
    )
    summary: Literal["auto", "concise", "detailed"] | None = optional(
        "The reasoning itself is sent, and no summary."
    )
    generate_summary: Nothing = refused("Use summary.")
    context: Literal["auto"] | None = refused("The model's template decides.")
    mode: Literal["standard"] | None = refused("There is one mode.")


class EventOptions(WireModel):
    include_obfuscation: Literal[False] | None = optional("Only false: events are never padded.")


class ResponsesRequest(WireModel):
    """POST /v1/responses"""

    model: ModelName = optional(MODEL_WORDS)
    input: str | list[Item] = Field(
        min_length=1, description="Text, or messages, function calls, their outputs, reasoning."
    )
    instructions: str | None = optional("Comes first, as a system message.")
    stream: bool | None = optional("Send events as the text comes.")
    stream_options: EventOptions | None = optional("Only with stream.")
    max_output_tokens: int | None = optional(
        "Most tokens of a reply; the rest of the context if not.", ge=1, le=2**31
    )
    max_tokens: int | None = optional("Another name of max_output_tokens.", ge=1, le=2**31)
    temperature: float | None = optional(
        "0 is greedy; if not given, what the server was started with.", ge=0, le=2
    )
    top_p: float | None = optional("Nucleus sampling; 1 is off.", ge=0, le=1)
    top_logprobs: int | None = optional(
        "Likeliest tokens to list; needs include of logprobs.", ge=0, le=20
    )
    tools: list[ResponseTool] | None = optional(
        "Functions, alone or in namespaces.", max_length=512
    )
    tool_choice: Literal["none", "auto", "required"] | FunctionChoice | None = optional(
        "Whether, or which, function is called; needs tools."
    )
    parallel_tool_calls: bool | None = optional("False ends the reply after its first call.")
    text: TextOptions | None = optional("The format of the text.")
    reasoning: ReasoningOptions | None = optional("How long the model thinks.")
    include: list[Literal["reasoning.encrypted_content", "message.output_text.logprobs"]] | None = (
        optional("Log-probabilities; reasoning is always there, and never encrypted.")
    )
    metadata: dict[str, str] | None = optional("Repeated in the reply.", max_length=16)
    client_metadata: Any = ignored("What Codex says of itself.")
    user: str | None = optional("Written to the log.", max_length=1000)
    safety_identifier: str | None = optional("Written to the log, as user.", max_length=1000)
    prompt_cache_key: Any = ignored("There is one cache, which finds by content.")
    draftree: ChatExtras | None = optional("What only this server has.")
    store: Any = ignored("Nothing is stored here.")
    previous_response_id: Nothing = refused("Nothing is stored here; send the conversation again.")
    conversation: Nothing = refused("Nothing is stored here; send the conversation again.")
    background: Literal[False] | None = refused("Replies are sent to whoever waits for them.")
    service_tier: Any = ignored("There is one tier.")
    truncation: Any = ignored("What is too long is refused; nothing is left out.")
    prompt_cache_retention: Any = ignored("There is one cache.")
    prompt_cache_options: Any = ignored("There is one cache.")
    prompt: Nothing = refused("Nothing is stored here; send the text.")
    max_tool_calls: Any = ignored(
        "It counts calls of tools that run on the server; there are none."
    )
    context_management: Nothing = refused("Nothing is compacted here.")
    moderation: Nothing = refused("There is no moderation here.")
    access_programs: Nothing = refused("There are no programs here.")
    timings_per_token: bool | None = optional("Add llama.cpp's `timings` to what is sent.")
    return_progress: bool | None = optional(
        "Say in a stream how much of the prompt was read, as `prompt_progress`."
    )
    image: Nothing = refused("The model reads and writes text.")
