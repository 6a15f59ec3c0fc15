"""The one place where text meets the engine: prompts or messages in, a stream of deltas out.

`Engine` is the public Python API. It resolves names to files, renders conversations, states what a
reply must look like as a grammar, and reads token events as text, reasoning and tool calls.
"""

from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np

from draftree.compress import Compressor
from draftree.config import EngineConfig, Plan
from draftree.core import FinishReason, Request, SamplingParams, TokenEvent, TokenSource, Usage
from draftree.engine.engine import Round, TokenEngine
from draftree.engine.locate import locate
from draftree.engine.stream import PAUSE, TokenStream
from draftree.engine.warm import Report
from draftree.errors import DraftreeError
from draftree.text.detokenize import Detokenizer
from draftree.text.grammar import FormatKind, ResponseFormat
from draftree.text.message import ReplyMessage
from draftree.text.reply import DeltaKind, ReplyPiece, ReplyReader
from draftree.text.tokenizer import Tokenizer
from draftree.text.tools.dialect import Message, ToolCallDelta
from draftree.text.turn import ReplyOptions, TurnPlanner

__all__ = [
    "Delta",
    "DeltaKind",
    "Engine",
    "FormatKind",
    "Generation",
    "Message",
    "ResponseFormat",
    "Round",
    "TokenLogprob",
    "ToolCallDelta",
]

_NUM_ENDED = 4  # conversations that are waited for together
_LEAST_OPENING = 16  # tokens; fewer are as soon read again
_REPLY = 8  # a prompt is shortened wherever it may be, to leave a reply an eighth of the context


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """A token of the reply's text with its log-probability; top: alternatives, best first."""

    token_id: int
    text: bytes
    logprob: float
    top: "tuple[TokenLogprob, ...]" = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece that can be shown; source tells who proposed the token that completed it."""

    text: str
    source: TokenSource
    round_index: int
    kind: DeltaKind = DeltaKind.TEXT
    tool_call: ToolCallDelta | None = None
    logprobs: tuple[TokenLogprob, ...] = ()  # of tokens whose text is complete with this piece


class Generation:
    """An iterator of Delta. Closing it cancels the request; afterwards usage and finish_reason
    are final. text holds what was said so far, without reasoning and calls.
    """

    def __init__(self, stream: TokenStream, detokenizer: Detokenizer, reader: ReplyReader) -> None:
        self.stream = stream  # of tokens, which another engine can go on from
        self._detokenizer, self._reader = detokenizer, reader
        self._logprobs: list[TokenLogprob] = []
        self._deltas = self._run()
        self.message = ReplyMessage()
        self.on_end: Callable[[], None] = lambda: None  # called when the whole reply was read
        self.finish_reason: FinishReason | None = None

    @property
    def usage(self) -> Usage:
        return self.stream.usage

    @property
    def text(self) -> str:
        return self.message.text

    def __iter__(self) -> Iterator[Delta]:
        return self._deltas

    def __next__(self) -> Delta:
        return next(self._deltas)

    def cancel(self) -> None:
        """End after the round that is being computed; any thread may ask for it."""
        self.stream.cancel()

    def watch_rounds(self, on_round: Callable[[], None]) -> None:
        """Have a function called each time that all deltas of a round have been read."""
        self.stream.on_round = on_round

    def watch_prompt(self, on_chunk: Callable[[], None]) -> None:
        """Have a function called each time that more of the prompt was read (usage.read_tokens)."""
        self.stream.on_chunk = on_chunk

    def pause_when(self, should_pause: Callable[[], bool]) -> None:
        """Ask this between two rounds, or chunks of the prompt; if so, a delta of the kind PAUSE
        comes, and until the next one is asked for, other replies may use the engine.
        """
        self.stream.should_pause = should_pause

    def watch_trees(self, watch: Callable[[Round], None]) -> None:
        """Have a function called with every round's tree, before its deltas; plain ones lack it."""
        self.stream.watch = watch

    def close(self) -> None:
        self._deltas.close()  # type: ignore[attr-defined]
        self.stream.close()
        self.finish_reason = self.finish_reason or self.stream.finish_reason

    def _run(self) -> Iterator[Delta]:
        event = None
        for each in self.stream:
            if each is PAUSE:
                yield Delta("", each.source, each.round_index, DeltaKind.PAUSE)
                continue
            event = each
            was_reasoning = self._reader.is_reasoning
            pieces = self._reader.push(self._detokenizer.push(event.token))
            if event.scores is not None:
                self._note(event)
            yield from self._show(pieces, event)
            if was_reasoning:
                self._logprobs.clear()
            if self._reader.is_stopped:
                self.stream.close()
                self.finish_reason = self._reason(FinishReason.STOP)
                return
        rest = self._reader.push(self._detokenizer.finish()) + self._reader.finish()
        if event is not None:
            yield from self._show(rest, event)
        reason = FinishReason.STOP if self._reader.is_stopped else self.stream.finish_reason
        self.finish_reason = self._reason(reason)
        if reason is not FinishReason.CANCELLED:
            self.on_end()

    def _show(self, pieces: list[ReplyPiece], event: TokenEvent) -> Iterator[Delta]:
        for piece in pieces:
            self.message.add(piece)
            logprobs = tuple(self._logprobs) if piece.kind is DeltaKind.TEXT else ()
            self._logprobs.clear()
            yield Delta(
                piece.text, event.source, event.round_index, piece.kind, piece.tool_call, logprobs
            )

    def _note(self, event: TokenEvent) -> None:
        assert event.scores is not None
        text_of = self._detokenizer.tokenizer.written_bytes
        top = tuple(TokenLogprob(i, text_of(i), value) for i, value in event.scores.top)
        logprob = event.scores.logprob
        self._logprobs.append(TokenLogprob(event.token, text_of(event.token), logprob, top))

    def _reason(self, reason: FinishReason | None) -> FinishReason | None:
        is_call = bool(self.message.calls) and reason is FinishReason.STOP
        return FinishReason.TOOL_CALLS if is_call else reason


