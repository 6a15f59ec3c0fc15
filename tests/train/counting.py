"""A target that a draft can learn in seconds: it says the letters of a circle, one after the other.

The blocks of a tiny reference model, made quiet, under an embedding and a head that lead from each
letter to the next. The tokenizer is the reference model's.
"""

import tempfile
from functools import cache
from pathlib import Path

import gguf
import numpy as np

from draftree.kernels.quant.formats import dequantize
from draftree.weights.file import open_checkpoint
from tests.golden import golden

LETTERS = tuple(range(33, 57))  # ids of single bytes
HIDDEN, VOCABULARY = 128, 512
_QUIET = 0.05
_NUMBERS = ("eos_token_id", "padding_token_id")

CHAT = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
NEWLINE, END = 198, 510


@cache
def make_counting(*, has_chat: bool = False) -> Path:
    """has_chat: with a chat template; a message begins with any letter and may end after Y."""
    reference = open_checkpoint(golden("dense/tiny-llama-A-F16.gguf"))
    metadata = reference.metadata
    path = Path(tempfile.mkdtemp()) / "counting.gguf"
    writer = gguf.GGUFWriter(path, "llama")
    writer.add_name("Counting")
    for name in ("block_count", "context_length", "embedding_length", "feed_forward_length"):
        writer.add_uint32(f"llama.{name}", metadata[f"llama.{name}"])
    writer.add_head_count(metadata["llama.attention.head_count"])
    writer.add_head_count_kv(metadata["llama.attention.head_count_kv"])
    writer.add_layer_norm_rms_eps(metadata["llama.attention.layer_norm_rms_epsilon"])
    writer.add_rope_freq_base(metadata["llama.rope.freq_base"])
    writer.add_tokenizer_model(metadata["tokenizer.ggml.model"])
    writer.add_tokenizer_pre(metadata["tokenizer.ggml.pre"])
    writer.add_token_list(metadata["tokenizer.ggml.tokens"])
    writer.add_token_types(metadata["tokenizer.ggml.token_type"])
    writer.add_token_merges(metadata["tokenizer.ggml.merges"])
    for name in _NUMBERS:
        writer.add_uint32(f"tokenizer.ggml.{name}", metadata[f"tokenizer.ggml.{name}"])
    rng = np.random.default_rng(3)
    directions = np.linalg.qr(rng.standard_normal((HIDDEN, HIDDEN)))[0][: len(LETTERS)]
    embedding = 0.3 * rng.standard_normal((VOCABULARY, HIDDEN)) / np.sqrt(HIDDEN)
    head = 0.02 * rng.standard_normal((VOCABULARY, HIDDEN))
    embedding[list(LETTERS)] = directions
    head[list(LETTERS)] = np.roll(directions, 1, axis=0)
    if has_chat:
        writer.add_chat_template(CHAT)
        head[list(LETTERS)] += 0.7 * embedding[NEWLINE] / np.linalg.norm(embedding[NEWLINE])
        head[END] = directions[-1]
        head *= 4.0  # it hardly errs even when it is sampled
    for name, info in reference.tensors.items():
        values = dequantize(reference.raw(name), info.qtype).reshape(info.shape)
        if name == "token_embd.weight":
            values = embedding
        elif name == "output.weight":
            values = head
        elif name.endswith(("attn_output.weight", "ffn_down.weight")):
            values = _QUIET * values
        elif name == "output_norm.weight":
            values = np.ones(HIDDEN)
        writer.add_tensor(name, values.astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def next_letter(token: int) -> int:
    return LETTERS[(LETTERS.index(token) + 1) % len(LETTERS)]
