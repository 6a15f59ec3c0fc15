"""Tiny models bound to a sequence, for tests: golden files, and a qwen2 that is made on the
spot.
"""

import os
from collections.abc import Sequence
from functools import cache
from pathlib import Path

import numpy as np

from draftree.config import EngineConfig
from draftree.core import DraftTree
from draftree.engine.engine import TokenEngine
from draftree.kernels.cpu.ops import CpuOps
from draftree.kernels.cpu.thread_pool import ThreadPool
from draftree.kernels.quant.kv_format import KvFormat
from draftree.models.load import load_model
from draftree.models.target import Target
from draftree.state.sequence import Snapshot
from draftree.weights.file import open_checkpoint
from tests.golden import golden

MAX_CTX = 512
MAX_NODES = 65
# Where tests run in parallel, a second thread would wait for a core at every operation.
NUM_THREADS = 1 if "PYTEST_XDIST_WORKER" in os.environ else 2

FILES = {
    "llama": "dense/tiny-llama-A-F16.gguf",
    "llama-rs": "dense/tiny-llama-rs-F16.gguf",
    "qwen3": "dense/tiny-qwen3-A-F16.gguf",
    "qwen35": "qwen35/tiny-qwen35-A-mixed.gguf",
    "qwen35-mtp": "qwen35/tiny-qwen35-C-mtp-F16.gguf",
    "qwen35-q4": "qwen35/tiny-qwen35-A-mixed.gguf",  # for tests that run it with 8-bit rows
}
ARCHITECTURES = ("llama", "qwen2", "qwen3", "qwen35")


@cache
def pool(num_threads: int = NUM_THREADS) -> ThreadPool:
    return ThreadPool(num_threads)


def new_ops(
    *,
    exact: bool,
    num_threads: int = NUM_THREADS,
    kv_dtype: type[np.number] = np.float32,
    **formats: KvFormat,
) -> CpuOps:
    return CpuOps(
        pool(num_threads),
        max_tokens=MAX_CTX,
        max_nodes=MAX_NODES,
        max_ctx=MAX_CTX,
        exact=exact,
        kv_dtype=kv_dtype,
        **formats,
    )


def open_target(
    path: Path,
    *,
    exact: bool = True,
    feature_layers: tuple[int, ...] = (),
    num_threads: int = NUM_THREADS,
    kv_dtype: type[np.number] = np.float32,
    **formats: KvFormat,
) -> Target:
    """formats: key_format and value_format."""
    ops = new_ops(exact=exact, num_threads=num_threads, kv_dtype=kv_dtype, **formats)
    return Target(load_model(open_checkpoint(path), ops), ops, MAX_CTX, feature_layers)


def open_default(path: Path) -> TokenEngine:
    """With the settings that a user gets on a CPU; to be closed."""
    return TokenEngine.open(path, EngineConfig(device="cpu"))


def tiny_path(name: str) -> Path:
    return make_qwen2() if name == "qwen2" else golden(FILES[name])


@cache
def tiny_target(name: str, *, exact: bool = True) -> Target:
    """Shared between tests: reset the state before use."""
    return open_target(tiny_path(name), exact=exact)


def run_chain(target: Target, tokens: Sequence[int], chunk_len: int = 64) -> np.ndarray:
    """Commit the tokens in chunks; logits of every position."""
    logits = []
    for start in range(0, len(tokens), chunk_len):
        chunk = DraftTree.chain(tuple(int(t) for t in tokens[start : start + chunk_len]))
        target.state.begin(chunk, is_committed=True)
        logits.append(target.forward(range(chunk.num_nodes)).logits.copy())
        target.state.commit(range(chunk.num_nodes))
    return np.concatenate(logits)


def _by_position(tiles: np.ndarray) -> np.ndarray:
    heads, num_tiles, cells, width, cell_len = tiles.shape
    return tiles.swapaxes(2, 3).reshape(heads, num_tiles * width, cells * cell_len)


def same_state(a: Snapshot, b: Snapshot) -> bool:
    """The committed part only: what lies behind it in the last tile is not state."""
    length = len(a.tokens)
    if a.tokens != b.tokens:
        return False
    for left, right in zip(a.parts, b.parts, strict=True):
        for x, y in zip(map(np.asarray, left), map(np.asarray, right), strict=True):
            if x.ndim == 5:  # keys in tiles of 16 positions: [heads, tiles, cells, 16, cell_len]
                x, y = (_by_position(tiles)[:, :length] for tiles in (x, y))
            if not np.array_equal(x, y):
                return False
    return True


@cache
def make_qwen2() -> Path:
    """A random qwen2 file: biases on q, k and v, two key heads for four query heads, tied head."""
    import tempfile

    import gguf

    rng = np.random.default_rng(7)
    hidden, ffn, heads, kv_heads, head_dim, vocab = 64, 96, 4, 2, 16, 256
    path = Path(tempfile.mkdtemp()) / "tiny-qwen2.gguf"
    writer = gguf.GGUFWriter(path, "qwen2")
    writer.add_block_count(3)
    writer.add_context_length(2048)
    writer.add_embedding_length(hidden)
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(heads)
    writer.add_head_count_kv(kv_heads)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(1e6)

    def matrix(name: str, rows: int, cols: int) -> None:
        values = rng.standard_normal((rows, cols)) * 1.5 / np.sqrt(cols)
        writer.add_tensor(f"{name}.weight", values.astype(np.float32))

    def vector(name: str, length: int, mean: float) -> None:
        values = mean + 0.2 * rng.standard_normal(length)
        writer.add_tensor(name, values.astype(np.float32))

    matrix("token_embd", vocab, hidden)
    vector("output_norm.weight", hidden, 1.0)
    for i in range(3):
        prefix = f"blk.{i}"
        vector(f"{prefix}.attn_norm.weight", hidden, 1.0)
        vector(f"{prefix}.ffn_norm.weight", hidden, 1.0)
        for name, num_heads in (("q", heads), ("k", kv_heads), ("v", kv_heads)):
            matrix(f"{prefix}.attn_{name}", num_heads * head_dim, hidden)
            vector(f"{prefix}.attn_{name}.bias", num_heads * head_dim, 0.0)
        matrix(f"{prefix}.attn_output", hidden, heads * head_dim)
        matrix(f"{prefix}.ffn_gate", ffn, hidden)
        matrix(f"{prefix}.ffn_up", ffn, hidden)
        matrix(f"{prefix}.ffn_down", hidden, ffn)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
