"""The requests of the Anthropic API, field by field: what is honoured, its range, what is refused.

docs/http.md is generated from these models. Knows nothing of replies or of the engine.
"""

from typing import Annotated, Any, Literal

from pydantic import Field

from draftree.serve.openai_fields import MODEL_WORDS, ChatExtras, ModelName, ToolName
from draftree.serve.sampler_fields import StopText
from draftree.serve.wire import Nothing, WireModel, ignored, optional, refused, returned

_HINT = "A hint; there is one cache, which finds by content."


class CacheControl(WireModel):
    type: Literal["ephemeral"]
    ttl: Literal["5m", "1h"] | None = optional(_HINT)
    scope: str | None = optional(_HINT, max_length=100)


class TextBlock(WireModel):
    type: Literal["text"]
    text: str
    cache_control: CacheControl | None = optional(_HINT)
    citations: list[Any] | None = returned()
    parsed_output: Any = returned()


class ThinkingBlock(WireModel):
    type: Literal["thinking"]
    thinking: str = Field(description="Passed to the model's template.")
    signature: str | None = optional("Not checked: thinking is not signed here.")


class RedactedThinkingBlock(WireModel):
    type: Literal["redacted_thinking"]
    data: str = Field(description="Left out: only Anthropic can read it.")


class ToolUseBlock(WireModel):
    type: Literal["tool_use"]
    id: str
    name: str
    input: dict[str, Any]
    cache_control: CacheControl | None = optional(_HINT)
    caller: Any = returned()
    toolset_name: Nothing = refused("There are no toolsets here.")


class ToolResultBlock(WireModel):
    type: Literal["tool_result"]
    tool_use_id: str
    content: str | list[TextBlock] | None = None
    is_error: bool | None = optional("Shown to the model as `Error:`.")
    cache_control: CacheControl | None = optional(_HINT)
    toolset_name: Nothing = refused("There are no toolsets here.")


UserBlock = Annotated[TextBlock | ToolResultBlock, Field(discriminator="type")]
AssistantBlock = Annotated[
    TextBlock | ThinkingBlock | RedactedThinkingBlock | ToolUseBlock, Field(discriminator="type")
]


class UserTurn(WireModel):
    role: Literal["user"]
    content: str | list[UserBlock]


class AssistantTurn(WireModel):
    role: Literal["assistant"]
    content: str | list[AssistantBlock]
    id: Any = returned()
    type: Any = returned()
    model: Any = returned()
    stop_reason: Any = returned()
    stop_sequence: Any = returned()
    stop_details: Any = returned()
    usage: Any = returned()


class SystemTurn(WireModel):
    role: Literal["system"]
    content: str | list[TextBlock] = Field(
        description="After the first messages, shown to the model as the user's text."
    )


Turn = Annotated[UserTurn | AssistantTurn | SystemTurn, Field(discriminator="role")]


class ClientTool(WireModel):
    type: Literal["custom"] | None = optional("There are no tools of the server's.")
    name: ToolName
    input_schema: dict[str, Any] = Field(description="A JSON schema of the arguments.")
    description: str | None = None
    strict: bool | None = optional("Whether arguments must follow the schema.")
    cache_control: CacheControl | None = optional(_HINT)
    eager_input_streaming: Literal[True] | None = optional("Arguments are sent as they come.")
    allowed_callers: list[Literal["direct"]] | None = optional("The model.")
    defer_loading: Literal[False] | None = refused("All tools are shown to the model.")
    input_examples: Nothing = refused("Put examples into the description.")


class AutoChoice(WireModel):
    type: Literal["auto"]
    disable_parallel_tool_use: bool | None = optional("At most one call.")


class AnyChoice(WireModel):
    type: Literal["any"]
    disable_parallel_tool_use: bool | None = optional("Exactly one call.")


class ToolChoice(WireModel):
    type: Literal["tool"]
    name: ToolName
    disable_parallel_tool_use: bool | None = optional("Exactly one call.")


class NoChoice(WireModel):
    type: Literal["none"]


Choice = Annotated[AutoChoice | AnyChoice | ToolChoice | NoChoice, Field(discriminator="type")]
Display = Literal["summarized", "omitted"]


