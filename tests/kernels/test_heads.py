"""Scores of a text by the queries and keys of some layers, beside plain loops."""

import numpy as np
import pytest

from draftree.kernels.cpu.heads import CpuHeads
from draftree.kernels.heads import CHUNK_LEN, QUERY_LEN
from draftree.kernels.ops import HeadNorm, Heads

NUM_HEADS, KV_HEADS, DIM = 6, 2, 16


def make_heads(num_layers: int, num_rows: int) -> CpuHeads:
    """Layers with norms and without, after a pass."""
    store, rng = CpuHeads(num_rows), np.random.default_rng(num_rows)
    for layer in range(num_layers):
        norms = [HeadNorm(rng.random(DIM, np.float32) + 0.5, 1e-6) if layer % 2 else None] * 2
        rows = [rng.normal(size=(num_rows, n * DIM)).astype(np.float32) for n in (NUM_HEADS, 2)]
        store.add_layer(*map(Heads, rows, norms), DIM)
    store.collect(0, num_rows)
    return store


def score_reference(store: CpuHeads, num_text: int, length: int) -> np.ndarray:
    best = np.zeros(num_text)
    for layer in store.layers:
        for row in range(max(QUERY_LEN - (length - num_text), 0), QUERY_LEN):
            seen = length - QUERY_LEN + row + 1
            for head in range(NUM_HEADS):
                own = layer.keys[:seen, head // (NUM_HEADS // KV_HEADS)].astype(np.float64)
                logits = own @ layer.queries[row, head] / np.sqrt(DIM)
                weights = np.exp(logits - logits.max())
                best = np.maximum(best, (weights / weights.sum())[:num_text])
    smooth = [best[max(i - 6, 0) : i + 7].mean() for i in range(num_text)]
    starts = range(0, num_text, CHUNK_LEN)
    return np.array([np.mean(smooth[i : i + CHUNK_LEN]) * num_text for i in starts])


@pytest.mark.parametrize("num_asked", [1, 5, 8, 20])
def test_scores_are_those_of_plain_loops(num_asked: int) -> None:
    store = make_heads(3, 150 + num_asked)
    found = store.score(150, 150 + num_asked)
    assert found.dtype == np.float32 and found.shape == (5,)
    assert np.allclose(found, score_reference(store, 150, 150 + num_asked), rtol=1e-4)


def test_passes_one_after_the_other_leave_what_one_pass_does() -> None:
    whole, parts = make_heads(2, 40), CpuHeads(40)
    rows = [layer._rows for layer in whole.layers]
    copies = [tuple(Heads(heads.x.copy(), heads.norm) for heads in pair) for pair in rows]
    for pair in copies:
        parts.add_layer(*pair, DIM)
    for first, end in ((0, 3), (3, 19), (19, 40)):
        for pair, source in zip(copies, rows, strict=True):
            for heads, given in zip(pair, source, strict=True):
                heads.x[: end - first] = given.x[first:end]
        parts.collect(first, end - first)
    for one, other in zip(whole.layers, parts.layers, strict=True):
        assert np.array_equal(one.keys, other.keys)
        assert np.array_equal(one.queries, other.queries)
