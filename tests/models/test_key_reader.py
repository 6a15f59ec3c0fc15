"""Queries and keys of a tiny model's layers, before they are rotated."""

import numpy as np
import pytest

from draftree.kernels.heads import QUERY_LEN
from draftree.models.key_reader import KeyReader
from draftree.models.load import load_model
from draftree.weights.file import open_checkpoint
from tests.tiny import MAX_CTX, new_ops, tiny_path

IDS = np.random.default_rng(3).integers(5, 400, 150).tolist()


def read(name: str, ids, chunk_len: int = 64, num_layers: int = 0):
    ops = new_ops(exact=True)
    model = load_model(open_checkpoint(tiny_path(name)), ops)
    reader = KeyReader(model, ops, MAX_CTX, chunk_len, num_layers)
    reader.read(IDS[::-1])  # leaves no trace
    reader.read(ids)
    return model, [(layer.queries, layer.keys[: len(ids)]) for layer in reader.heads.layers]


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_they_do_not_depend_on_how_the_text_is_cut(name: str) -> None:
    (_, first), (_, second) = (read(name, IDS, chunk) for chunk in (150, 17))
    for one, other in zip(first, second, strict=True):
        for found, expected in zip(one, other, strict=True):
            assert np.allclose(found, expected, atol=2e-3) and np.abs(expected).max() > 0.1


def test_they_are_those_before_rotation() -> None:
    """The same token has the same key in the first layer wherever it stands, normed or not."""
    for name in ("llama", "qwen3"):
        keys = read(name, [7, 9, 11, 7, 9, *range(20, 40)])[1][0][1]
        assert np.array_equal(keys[0], keys[3]) and np.array_equal(keys[1], keys[4])
        assert not np.array_equal(keys[0], keys[1])


@pytest.mark.parametrize("name", ["llama", "qwen3", "qwen35"])
def test_first_layers_alone_find_the_same(name: str) -> None:
    model, layers = read(name, IDS)
    assert len(layers) == len(model.attention_layers)
    assert layers[0][0].shape[0] == QUERY_LEN
    for count in range(1, len(layers) + 1):
        _, first = read(name, IDS, num_layers=model.attention_layers[count - 1] + 1)
        assert len(first) == count
        for one, other in zip(first, layers, strict=False):
            assert all(np.array_equal(a, b) for a, b in zip(one, other, strict=True))
