"""What synthetic models need to be spoken to: a tokenizer, a small model that scores, long texts.

In: the metadata of a real file, whose tokenizer is borrowed. Out: a tokenizer for all rows of a
model's head, a GGUF file in the shapes of a 0.6B model, prompts of a given number of tokens.
"""

import inspect
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import product
from pathlib import Path
from string import ascii_lowercase
from typing import Any, Final

from draftree.bench.synthetic import Tensor, write_file
from draftree.kernels.quant.formats import QuantType
from draftree.text.tokenizer import Tokenizer

_NORMAL: Final = 1  # a token's type
_QUESTION: Final = "Which of these functions closes the file?"


def extend_tokenizer(metadata: Mapping[str, Any], vocab_size: int) -> Tokenizer:
    """Rows of the head beyond the tokenizer's are words, so that every choice is a text."""
    tokens = list(metadata["tokenizer.ggml.tokens"])[:vocab_size]
    types = list(metadata["tokenizer.ggml.token_type"])[:vocab_size]
    known = set(tokens)
    letters = ("".join(word) for word in product(ascii_lowercase, repeat=5))
    words = (f"Ġ{word}" for word in letters if f"Ġ{word}" not in known)
    tokens += [next(words) for _ in range(vocab_size - len(tokens))]
    types += [_NORMAL] * (vocab_size - len(types))
    longer = {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": types}
    return Tokenizer.from_metadata({**metadata, **longer})


@dataclass(frozen=True, slots=True)
class DenseShape:
    """A dense model with norms of queries and keys, whose embedding is its head."""

    num_layers: int
    hidden: int
    ffn: int
    vocab: int
    heads: int
    kv_heads: int
    head_dim: int
    context: int = 40960


SCORERS: Final = {
    "27b": DenseShape(28, 1024, 3072, 151936, 16, 8, 128),
    "tiny": DenseShape(2, 256, 512, 49152, 4, 2, 64, 8192),
}


def write_scorer(shape: str, folder: Path, metadata: Mapping[str, Any]) -> Path:
    """A model that scores for a target of that shape; a file that is there already is kept.
    metadata: whose tokenizer it has.
    """
    path, dense = folder / f"synth-{shape}-scorer.gguf", SCORERS[shape]
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        fields: dict[str, Any] = {
            "block_count": dense.num_layers,
            "context_length": dense.context,
            "embedding_length": dense.hidden,
            "feed_forward_length": dense.ffn,
            "attention.head_count": dense.heads,
            "attention.head_count_kv": dense.kv_heads,
            "attention.key_length": dense.head_dim,
            "attention.value_length": dense.head_dim,
            "attention.layer_norm_rms_epsilon": 1e-6,
            "rope.freq_base": 1e6,
        }
        for key, value in metadata.items():
            if key.startswith("tokenizer."):
                fields[key] = value if isinstance(value, str | int | float) else list(value)
        write_file(path, "qwen3", fields, list(_dense_tensors(dense)), 2)
    return path


def _dense_tensors(d: DenseShape) -> Iterator[Tensor]:
    width, kv_width = d.heads * d.head_dim, d.kv_heads * d.head_dim
    yield Tensor("token_embd.weight", d.vocab, d.hidden, QuantType.Q6_K)
    yield Tensor("output_norm.weight", 1, d.hidden, QuantType.F32)
    for i in range(d.num_layers):
        blk = f"blk.{i}."
        for name, size in (
            *(("attn_norm", d.hidden), ("ffn_norm", d.hidden)),
            *(("attn_q_norm", d.head_dim), ("attn_k_norm", d.head_dim)),
        ):
            yield Tensor(f"{blk}{name}.weight", 1, size, QuantType.F32)
        for name, rows, cols in (
            *(("attn_q", width, d.hidden), ("attn_k", kv_width, d.hidden)),
            *(("attn_v", kv_width, d.hidden), ("attn_output", d.hidden, width)),
            *(("ffn_gate", d.ffn, d.hidden), ("ffn_up", d.ffn, d.hidden)),
            ("ffn_down", d.hidden, d.ffn),
        ):
            yield Tensor(f"{blk}{name}.weight", rows, cols, QuantType.Q4_K)


class LongTexts:
    """Prompts of sources of Python's own library, no two alike: each begins where the last one
    ended.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._pieces = self._read()

    def ids(self, num_tokens: int) -> tuple[int, ...]:
        found: list[int] = []
        while len(found) < num_tokens:
            found += self._tokenizer.encode(next(self._pieces))
        return tuple(found[:num_tokens])

    def question(self, num_tokens: int) -> str:
        """A text of about so many tokens, and a question about it."""
        pieces, count = [], 0
        while count < num_tokens:
            piece = next(self._pieces)
            count += len(self._tokenizer.encode(piece))
            pieces.append(piece)
        return "".join(pieces) + f"\n\n{_QUESTION}"

    @staticmethod
    def _read() -> Iterator[str]:
        """Forty lines at a time, of all files, again and again under other numbers."""
        folder, number = Path(inspect.__file__).parent, 0
        while True:
            number += 1
            for path in sorted(folder.glob("*.py")):
                lines = path.read_text(encoding="utf-8", errors="replace").splitlines()
                for start in range(0, len(lines), 40):
                    yield "\n".join((f"# {number}", *lines[start : start + 40], ""))
