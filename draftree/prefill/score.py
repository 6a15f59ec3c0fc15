"""Which parts of a long text a question looks at: a score for every chunk of its tokens.

In: token ids of a text and of a question. Out: scores, higher for what should be kept. A model
reads both; its queries and keys are compared before they are rotated, so distance does not count.
"""

from collections.abc import Sequence
from typing import Any, Final, NamedTuple, Protocol, cast

import numpy as np

from draftree.kernels.ops import Array, Columns, HeadNorm, Heads, KvState, Ops, Rope
from draftree.models.model import Model
from draftree.models.target import Target
from draftree.prefill.chunked import prefill

CHUNK_LEN: Final = 32  # tokens that have one score
QUERY_LEN: Final = 8  # last positions of the question, which are the ones that ask
QUESTION_LEN: Final = 256  # of a longer question the end is read
WINDOW_LEN: Final = 4096  # tokens of text that are read together
_POOL_LEN: Final = 13
_BLOCK_LEN: Final = 2 * CHUNK_LEN  # tokens whose keys are averaged


class Scorer(Protocol):
    def score(self, text: Sequence[int], question: Sequence[int]) -> np.ndarray:
        """float32 [ceil(len(text) / CHUNK_LEN)]; only their order counts."""
        ...


class LayerHeads(NamedTuple):
    """Of one attention layer, as they are before they are rotated."""

    queries: np.ndarray  # [QUERY_LEN, num_heads, head_dim], of the last positions
    keys: np.ndarray  # [num_positions, num_kv_heads, head_dim], of all


class _Tapped(NamedTuple):
    """Where a recording leaves the queries or keys of one layer."""

    rows: Array
    norm: HeadNorm | None
    head_dim: int

    def read(self, ops: Ops, num_rows: int) -> np.ndarray:
        heads = np.array(ops.read(self.rows, num_rows)).reshape(num_rows, -1, self.head_dim)
        if self.norm is None:
            return heads
        weight = cast(Any, self.norm.weight)
        weight = weight if isinstance(weight, np.ndarray) else weight.cpu().numpy()
        scale = np.sqrt(np.square(heads).mean(axis=-1, keepdims=True) + self.norm.eps)
        return np.asarray(heads / scale * weight, dtype=np.float32)


class _TapOps:
    """A device's operations, which also copy what every attention layer asks and offers."""

    def __init__(self, ops: Ops) -> None:
        self._ops = ops
        self.layers: list[tuple[_Tapped, _Tapped]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._ops, name)

    def rope_and_store_kv(
        self, q: Heads | None, k: Heads, v: Array, cache: KvState, rope: Rope
    ) -> None:
        assert q is not None
        self.layers.append((self._copy(q, rope.head_dim), self._copy(k, rope.head_dim)))
        self._ops.rope_and_store_kv(q, k, v, cache, rope)

    def _copy(self, heads: Heads, head_dim: int) -> _Tapped:
        rows = self._ops.new_rows(heads.x.shape[1])
        self._ops.copy_columns(heads.x, Columns(rows, 0))
        return _Tapped(rows, heads.norm, head_dim)


class KeyReader:
    """A model that reads texts for their keys, over a sequence of its own."""

    def __init__(self, model: Model, ops: Ops, max_ctx: int, chunk_len: int) -> None:
        self.max_ctx = max_ctx
        self._ops, self._tap, self._chunk_len = ops, _TapOps(ops), chunk_len
        self._target = Target(model, cast(Ops, self._tap), max_ctx)

    def read(self, ids: Sequence[int]) -> list[LayerHeads]:
        """Layer by layer, from the first one that attends."""
        self._target.state.reset()
        keys: list[list[np.ndarray]] = [[] for _ in self._tap.layers]
        body, end = ids[:-QUERY_LEN], ids[-QUERY_LEN:]
        chunks = [body[i : i + self._chunk_len] for i in range(0, len(body), self._chunk_len)]
        for chunk in (*chunks, end):
            prefill(self._target, chunk, len(chunk))
            for found, (_, tapped) in zip(keys, self._tap.layers, strict=True):
                found.append(tapped.read(self._ops, len(chunk)).astype(np.float16))
        return [
            LayerHeads(tapped.read(self._ops, len(end)), np.concatenate(found))
            for found, (tapped, _) in zip(keys, self._tap.layers, strict=True)
        ]