class ThinkingEnabled(WireModel):
    type: Literal["enabled"]
    budget_tokens: int = Field(
        ge=1, le=2**31, description="End thinking after this many tokens; below max_tokens."
    )
    display: Display | None = optional(
        "`omitted` leaves its text out; otherwise it is sent as it is."
    )


class ThinkingAdaptive(WireModel):
    type: Literal["adaptive"]
    display: Display | None = optional(
        "`omitted` leaves its text out; otherwise it is sent as it is."
    )


class ThinkingDisabled(WireModel):
    type: Literal["disabled"]


Thinking = Annotated[
    ThinkingEnabled | ThinkingAdaptive | ThinkingDisabled, Field(discriminator="type")
]


class JsonOutput(WireModel):
    type: Literal["json_schema"]
    schema_: dict[str, Any] = Field(alias="schema")


class OutputConfig(WireModel):
    effort: Literal["low", "medium", "high", "xhigh", "max"] | None = optional(
        "`low` and `medium` end thinking after 1024 and 4096 tokens."
    )
    format: JsonOutput | None = optional("A schema that the text then follows.")


class ClearThinking(WireModel):
    type: Literal["clear_thinking_20251015"]
    keep: Literal["all"] = Field(description="Nothing is cleared here.")


class ContextManagement(WireModel):
    edits: list[ClearThinking] | None = Field(None, max_length=8)


class PromptFields(WireModel):
    """What messages and their count share."""

    model: ModelName = optional(MODEL_WORDS)
    messages: list[Turn] = Field(
        min_length=1,
        description="Text, calls and their results. The reply goes on from a last message of the "
        "assistant's, which is text alone, and is not repeated in it.",
    )
    system: str | list[TextBlock] | None = optional(
        "Instructions. Lines at the beginning of a block that start with `x-anthropic-` and a "
        "colon (Claude Code's billing header, which differs in every request) are left out."
    )
    tools: list[ClientTool] | None = optional(
        "Tools of the client; there are none of the server's.", max_length=512
    )
    tool_choice: Choice | None = optional("`auto`, `any`, `tool` or `none`; needs tools.")
    thinking: Thinking | None = optional(
        "`enabled` needs a model that thinks; `adaptive`, as without the field, leaves "
        "it to the model."
    )
    output_config: OutputConfig | None = optional("Effort and format.")
    cache_control: Any = ignored(_HINT)
    context_management: ContextManagement | None = optional(
        "Only edits that keep everything: nothing is cleared here."
    )
    speed: Any = ignored("There is one speed.")
    user_profile_id: Any = ignored("There are no profiles here.")
    workspace_id: Any = ignored("There are no workspaces here.")


class RequestMetadata(WireModel):
    user_id: str | None = optional("Written to the log.", max_length=1000)


class MessagesRequest(PromptFields):
    """POST /v1/messages"""

    max_tokens: int = Field(ge=1, le=2**31, description="Most tokens of a reply.")
    stream: bool | None = optional("Send events as the text comes.")
    temperature: float | None = optional(
        "0 is greedy; if not given, what the server was started with.", ge=0, le=2
    )
    top_p: float | None = optional("Nucleus sampling; 1 is off.", ge=0, le=1)
    top_k: int | None = optional("Keep the k likeliest tokens; 0 and -1 are off.", ge=-1, lt=2**31)
    stop_sequences: list[StopText] | None = optional(
        "End before any of these texts; the reply says which.", max_length=64
    )
    metadata: RequestMetadata | None = optional("Who asks.")
    draftree: ChatExtras | None = optional("What only this server has.")
    service_tier: Any = ignored("There is one tier.")
    container: Nothing = refused("There are no containers here.")
    mcp_servers: Nothing = refused("Connect to them yourself, and pass their tools on.")
    inference_geo: Nothing = refused("This is where it runs.")
    diagnostics: Any = ignored("Ask for statistics instead.")
    compaction: Nothing = refused("Nothing is compacted here.")
    fallbacks: Nothing = refused("There is one model.")
    fallback_credit_token: Nothing = refused("There is one model.")
    thread: Nothing = refused("Nothing is stored here.")


class CountRequest(PromptFields):
    """POST /v1/messages/count_tokens"""
