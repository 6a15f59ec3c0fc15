"""What a model file says about its tokens, checked: texts, kinds, special ids, end-of-turn ids.

In: GGUF metadata. Out: ids by text, and a Vocabulary that later code can use without further
checks. It does not know how text is split into tokens.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any

from draftree.errors import TokenizerError


class TokenType(IntEnum):
    """`tokenizer.ggml.token_type`."""

    NORMAL = 1
    UNKNOWN = 2
    CONTROL = 3
    USER_DEFINED = 4
    UNUSED = 5
    BYTE = 6


# Special tokens are hidden from readers; marked ones are found in text before it is split further.
SPECIAL_TYPES = frozenset((TokenType.UNKNOWN, TokenType.CONTROL))
MARKED_TYPES = SPECIAL_TYPES | {TokenType.USER_DEFINED}

END_OF_TURN = (
    *("<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end_of_text|>", "<|end|>"),
    *("<|return|>", "<|call|>", "<end_of_turn>", "<end_of_utterance>", "<EOT>", "[EOT]", "</s>"),
    "<｜end▁of▁sentence｜>",
)


# Readers of a reply need these, whatever a file calls them.
TAGS = ("<think>", "</think>", "<tool_call>", "</tool_call>")


@dataclass(frozen=True, slots=True)
class Vocabulary:
    """What is known about single tokens besides their texts."""

    num_tokens: int
    types: dict[int, TokenType]  # only the tokens that are not NORMAL
    bos_id: int | None
    eos_id: int | None
    unknown_id: int | None
    mask_id: int | None
    stop_ids: frozenset[int]

    def type_of(self, token_id: int) -> TokenType:
        return self.types.get(token_id, TokenType.NORMAL)


def read_ids(metadata: Mapping[str, Any]) -> dict[str, int]:
    """The tokens in their order, by their texts as the file spells them."""
    tokens = read_strings(metadata, "tokens")
    if not tokens:
        raise TokenizerError("The model file's vocabulary (tokenizer.ggml.tokens) is empty.")
    if "" in tokens:
        tokens = [text or f"[EMPTY_{token_id}]" for token_id, text in enumerate(tokens)]
    ids = dict(zip(tokens, range(len(tokens)), strict=True))
    if len(ids) != len(tokens):
        twice = next(text for token_id, text in enumerate(tokens) if ids[text] != token_id)
        raise TokenizerError(f"The model file's vocabulary holds the token {twice!r} twice.")
    return ids


def read_vocabulary(
    metadata: Mapping[str, Any], num_tokens: int, find: Callable[[str], int | None]
) -> Vocabulary:
    """find: the token that is spelled so."""
    types = _read_types(metadata, num_tokens)
    for text in TAGS:
        token_id = find(text)
        if token_id is not None and types.get(token_id) is TokenType.CONTROL:
            types[token_id] = TokenType.USER_DEFINED
    eos_id = read_id(metadata, "eos", num_tokens)
    ends = (eos_id, read_id(metadata, "eot", num_tokens), read_id(metadata, "eom", num_tokens))
    # Plain tokens that merely look like an end, such as markup's "</s>", are ordinary text.
    named = (i for i in map(find, END_OF_TURN) if i in types and types[i] in MARKED_TYPES)
    return Vocabulary(
        num_tokens=num_tokens,
        types=types,
        bos_id=read_id(metadata, "bos", num_tokens),
        eos_id=eos_id,
        unknown_id=read_id(metadata, "unknown", num_tokens),
        mask_id=read_id(metadata, "mask", num_tokens),
        stop_ids=frozenset(i for i in (*ends, *named) if i is not None),
    )


def read_strings(metadata: Mapping[str, Any], name: str) -> list[str]:
    """A list of strings that must be there."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        raise TokenizerError(f"The model file has no tokenizer.ggml.{name}; it is incomplete.")
    is_list = isinstance(values, Sequence) and not isinstance(values, str)
    strings = list(values) if is_list else []
    if not is_list or not set(map(type, strings)) <= {str}:
        raise TokenizerError(f"tokenizer.ggml.{name} in the model file is not a list of strings.")
    return strings


def read_numbers(metadata: Mapping[str, Any], name: str, length: int) -> list[Any] | None:
    """A list with one number a token, or None where the file has none."""
    values = metadata.get(f"tokenizer.ggml.{name}")
    if values is None:
        return None
    try:
        numbers = list(values)
        is_valid = set(map(type, numbers)) <= {int, float}
    except TypeError:
        is_valid = False
    if not is_valid:
        raise TokenizerError(f"tokenizer.ggml.{name} in the model file is not a list of numbers.")
    if len(numbers) != length:
        raise TokenizerError(
            f"tokenizer.ggml.{name} in the model file has {len(numbers)} entries "
            f"for {length} tokens; the file is damaged."
        )
    return numbers


def read_flag(metadata: Mapping[str, Any], name: str, default: bool) -> bool:
    value = metadata.get(f"tokenizer.ggml.{name}", default)
    if not isinstance(value, bool):
        raise TokenizerError(f"tokenizer.ggml.{name} in the model file is {value!r}, not a flag.")
    return value


def read_text(metadata: Mapping[str, Any], key: str) -> str | None:
    value = metadata.get(key)
    if value is not None and not isinstance(value, str):
        raise TokenizerError(f"{key} in the model file is not text.")
    return value


def read_id(metadata: Mapping[str, Any], name: str, num_tokens: int) -> int | None:
    """One special token's id, or None where the file names none."""
    key = f"tokenizer.ggml.{name}_token_id"
    value = metadata.get(key)
    if value is None:
        return None
    if not isinstance(value, int) or isinstance(value, bool):
        raise TokenizerError(f"{key} in the model file is {value!r}, not a token id.")
    if not 0 <= value < num_tokens:
        raise TokenizerError(
            f"{key} in the model file is {value}, but there are only {num_tokens} tokens."
        )
    return value


def _read_types(metadata: Mapping[str, Any], num_tokens: int) -> dict[int, TokenType]:
    numbers = read_numbers(metadata, "token_type", num_tokens)
    if numbers is None:
        return {}
    kinds = {int(kind): kind for kind in TokenType}
    normal = int(TokenType.NORMAL)  # comparing with the enumeration itself is slow
    others = [(token_id, kind) for token_id, kind in enumerate(numbers) if kind != normal]
    return {token_id: kinds.get(kind, TokenType.UNUSED) for token_id, kind in others}
