"""Queries and keys before rotation in main memory, and the scores of a text by them."""

from typing import Any, cast

import numpy as np

from draftree.kernels.heads import CHUNK_LEN, POOL_LEN, QUERY_LEN, count_queries
from draftree.kernels.ops import Heads


class LayerHeads:
    """Of one attention layer. queries: [QUERY_LEN, heads, head_dim], of the last rows; keys: half
    floats [positions, kv_heads, head_dim].
    """

    def __init__(self, q: Heads, k: Heads, head_dim: int, max_ctx: int) -> None:
        """Where each pass leaves its rows."""
        self._rows, self._head_dim = (q, k), head_dim
        widths = [heads.x.shape[1] // head_dim for heads in (q, k)]
        self.queries = np.zeros((QUERY_LEN, widths[0], head_dim), np.float32)
        self.keys = np.zeros((max_ctx, widths[1], head_dim), np.float16)

    def collect(self, first: int, num_rows: int) -> None:
        last = max(num_rows - QUERY_LEN, 0)
        q, k = self._rows
        self.queries[last - num_rows :] = self._normed(q, last, num_rows)
        self.keys[first : first + num_rows] = self._normed(k, 0, num_rows)

    def _normed(self, heads: Heads, first: int, end: int) -> np.ndarray:
        x = cast(np.ndarray, heads.x)[first:end].reshape(end - first, -1, self._head_dim)
        if heads.norm is None:
            return x
        weight, eps = cast(Any, heads.norm)
        scale = np.sqrt(np.square(x).mean(axis=-1, keepdims=True) + np.float32(eps))
        return np.asarray(x / scale * weight, dtype=np.float32)

    def attend(self, num_queries: int, length: int) -> np.ndarray:
        """Weights of the last queries over what each sees: [heads * num_queries, length]."""
        queries, keys = self.queries[-num_queries:], self.keys[:length]
        kv_heads, dim = keys.shape[1:]
        grouped = queries.reshape(num_queries, kv_heads, -1, dim).transpose(1, 2, 0, 3)
        grouped = grouped.reshape(kv_heads, -1, dim) * np.float32(dim**-0.5)
        logits = grouped @ keys.astype(np.float32).transpose(1, 2, 0)
        logits = logits.reshape(-1, num_queries, length)
        later = np.arange(length) > np.arange(length - num_queries, length)[:, None]
        logits[:, later] = -np.inf
        weights = np.exp(logits - logits.max(axis=-1, keepdims=True))
        weights /= weights.sum(axis=-1, keepdims=True)
        return np.asarray(weights.reshape(-1, length))


class CpuHeads:
    def __init__(self, max_ctx: int) -> None:
        self.layers: list[LayerHeads] = []
        self._max_ctx = max_ctx

    def add_layer(self, q: Heads, k: Heads, head_dim: int) -> None:
        self.layers.append(LayerHeads(q, k, head_dim, self._max_ctx))

    def collect(self, first: int, num_rows: int) -> None:
        for layer in self.layers:
            layer.collect(first, num_rows)

    def score(self, num_text: int, length: int) -> np.ndarray:
        count = count_queries(num_text, length)
        best = np.zeros(num_text, np.float32)
        for layer in self.layers:
            np.maximum(best, layer.attend(count, length)[:, :num_text].max(axis=0), out=best)
        window = np.ones(POOL_LEN)
        smooth = np.convolve(best, window, "same") / np.convolve(np.ones(num_text), window, "same")
        starts = np.arange(0, num_text, CHUNK_LEN)
        counts = np.minimum(num_text - starts, CHUNK_LEN)
        means = np.add.reduceat(smooth, starts) / counts
        return np.asarray(num_text * means, dtype=np.float32)
