"""The one place where text meets the engine: prompts or messages in, a stream of text out.

`Engine` is the public Python API. It resolves names to files, renders chat templates, turns
token events into text that never splits a character, and applies stop strings.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from draftree.config import EngineConfig, Plan
from draftree.core import FinishReason, Request, SamplingParams, TokenSource, Usage
from draftree.engine.engine import TokenEngine, TokenStream
from draftree.engine.locate import locate
from draftree.errors import TokenizerError
from draftree.text.detokenize import Detokenizer, StopStrings
from draftree.text.template import ChatTemplate
from draftree.text.tokenizer import Tokenizer

Message = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Delta:
    """A piece of text that can be shown; source tells who proposed the token that completed it."""

    text: str
    source: TokenSource
    round_index: int


class Generation:
    """An iterator of Delta. Closing it cancels the request; afterwards usage and finish_reason
    are final.
    """

    def __init__(
        self, stream: TokenStream, detokenizer: Detokenizer, stop: Sequence[str] = ()
    ) -> None:
        self._stream = stream
        self._pieces = self._run(detokenizer, StopStrings(tuple(stop)))
        self.text = ""
        self.finish_reason: FinishReason | None = None

    @property
    def usage(self) -> Usage:
        return self._stream.usage

    def __iter__(self) -> Iterator[Delta]:
        return self._pieces

    def __next__(self) -> Delta:
        return next(self._pieces)

    def close(self) -> None:
        self._pieces.close()  # type: ignore[attr-defined]
        self._stream.close()
        self.finish_reason = self.finish_reason or self._stream.finish_reason

    def _run(self, detokenizer: Detokenizer, stops: StopStrings) -> Iterator[Delta]:
        event = None
        for event in self._stream:
            text, is_stopped = stops.push(detokenizer.push(event.token))
            if text:
                self.text += text
                yield Delta(text, event.source, event.round_index)
            if is_stopped:
                self._stream.close()
                self.finish_reason = FinishReason.STOP
                return
        text, is_stopped = stops.push(detokenizer.finish())
        text += "" if is_stopped else stops.finish()
        if text and event is not None:
            self.text += text
            yield Delta(text, event.source, event.round_index)
        self.finish_reason = FinishReason.STOP if is_stopped else self._stream.finish_reason


class Engine:
    """A model that is ready to write: `for delta in Engine.open(name).generate(prompt):
    print(delta.text)`.
    """

    def __init__(self, tokens: TokenEngine, tokenizer: Tokenizer, name: str) -> None:
        self.tokens = tokens
        self.tokenizer = tokenizer
        self.name = name
        self._template: ChatTemplate | None = None

    @classmethod
    def open(cls, model: str, config: EngineConfig | None = None, **options: Any) -> "Engine":
        """model: a catalogue name, a GGUF file, or a hub file. options are fields of
        EngineConfig.
        """
        settings = replace(config or EngineConfig(), **options)
        located = locate(model, settings.draft)
        tokenizer = Tokenizer.from_metadata(located.checkpoint.metadata)
        tokens = TokenEngine(located.checkpoint, settings, located.draft_checkpoint)
        return cls(tokens, tokenizer, tokens.facts.name)

    @property
    def plan(self) -> Plan:
        return self.tokens.plan

    @property
    def has_template(self) -> bool:
        return self.tokenizer.chat_template is not None

    def close(self) -> None:
        self.tokens.close()

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
        chat template.
        """
        is_raw = isinstance(prompt, str) and not system and not chat
        if is_raw:
            ids = self.tokenizer.encode(str(prompt))
            if not ids and self.tokenizer.bos_id is not None:
                ids = [self.tokenizer.bos_id]
        else:
            ids = self.encode_chat(prompt, system)
        request = Request(
            prompt_ids=tuple(ids),
            max_tokens=max_tokens,
            sampling=sampling or SamplingParams(),
            stop_ids=self.tokenizer.stop_ids,
        )
        detokenizer = Detokenizer(self.tokenizer, is_continuation=is_raw)
        return Generation(self.tokens.generate(request), detokenizer, stop)

    def encode_chat(self, prompt: str | Sequence[Message], system: str | None = None) -> list[int]:
        """The token ids of a conversation that the model is to answer."""
        messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else [*prompt]
        if system:
            messages = [{"role": "system", "content": system}, *messages]
        if not messages:
            raise TokenizerError("There is no message to answer.")
        text = self._chat_template().render(messages)
        return self.tokenizer.encode_chat(text)

    def _chat_template(self) -> ChatTemplate:
        if self._template is None:
            self._template = ChatTemplate.for_tokenizer(self.tokenizer)
        return self._template
