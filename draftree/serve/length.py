"""Prompts that cannot fit, told from their length alone: tokenizing them could take a minute."""

from functools import lru_cache
from typing import TYPE_CHECKING, Any

from draftree.errors import CapacityError

if TYPE_CHECKING:
    from draftree.chat import Engine
    from draftree.text.tokenizer import Tokenizer


def check_length(engine: "Engine", num_characters: int) -> None:
    """num_characters: of the prompt's text, or of a part of it."""
    num_tokens = num_characters // longest_token(engine.tokenizer)
    if num_tokens > engine.plan.max_ctx:
        raise CapacityError(
            f"The prompt has {num_characters} characters, which are more than {num_tokens} tokens, "
            f"but the context was planned for {engine.plan.max_ctx}; "
            "start with a larger --max-ctx or shorten the prompt.",
            num_tokens,
        )


def count_characters(value: Any) -> int:
    """Of all texts in a JSON value; names of members do not count."""
    if isinstance(value, str):
        return len(value)
    members = value.values() if isinstance(value, dict) else value
    return sum(map(count_characters, members)) if isinstance(value, dict | list) else 0


@lru_cache(maxsize=1)
def longest_token(tokenizer: "Tokenizer") -> int:
    """In bytes, and so in characters at most."""
    return max(1, *(len(tokenizer.token_bytes(token)) for token in range(tokenizer.vocab_size)))
