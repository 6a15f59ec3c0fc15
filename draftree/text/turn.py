"""Messages and what is asked of the reply to them -> a prompt, a grammar and a reader.

Chooses the tool dialect from the model's template, turns thinking on or off by the template's own
switches, and states formats and forced calls as one grammar over tokens. Knows no engine.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import takewhile
from typing import Any, NamedTuple

from draftree.core import TokenGrammar, common_prefix_len
from draftree.errors import GrammarError, TokenizerError
from draftree.text.constraint import CallTrigger, Reasoning, ReplyGrammar
from draftree.text.grammar import Cursor, GrammarCompiler, ResponseFormat, json_rule
from draftree.text.reply import ReplyReader
from draftree.text.segments import CLOSING, OPENING, Segments
from draftree.text.template import ChatTemplate, plain_content
from draftree.text.tokenizer import Tokenizer
from draftree.text.tools.choice import choose_dialect, lists_tools, spell_out
from draftree.text.tools.dialect import Message, Tool, ToolDialect, derive_call_ids, read_tools
from draftree.text.tools.schema import close_objects

_ANY_TOOL = {"type": "function", "function": {"name": "any", "parameters": {"type": "object"}}}
_LEADING_ROLES = ("system", "developer")
_ANY_WORDS = "0", "Yes"  # stand for what is not known yet: a prompt is certain up to there


@dataclass(frozen=True, slots=True)
class ReplyOptions:
    """What is asked of a reply. thinking: None leaves it to the template."""

    tools: Sequence[Mapping[str, Any]] = ()
    tool_choice: str | Mapping[str, Any] = "auto"
    is_parallel: bool = True  # more than one call may be made
    response_format: ResponseFormat | None = None
    thinking: bool | None = None
    thinking_budget: int | None = None


@dataclass(frozen=True, slots=True)
class Turn:
    """One reply to be written."""

    prompt: str
    prompt_ids: tuple[int, ...]
    grammar: TokenGrammar | None
    is_reasoning: bool  # the prompt has opened the reasoning
    calls: "CallPlan | None"
    is_continued: bool = False  # the reply goes on from the prompt's last message

    def new_reader(self, stop: Sequence[str] = (), seed: int = 0) -> ReplyReader:
        """seed: of the reply, which the ids of its calls depend on."""
        calls, parser = self.calls, None
        segments = Segments(is_reasoning=self.is_reasoning)
        if calls is not None:
            new_id = derive_call_ids(self.prompt, seed)
            parser = calls.dialect.new_parser(calls.tools, calls.is_trusted, new_id)
        return ReplyReader(
            segments=None if self.is_continued else segments,
            stop=stop,
            parser=parser,
            is_single=calls is not None and not calls.is_parallel,
            is_forced=calls is not None and calls.is_forced,
        )


@dataclass(frozen=True, slots=True)
class CallPlan:
    """Which calls a reply may hold."""

    dialect: ToolDialect
    tools: tuple[Tool, ...]
    is_forced: bool
    is_parallel: bool
    is_trusted: bool = False  # they follow a grammar


class _Prompt(NamedTuple):
    text: str
    is_open: bool  # it ends with the opening tag
    may_think: bool


class TurnPlanner:
    """What one model's tokenizer and template make of conversations."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiler = GrammarCompiler(tokenizer)
        self._template: ChatTemplate | None = None
        self._opening: tuple[str, tuple[int, ...]] = "", ()  # the last one that was counted

    @property
    def can_think(self) -> bool:
        template = self._tokenizer.chat_template or ""
        return OPENING in template or CLOSING in template

    def plan(
        self,
        messages: Sequence[Message],
        options: ReplyOptions | None = None,
        *,
        is_continued: bool = False,
    ) -> Turn:
        """is_continued: the last message is the beginning of the reply."""
        options = options or ReplyOptions()
        tools = read_tools(options.tools)
        calls = self._plan_calls(tools, options)
        prompt = self._write_prompt(messages, tools, calls, options, is_continued)
        reasoning = None
        if prompt.may_think or options.thinking_budget is not None:
            reasoning = Reasoning(prompt.is_open, options.thinking_budget)
        content = self._content(options.response_format, calls, prompt.may_think)
        if content is not None and is_continued:
            content = self._enter(content, plain_content(messages[-1].get("content")) or "")
        trigger = self._trigger(calls) if content is None else None
        grammar = None
        if content or trigger or options.thinking_budget is not None:
            grammar = ReplyGrammar(
                self._tokenizer, reasoning=reasoning, content=content, trigger=trigger
            )
        if calls and (content or trigger):
            calls = replace(calls, is_trusted=True)
        ids = self._tokenizer.encode_chat(prompt.text)
        return Turn(prompt.text, tuple(ids), grammar, prompt.is_open, calls, is_continued)

    def prepare(self) -> None:
        """What the first turns would wait for: a large vocabulary takes a grammar seconds."""
        messages: list[Message] = [{"role": "user", "content": "Hello"}]
        self.plan(messages)
        self.plan(messages, ReplyOptions((_ANY_TOOL,), "required"))

    def encode(self, messages: Sequence[Message], options: ReplyOptions) -> list[int]:
        """The prompt of the turn alone."""
        return self._tokenizer.encode_chat(self.render(messages, options))

    def render(
        self, messages: Sequence[Message], options: ReplyOptions, *, is_continued: bool = False
    ) -> str:
        """The same as text."""
        tools = read_tools(options.tools)
        calls = self._plan_calls(tools, options)
        return self._write_prompt(messages, tools, calls, options, is_continued).text

    def count_opening(
        self, prompt_ids: Sequence[int], messages: Sequence[Message], options: ReplyOptions
    ) -> int:
        """Tokens of the prompt that all conversations with its system messages and tools share."""
        first = [*takewhile(lambda message: message.get("role") in _LEADING_ROLES, messages)]
        key = repr((first, options.tools, options.tool_choice, options.thinking))
        if self._opening[0] != key:
            asked = ([*first, {"role": "user", "content": word}] for word in _ANY_WORDS)
            ids = [self.encode(each, options) for each in asked]
            self._opening = key, tuple(ids[0][: common_prefix_len(*map(tuple, ids))])
        return common_prefix_len(tuple(prompt_ids), self._opening[1])

    def foresee(self, messages: Sequence[Message], options: ReplyOptions) -> list[int]:
        """What the next prompt begins with, if it shows these messages as the template writes them
        then, the last of which is a reply, and results of its calls or the user's words follow.
        """
        calls = messages[-1].get("tool_calls") or ()
        words = [
            [{"role": "tool", "tool_call_id": call["id"], "content": word} for call in calls]
            or [{"role": "user", "content": word}]
            for word in _ANY_WORDS
        ]
        tools = read_tools(options.tools)
        plan = self._plan_calls(tools, options)
        prompts = (self._write_prompt([*messages, *each], tools, plan, options) for each in words)
        first, *others = (each.text for each in prompts)
        length = min(common_prefix_len(first, other) for other in others)
        return self._tokenizer.encode_chat(first[:length])[:-1]  # the last one may go on

    def constrain(self, response_format: ResponseFormat) -> TokenGrammar:
        """For a text that is continued without a conversation."""
        rules = f"start: content\n{response_format.write_rules('content')}"
        return ReplyGrammar(self._tokenizer, content=self._compiler.compile(rules))

    def _write_prompt(
        self,
        messages: Sequence[Message],
        tools: Sequence[Tool],
        calls: "CallPlan | None",
        options: ReplyOptions,
        is_continued: bool = False,
    ) -> "_Prompt":
        thinking, begun = options.thinking, ""
        if is_continued:
            *messages, last = messages
            begun = plain_content(last.get("content")) or ""
            if thinking:
                raise ValueError("a reply that has begun cannot think first")
            thinking = False if self.can_think else None
        if not messages:
            raise TokenizerError("There is no message to answer.")
        if thinking and not self.can_think:
            raise ValueError("thinking was asked for, but this model's template knows no reasoning")
        if options.thinking_budget is not None and options.thinking_budget < 0:
            raise ValueError("thinking_budget must be 0 or more")
        text = self._render(messages, tools if calls else (), thinking)
        has_content = options.response_format is not None or (calls is not None and calls.is_forced)
        if has_content and self._tokenizer.find(CLOSING) is None:
            thinking = False  # a format cannot begin right behind a tag of several tokens
        is_open = text.rstrip().endswith(OPENING)
        if is_open and thinking is False:
            text, is_open = f"{text.rstrip()}\n\n{CLOSING}\n\n", False
        is_closed = thinking is False or text.rstrip().endswith(CLOSING)
        return _Prompt(text + begun, is_open, may_think=self.can_think and not is_closed)

    def _plan_calls(self, tools: tuple[Tool, ...], options: ReplyOptions) -> CallPlan | None:
        wanted = options.tool_choice
        allowed, is_forced = tools, wanted == "required"
        if isinstance(wanted, Mapping):
            function = wanted.get("function", wanted)
            name = function.get("name") if isinstance(function, Mapping) else None
            allowed, is_forced = tuple(tool for tool in tools if tool.name == name), True
            if not allowed:
                raise ValueError(f"tool_choice names {name!r}, which is not among the tools")
        elif wanted not in ("auto", "none", "required"):
            raise ValueError('tool_choice must be "auto", "none", "required" or name a function')
        if is_forced and not tools:
            raise ValueError("tool_choice asks for a call, but there are no tools")
        if not tools or wanted == "none":
            return None
        return CallPlan(self._dialect(), allowed, is_forced, options.is_parallel)

    def _dialect(self) -> ToolDialect:
        has_tag = self._tokenizer.find("<tool_call>") is not None
        return choose_dialect(self._chat_template().source, has_tag)

    def _render(
        self, messages: Sequence[Message], tools: Sequence[Tool], thinking: bool | None
    ) -> str:
        template = self._chat_template()
        switches: dict[str, Any] = (
            {} if thinking is None else {"enable_thinking": thinking, "thinking": thinking}
        )
        if lists_tools(template.source):
            definitions = [tool.definition for tool in tools]
            return template.render(messages, tools=definitions, **switches)
        return template.render(spell_out(messages, tools, self._dialect()), **switches)

    def _content(
        self, response_format: ResponseFormat | None, calls: CallPlan | None, may_think: bool
    ) -> Cursor | None:
        """The grammar of all that follows the reasoning, if it is decided beforehand."""
        if response_format is None and (calls is None or not calls.is_forced):
            return None
        parts, rules = [], ""
        if calls is not None:
            parts.append("calls" if calls.is_parallel else "call")
            rules += calls.dialect.write_rules(calls.tools, self._schemas(calls.tools))
        if response_format is not None and not (calls and calls.is_forced):
            parts.append("content")
            rules += response_format.write_rules("content")
        # What a reply may begin with, and what readers do not see.
        lead = '" "? ' if self._tokenizer.prefixes_space else ""
        lead += r'"\n"? "\n"? ' if may_think else ""
        return self._compiler.compile(f"start: {lead}({' | '.join(parts)})\n{rules}")

    def _enter(self, content: Cursor, begun: str) -> Cursor:
        """The grammar behind a beginning that fits it; one that does not stands before the rest."""
        tokens = self._tokenizer.encode(
            begun, add_special=False, parse_special=False, starts_text=False
        )
        inside = content.copy()
        try:
            for token in tokens:
                inside.advance(token)
        except GrammarError:
            return content
        return inside

    def _trigger(self, calls: CallPlan | None) -> CallTrigger | None:
        """Text is free until a call begins, where that can be told by one token."""
        token = self._tokenizer.find(calls.dialect.opening) if calls else None
        if calls is None or token is None:
            return None
        rules = calls.dialect.write_rules(calls.tools, self._schemas(calls.tools))
        call = self._compiler.compile(f"start: call_body\n{rules}")
        return CallTrigger(token, call, is_single=not calls.is_parallel)

    def _schemas(self, tools: Sequence[Tool]) -> list[Mapping[str, Any]]:
        """Of arguments; what the grammar cannot state is left out, unless a tool is strict."""
        return [self._schema(tool) for tool in tools]

    def _schema(self, tool: Tool) -> Mapping[str, Any]:
        options = {} if tool.is_strict else {"x-guidance": {"lenient": True}}
        problem = ""
        for schema in (close_objects(tool.parameters), tool.parameters):
            try:
                self._compiler.compile(json_rule("start", {**schema, **options}))
                return {**schema, **options}
            except GrammarError as error:
                problem = str(error)
        if tool.is_strict:
            raise GrammarError(f"The parameters of the tool {tool.name!r}: {problem}")
        return {"type": "object"}

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate.for_tokenizer(self._tokenizer)
        return self._template
