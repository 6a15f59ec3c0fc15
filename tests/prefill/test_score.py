"""Scores of a text's chunks: the arithmetic beside plain loops, on a tiny model's queries and
keys.
"""

import numpy as np
import pytest

from draftree.models.load import load_model
from draftree.prefill.score import (
    CHUNK_LEN,
    QUERY_LEN,
    AttentionScorer,
    KeyReader,
    LayerHeads,
    PooledKeyScorer,
    score_attention,
    score_pooled_keys,
)
from draftree.weights.file import open_checkpoint
from tests.tiny import MAX_CTX, new_ops, tiny_path

IDS = np.random.default_rng(3).integers(5, 400, 150).tolist()
QUESTION = np.random.default_rng(4).integers(5, 400, 12).tolist()


def open_reader(name: str, chunk_len: int = 64, max_ctx: int = MAX_CTX) -> KeyReader:
    ops = new_ops(exact=True)
    model = load_model(open_checkpoint(tiny_path(name)), ops)
    return KeyReader(model, ops, max_ctx, chunk_len)


def attention_reference(layers: list[LayerHeads], num_text: int) -> np.ndarray:
    best = np.zeros((QUERY_LEN, num_text))
    for queries, keys in layers:
        length, group = len(keys), queries.shape[1] // keys.shape[1]
        for row in range(QUERY_LEN):
            seen = length - QUERY_LEN + row + 1
            for head in range(queries.shape[1]):
                own = keys[:seen, head // group].astype(np.float64)
                logits = own @ queries[row, head] / np.sqrt(queries.shape[2])
                weights = np.exp(logits - logits.max())
                weights = (weights / weights.sum())[:num_text]
                best[row] = np.maximum(best[row], weights)
    mean = best.mean(axis=0)
    smooth = [mean[max(i - 6, 0) : i + 7].mean() for i in range(num_text)]
    starts = range(0, num_text, CHUNK_LEN)
    return np.array([np.mean(smooth[i : i + CHUNK_LEN]) * num_text for i in starts])


def pooled_reference(layers: list[LayerHeads], num_text: int) -> np.ndarray:
    scores = np.zeros(-(-num_text // CHUNK_LEN))
    for queries, keys in layers:
        text = keys[:num_text].astype(np.float64)
        text = text - text.mean(axis=0)
        group = queries.shape[1] // keys.shape[1]
        for chunk in range(len(scores)):
            block = text[chunk // 2 * 64 : chunk // 2 * 64 + 64].mean(axis=0)
            for row in range(QUERY_LEN):
                cosines = [
                    block[head // group]
                    @ queries[row, head]
                    / np.linalg.norm(block[head // group])
                    / np.linalg.norm(queries[row, head])
                    for head in range(queries.shape[1])
                ]
                scores[chunk] += max(cosines) / QUERY_LEN / len(layers)
    return scores


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen35"])
def test_scores_are_those_of_plain_loops(name: str) -> None:
    layers = open_reader(name).read([*IDS, *QUESTION])
    assert all(len(layer.keys) == len(IDS) + len(QUESTION) for layer in layers)
    found, pooled = score_attention(layers, len(IDS)), score_pooled_keys(layers, len(IDS))
    assert found.shape == pooled.shape == (5,)
    assert np.allclose(found, attention_reference(layers, len(IDS)), rtol=1e-4)
    assert np.allclose(pooled, pooled_reference(layers, len(IDS)), atol=1e-4)


def test_keys_and_queries_do_not_depend_on_how_the_text_is_cut() -> None:
    first, second = (open_reader("llama", chunk).read([*IDS, *QUESTION]) for chunk in (64, 17))
    for one, other in zip(first, second, strict=True):
        assert np.array_equal(one.keys, other.keys)
        assert np.array_equal(one.queries, other.queries)


def test_keys_are_those_before_rotation() -> None:
    """The same token has the same key in the first layer wherever it stands, normed or not."""
    for name in ("llama", "qwen3"):
        keys = open_reader(name).read([7, 9, 11, 7, 9, *range(20, 40)])[0].keys
        assert np.array_equal(keys[0], keys[3]) and np.array_equal(keys[1], keys[4])
        assert not np.array_equal(keys[0], keys[1])


@pytest.mark.parametrize("kind", [AttentionScorer, PooledKeyScorer])
def test_long_texts_are_read_in_windows(kind: type) -> None:
    reader = open_reader("llama", max_ctx=140)
    text = np.random.default_rng(5).integers(5, 400, 301).tolist()
    scores = kind(reader).score(text, QUESTION)
    assert scores.shape == (10,) and np.isfinite(scores).all()
    assert np.array_equal(kind(reader).score(text, QUESTION), scores)
    whole = kind(open_reader("llama")).score(text[:128], QUESTION)
    assert np.array_equal(scores[:4], whole)
