"""Messages -> the prompt text that a model was trained on, by the template in its own file.

Templates are data from strangers: they run in the sandbox, within limits of size and time.
It does not know about tokens: Tokenizer.encode_chat takes what comes out.
"""

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any, Self

from draftree.errors import TokenizerError
from draftree.text.meter import Meter
from draftree.text.named_template import CHATML
from draftree.text.tokenizer import Tokenizer

_MAX_SOURCE_LENGTH = 100_000
_BASE_SIZE = 16_000_000  # characters and list items that any template may make
_SIZE_PER_INPUT = 32  # and more for long conversations, a multiple of their size
_TIME_LIMIT_S = 5.0


class ChatTemplate:
    """One model's template, compiled. source: None or empty for ChatML."""

    def __init__(
        self, source: str | None, *, bos: str, eos: str, time_limit_s: float = _TIME_LIMIT_S
    ) -> None:
        from draftree.text.sandbox import compile_template

        self.source = source = source or CHATML
        if len(source) > _MAX_SOURCE_LENGTH:
            raise TokenizerError("The chat template is longer than 100,000 characters.")
        self._time_limit_s = time_limit_s
        self._special = {"bos_token": bos, "eos_token": eos}
        with _explained("The chat template cannot be used"):
            self._code = compile_template(source, Meter(_BASE_SIZE, time_limit_s))

    @classmethod
    def for_tokenizer(cls, tokenizer: Tokenizer) -> Self:
        """The template of the tokenizer's own file, or ChatML where it has none."""

        def text(token_id: int | None) -> str:
            return "" if token_id is None else tokenizer.token_bytes(token_id).decode()

        return cls(tokenizer.chat_template, bos=text(tokenizer.bos_id), eos=text(tokenizer.eos_id))

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        **variables: Any,
    ) -> str:
        """variables: what else the template understands, such as enable_thinking."""
        plain = [_plain_message(message) for message in messages]
        context = {
            **self._special,
            "documents": None,
            **variables,
            "messages": plain,
            "tools": list(tools) if tools else None,
            "add_generation_prompt": add_generation_prompt,
        }
        try:
            return self._render(context)
        except TokenizerError:
            if all(message["content"] is not None for message in plain):
                raise
        # Some templates test for missing content, others cannot take it.
        texts = [{**message, "content": message["content"] or ""} for message in plain]
        return self._render({**context, "messages": texts})

    def _render(self, context: dict[str, Any]) -> str:
        from draftree.text.sandbox import render_template

        with _explained("The chat template failed on this conversation"):
            meter = Meter(1 << 62, self._time_limit_s)
            meter.limit(_BASE_SIZE + _SIZE_PER_INPUT * meter.weigh(context))
            return "".join(render_template(self._code, meter, context))


@contextmanager
def _explained(sentence: str) -> Iterator[None]:
    """Turns whatever a template raises into a sentence."""
    try:
        yield
    except TokenizerError:
        raise
    except RecursionError:
        raise TokenizerError(f"{sentence}: it is nested too deeply.") from None
    except Exception as error:
        text = str(error).strip().rstrip(".") or type(error).__name__
        raise TokenizerError(f"{sentence}: {text}.") from error


def _plain_message(message: Mapping[str, Any]) -> dict[str, Any]:
    """A message as templates expect it: text content, tool arguments as objects."""
    plain = {**message, "content": plain_content(message.get("content"))}
    if message.get("tool_calls"):
        plain["tool_calls"] = [_plain_call(call) for call in message["tool_calls"]]
    return plain


def plain_content(content: Any, delimiter: str = "\n") -> str | None:
    if content is None or isinstance(content, str):
        return content
    return delimiter.join(_part_texts(content))


def _part_texts(parts: Any) -> Iterator[str]:
    if not isinstance(parts, Sequence):
        raise TokenizerError("A message's content must be text or a list of text parts.")
    for part in parts:
        if isinstance(part, str):
            yield part
        elif isinstance(part, Mapping) and isinstance(part.get("text"), str):
            yield part["text"]
        else:
            kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
            raise TokenizerError(f"This model reads text only; a message has a {kind!r} part.")


def _plain_call(call: Mapping[str, Any]) -> dict[str, Any]:
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("arguments"), str):
        return dict(call)
    try:
        arguments = json.loads(function["arguments"] or "{}")
    except (ValueError, RecursionError):  # the model wrote it; show it to the model as it was
        return dict(call)
    return {**call, "function": {**function, "arguments": arguments}}
