"""Logits, hidden states and greedy text of tiny models against transformers in float32."""

from contextlib import closing

import numpy as np
import pytest

from draftree.core import DraftTree
from draftree.models.target import Target
from tests.golden import golden
from tests.tiny import FILES, open_default, open_target, run_chain, tiny_path, tiny_target

ARRAYS = {
    "llama": "dense/llama-A.npz",
    "llama-rs": "dense/llama-rs.npz",
    "qwen3": "dense/qwen3-A.npz",
    "qwen35": "qwen35/logits_A_mixed.npz",
    "qwen35-mtp": "qwen35/logits_C_mtp.npz",
}
TOLERANCE = 1e-3


def _names(arrays: np.lib.npyio.NpzFile, suffix: str) -> list[str]:
    return [key.removesuffix(suffix) for key in arrays.files if key.endswith(suffix)]


def greedy(target: Target, prompt: np.ndarray, count: int) -> list[int]:
    target.state.reset()
    run_chain(target, prompt[:-1]) if len(prompt) > 1 else None
    tokens, anchor = [], int(prompt[-1])
    for _ in range(count):
        target.state.begin(DraftTree.chain((anchor,)), is_committed=True)
        anchor = int(target.forward((0,)).logits[0].argmax())
        target.state.commit((0,))
        tokens.append(anchor)
    return tokens


@pytest.mark.parametrize("name", ARRAYS)
@pytest.mark.parametrize("chunk_len", [512, 17, 1])
def test_logits_at_every_position(name: str, chunk_len: int) -> None:
    arrays, target = np.load(golden(ARRAYS[name])), tiny_target(name)
    for sequence in _names(arrays, ".logits"):
        ids = arrays[f"{sequence}.ids"]
        if chunk_len == 1 and len(ids) > 130:
            continue
        target.state.reset()
        if chunk_len > 65:  # one pass: logits of the last rows only, all rows cannot be asked for
            target.state.begin(DraftTree.chain(tuple(ids.tolist())), is_committed=True)
            rows = range(max(0, len(ids) - 65), len(ids))
            logits = target.forward(rows).logits
            target.state.commit(range(len(ids)))
            expected = arrays[f"{sequence}.logits"][rows.start :]
        else:
            logits, expected = run_chain(target, ids, chunk_len), arrays[f"{sequence}.logits"]
        assert np.abs(logits - expected).max() < TOLERANCE, sequence


@pytest.mark.parametrize("name", ARRAYS)
def test_greedy_text(name: str) -> None:
    arrays, target = np.load(golden(ARRAYS[name])), tiny_target(name)
    prompts = _names(arrays, ".prompt")
    assert prompts
    for prompt in prompts:
        expected = arrays[f"{prompt}.ids"].tolist()
        assert greedy(target, arrays[f"{prompt}.prompt"], len(expected)) == expected, prompt


@pytest.mark.parametrize("name", ["llama", "llama-rs", "qwen3", "qwen35", "qwen35-mtp"])
def test_hidden_states_after_each_layer(name: str) -> None:
    arrays = np.load(golden(ARRAYS[name]))
    expected = arrays["len33.layer_out"]  # [layers, 33, hidden]
    target = open_target(tiny_path(name), feature_layers=tuple(range(len(expected))))
    target.state.begin(DraftTree.chain(tuple(arrays["len33.ids"].tolist())), is_committed=True)
    features = target.forward(()).features
    assert features is not None
    found = features[:33].reshape(33, len(expected), -1).transpose(1, 0, 2)
    assert np.abs(found - expected).max() < TOLERANCE


def test_quantised_kernels_diverge_no_more_than_llamacpp() -> None:
    """8-bit activations cost accuracy; the bar is what llama.cpp's own run of the same file
    shows. With a user's settings.
    """
    arrays = np.load(golden(ARRAYS["qwen35"]))
    with closing(open_default(tiny_path("qwen35"))) as engine:
        logits = run_chain(engine.target, arrays["text.ids"])
    best = arrays["text.llamacpp_top20_ids"]
    native = arrays["text.llamacpp_top20_logits"]
    check_divergence(logits, arrays["text.logits"], best, native)


def check_divergence(
    logits: np.ndarray, exact: np.ndarray, top_ids: np.ndarray, native: np.ndarray
) -> None:
    reference = np.take_along_axis(exact, top_ids, axis=1)
    native_error = np.abs((native - native[:, :1]) - (reference - reference[:, :1])).mean()
    ours = np.take_along_axis(logits, top_ids, axis=1)
    our_error = np.abs((ours - ours[:, :1]) - (reference - reference[:, :1])).mean()
    assert our_error <= 1.1 * native_error, (our_error, native_error)


def test_every_golden_model_file_is_used() -> None:
    assert set(ARRAYS) <= set(FILES)