class AttentionScorer:
    """What a model's heads attend to, from the end of the question."""

    def __init__(self, reader: KeyReader) -> None:
        self._reader = reader

    def score(self, text: Sequence[int], question: Sequence[int]) -> np.ndarray:
        return _score_windows(self._reader, text, question, score_attention)


class PooledKeyScorer:
    """How near the mean keys of short blocks are to what the end of the question asks for."""

    def __init__(self, reader: KeyReader) -> None:
        self._reader = reader

    def score(self, text: Sequence[int], question: Sequence[int]) -> np.ndarray:
        return _score_windows(self._reader, text, question, score_pooled_keys)


class _LayerScore(Protocol):
    def __call__(self, layers: Sequence[LayerHeads], num_text: int) -> np.ndarray: ...


def _score_windows(
    reader: KeyReader, text: Sequence[int], question: Sequence[int], score: _LayerScore
) -> np.ndarray:
    """A window begins a chunk early: its first tokens draw attention whatever they say."""
    asked = list(question[-QUESTION_LEN:])
    room = min(WINDOW_LEN, reader.max_ctx - len(asked)) // _BLOCK_LEN * _BLOCK_LEN
    assert room > _BLOCK_LEN, "the scoring model's context is too short"
    found: list[np.ndarray] = []
    start = 0
    while start < len(text):
        lead = _BLOCK_LEN if start else 0
        window = text[start - lead : start - lead + room]
        scores = score(reader.read([*window, *asked]), len(window))
        found.append(scores[lead // CHUNK_LEN :])
        start += len(window) - lead
    return np.concatenate(found).astype(np.float32)


def score_attention(layers: Sequence[LayerHeads], num_text: int) -> np.ndarray:
    """Softmax over all that a query sees, the largest of all heads of all layers, the mean of the
    queries, smoothed, and the mean of each chunk, in shares of an even spread.
    """
    best = np.zeros((len(layers[0].queries), num_text), dtype=np.float32)
    for queries, keys in layers:
        (num_queries, num_heads, dim), (length, kv_heads, _) = queries.shape, keys.shape
        grouped = queries.reshape(num_queries, kv_heads, -1, dim).transpose(1, 2, 0, 3)
        grouped = grouped.reshape(kv_heads, -1, dim) * np.float32(dim**-0.5)
        logits = grouped @ keys.astype(np.float32).transpose(1, 2, 0)
        logits = logits.reshape(num_heads, num_queries, length)
        later = np.arange(length) > np.arange(length - num_queries, length)[:, None]
        logits[:, later] = -np.inf
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        best = np.maximum(best, weights[..., :num_text].max(axis=0))
    window = np.ones(_POOL_LEN)
    counts = np.convolve(np.ones(num_text), window, "same")
    smooth = np.convolve(best.mean(axis=0), window, "same") / counts
    return num_text * _chunk_means(smooth, CHUNK_LEN)


def score_pooled_keys(layers: Sequence[LayerHeads], num_text: int) -> np.ndarray:
    """Cosines of queries and the mean keys of blocks, the largest of all heads, the mean of the
    queries and layers. What all keys share says nothing, and is taken off first.
    """
    total = np.zeros(-(-num_text // _BLOCK_LEN), dtype=np.float32)
    for queries, keys in layers:
        num_heads = queries.shape[1]
        text = keys[:num_text].astype(np.float32)
        pooled = _chunk_means(text - text.mean(axis=0), _BLOCK_LEN)  # [blocks, kv_heads, dim]
        pooled = np.repeat(_unit(pooled), num_heads // keys.shape[1], axis=1)
        cosines = np.einsum("qhd,bhd->qhb", _unit(queries), pooled)
        total += cosines.max(axis=1).mean(axis=0)
    scores = np.repeat(total / len(layers), _BLOCK_LEN // CHUNK_LEN)
    return np.asarray(scores[: -(-num_text // CHUNK_LEN)], dtype=np.float32)


def _unit(x: np.ndarray) -> np.ndarray:
    return np.asarray(x / np.maximum(np.linalg.norm(x, axis=-1, keepdims=True), 1e-9))


def _chunk_means(x: np.ndarray, length: int) -> np.ndarray:
    starts = np.arange(0, len(x), length)
    counts = np.minimum(len(x) - starts, length).reshape(-1, *[1] * (x.ndim - 1))
    return np.asarray(np.add.reduceat(x, starts, axis=0) / counts, dtype=np.float32)