class Engine:
    """A model that is ready to write: `for delta in Engine.open(name).complete("Once"): …`."""

    def __init__(self, tokens: TokenEngine, tokenizer: Tokenizer, name: str) -> None:
        self.tokens = tokens
        self.tokenizer = tokenizer
        self.name = name
        self._planner = TurnPlanner(tokenizer)
        # Conversations whose replies have been read, with what was asked, for read_ahead.
        self._ended: deque[tuple[list[Message], ReplyOptions]] = deque(maxlen=_NUM_ENDED)
        self._compressor = Compressor(tokens, tokenizer, tokens.config)
        self._compressor.warm_up()

    @classmethod
    def open(
        cls,
        model: str,
        config: EngineConfig | None = None,
        report: Report = lambda number, total: None,
        **options: Any,
    ) -> "Engine":
        """model: a catalogue name, a GGUF file, or a hub file. report: told how many kernels are
        compiled, and of how many. options are fields of EngineConfig.
        """
        settings = replace(config or EngineConfig(), **options)
        located = locate(model, settings.draft)
        metadata = located.checkpoint.metadata
        tokenizer = Tokenizer.from_metadata(metadata, settings.chat_template)
        tokens = TokenEngine(located.checkpoint, settings, located.draft_checkpoint, report)
        return cls(tokens, tokenizer, tokens.model_config.name)

    @property
    def plan(self) -> Plan:
        return self.tokens.plan

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    @property
    def can_think(self) -> bool:
        """Whether the model can be asked to reason before it answers."""
        return self._planner.can_think

    def prepare_chat(self) -> None:
        """Have template and grammars ready before the first conversation comes."""
        with suppress(DraftreeError):  # whoever sends a conversation will hear of it
            if self.has_template:
                self._planner.prepare()

    def close(self) -> None:
        self.tokens.close()

    def offload(self, should_stop: Callable[[], bool] = lambda: False) -> None:
        """Save the last conversation, so that others may come between its turns. For a moment in
        which nothing is asked, else when the next one begins. should_stop: asked before each file.
        """
        self.tokens.offload(should_stop)

    def read_ahead(self, should_stop: Callable[[], bool] = lambda: False) -> int:
        """Read the latest replies of `chat` again where the next prompt will not show them as they
        were written: a template writes calls its own way, and leaves reasoning out. For a moment in
        which nothing is asked; ends when should_stop says so. How many tokens were read.
        """
        num_read = 0
        while self._ended and not should_stop():
            messages, options = self._ended.popleft()
            with suppress(DraftreeError, ValueError):  # a template that takes no such answer
                ids = self._planner.foresee(messages, options)
                num_read += self.tokens.read_ahead(ids, should_stop)
        return num_read

    def _record_end(
        self, messages: Sequence[Message], options: ReplyOptions, generation: Generation
    ) -> None:
        """Clients send reasoning back or they do not: as they did, or else both ways."""
        replies = [message for message in messages if message["role"] == "assistant"]
        is_returned = any(message.get("reasoning_content") for message in replies)
        ways = {is_returned} if replies else {False, True}
        for has_reasoning in sorted(ways, reverse=True):
            reply = generation.message.write(has_reasoning=has_reasoning)
            if not has_reasoning or reply["reasoning_content"]:
                self._ended.append(([*messages, reply], options))

    def chat(
        self,
        messages: Sequence[Message],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        tool_choice: str | Mapping[str, Any] = "auto",
        parallel_tool_calls: bool = True,
        response_format: ResponseFormat | None = None,
        thinking: bool | None = None,
        thinking_budget: int | None = None,
        max_tokens: int = 512,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
        compress: str | None = None,
        compress_keep: float | str | None = None,
        continue_final: bool = False,
    ) -> Generation:
        """Answer a conversation. tool_choice: "auto", "none", "required" or a function's name in
        {"function": {"name": …}}. thinking: None leaves it to the model's template;
        thinking_budget: tokens of reasoning, then it is closed. compress, compress_keep: as in
        EngineConfig, for this reply. continue_final: go on from the last message, the assistant's.
        """
        wanted = tools or (), tool_choice, parallel_tool_calls
        options = ReplyOptions(*wanted, response_format, thinking, thinking_budget)
        begun, max_ctx = messages[-1:] if continue_final else (), self.plan.max_ctx
        asked = messages[: len(messages) - len(begun)], compress, compress_keep
        for has_room in (True, False):
            shorter, report = self._compressor.shorten(*asked, bool(tools), has_room)
            turn = self._planner.plan([*shorter, *begun], options, is_continued=continue_final)
            if not report or len(turn.prompt_ids) < max_ctx - min(max_tokens, max_ctx // _REPLY):
                break
        request = self._request(turn.prompt_ids, max_tokens, sampling, logit_bias, logprobs)
        request = self._mark_opening(request, messages, options)
        stream = self.tokens.generate(replace(request, grammar=turn.grammar))
        stream.usage.compression = report
        detokenizer = Detokenizer(self.tokenizer, is_continuation=continue_final)
        generation = Generation(stream, detokenizer, turn.new_reader(stop, request.sampling.seed))
        if not continue_final:  # clients send such a reply back in one piece, or in two
            generation.on_end = partial(self._record_end, shorter, options, generation)
        return generation

    def complete(
        self,
        prompt: str | Sequence[int],
        *,
        response_format: ResponseFormat | None = None,
        max_tokens: int = 512,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        logit_bias: Mapping[int, float] | None = None,
        logprobs: int | None = None,
    ) -> Generation:
        """Continue a text, given as such or as token ids."""
        if not prompt:
            raise ValueError("the prompt is empty")
        ids = self.tokenizer.encode(prompt) if isinstance(prompt, str) else prompt
        grammar = self._planner.constrain(response_format) if response_format else None
        request = self._request(ids, max_tokens, sampling, logit_bias, logprobs)
        detokenizer = Detokenizer(self.tokenizer, is_continuation=True)
        stream = self.tokens.generate(replace(request, grammar=grammar))
        return Generation(stream, detokenizer, ReplyReader(stop=stop))

    def generate(
        self,
        prompt: str | Sequence[Message],
        *,
        max_tokens: int = 512,
        sampling: SamplingParams | None = None,
        stop: Sequence[str] = (),
        system: str | None = None,
        chat: bool | None = None,
    ) -> Generation:
        """Continue a text, or answer it. Messages, a system text or chat=True go through the
        chat template. All that the model writes is text, reasoning and its tags included.
        """
        if isinstance(prompt, str) and not system and not chat:
            return self.complete(prompt, max_tokens=max_tokens, sampling=sampling, stop=stop)
        shorter, report = self._compressor.shorten(_conversation(prompt, system), has_room=False)
        ids = self._planner.encode(shorter, ReplyOptions())
        request = self._request(ids, max_tokens, sampling, None, None)
        stream = self.tokens.generate(self._mark_opening(request, shorter, ReplyOptions()))
        stream.usage.compression = report
        return Generation(stream, Detokenizer(self.tokenizer), ReplyReader(stop=stop))

    def embed(self, text: str | Sequence[int]) -> np.ndarray:
        """The mean of the model's last hidden states over a text, float32, of length one."""
        return self.tokens.embed(self.tokenizer.encode(text) if isinstance(text, str) else text)

    def encode_chat(
        self, prompt: str | Sequence[Message], system: str | None = None, **options: Any
    ) -> list[int]:
        """The token ids of a conversation that the model is to answer; options: of render_chat."""
        text = self.render_chat(_conversation(prompt, system), **options)
        return self.tokenizer.encode_chat(text)

    def render_chat(
        self, messages: Sequence[Message], *, continue_final: bool = False, **options: Any
    ) -> str:
        """The same as text. options: fields of ReplyOptions."""
        return self._planner.render(messages, ReplyOptions(**options), is_continued=continue_final)

    def _mark_opening(
        self, request: Request, messages: Sequence[Message], options: ReplyOptions
    ) -> Request:
        """Instructions and tools: a window does not hide them, and other conversations begin with
        them, which a recurrent state can come back to only where it was copied.
        """
        has_window, is_recurrent = bool(self.plan.window), self.tokens.target.state.is_recurrent
        if not has_window and not is_recurrent:
            return request
        length = self._planner.count_opening(request.prompt_ids, messages, options)
        points = (length,) if is_recurrent and length >= _LEAST_OPENING else ()
        return replace(request, sink_len=length if has_window else 0, cache_points=points)

    def _request(
        self,
        ids: Sequence[int],
        max_tokens: int,
        sampling: SamplingParams | None,
        logit_bias: Mapping[int, float] | None,
        logprobs: int | None,
    ) -> Request:
        return Request(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(),
            stop_ids=self.tokenizer.stop_ids,
            logit_bias=tuple((logit_bias or {}).items()),
            logprobs=logprobs,
        )


def _conversation(prompt: str | Sequence[Message], system: str | None) -> list[Message]:
    first: list[Message] = [{"role": "system", "content": system}] if system else []
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return [*first, *messages]
