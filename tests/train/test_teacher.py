"""The torch target against reference logits, hidden states and the engine's own."""

import numpy as np
import pytest
import torch

from draftree.core import DraftTree
from draftree.train.teacher import load_teacher
from draftree.weights.file import open_checkpoint
from tests.golden import golden
from tests.tiny import make_qwen2, open_target, run_chain, tiny_path

CPU = torch.device("cpu")
TOLERANCE = 1e-3
FILES = {
    "llama": "dense/llama-A.npz",
    "llama-rs": "dense/llama-rs.npz",
    "qwen3": "dense/qwen3-A.npz",
    "qwen35": "qwen35/logits_A_mixed.npz",
    "qwen35-mtp": "qwen35/logits_C_mtp.npz",
}


@pytest.mark.parametrize("name", FILES)
def test_logits_and_features_are_the_references(name):
    arrays = np.load(golden(FILES[name]))
    teacher = load_teacher(open_checkpoint(tiny_path(name)), CPU)
    layers = tuple(range(len(teacher.layers)))
    read = teacher.read(torch.from_numpy(arrays["len33.ids"].astype(np.int64))[None], layers)
    logits = teacher.logits(read.hidden)[0].numpy()
    assert np.abs(logits - arrays["len33.logits"]).max() < TOLERANCE
    features = read.features[0].unflatten(-1, (len(layers), -1)).transpose(0, 1).numpy()
    assert np.abs(features - arrays["len33.layer_out"]).max() < TOLERANCE


def test_features_end_where_the_last_is_taken():
    teacher = load_teacher(open_checkpoint(tiny_path("qwen3")), CPU)
    ids = torch.arange(20)[None]
    whole, part = (
        teacher.read(ids, (1, 0), needs_hidden=needed).features for needed in (True, False)
    )
    assert torch.equal(whole, part)


def test_biases_are_read():
    ids = np.random.default_rng(0).integers(0, 256, 40)
    expected = run_chain(open_target(make_qwen2(), num_threads=1), ids)
    teacher = load_teacher(open_checkpoint(make_qwen2()), CPU)
    logits = teacher.logits(teacher.read(torch.from_numpy(ids)[None]).hidden)[0].numpy()
    assert np.abs(logits - expected).max() < TOLERANCE


@pytest.mark.parametrize("name", FILES)
def test_steps_over_a_cache_give_the_same_logits(name):
    teacher = load_teacher(open_checkpoint(tiny_path(name)), CPU)
    ids = torch.from_numpy(np.random.default_rng(1).integers(0, 500, (3, 24)))
    expected = teacher.logits(teacher.read(ids).hidden)
    cache = teacher.new_cache(3, 32)
    starts = torch.tensor([4, 11, 7])  # rows are at different places
    teacher.fill(ids[:, :16], cache, starts)
    goes_on = torch.zeros(3, dtype=torch.bool)
    for offset in range(8):
        places = starts + offset
        tokens = ids.gather(1, places[:, None])[:, 0]
        logits = teacher.step(tokens, places, goes_on, cache, 24)
        assert torch.allclose(logits, expected[range(3), places], atol=TOLERANCE)


@pytest.mark.parametrize("name", ("qwen35", "qwen35-mtp"))
def test_hidden_states_of_hybrids_are_the_engines(name):
    """Over three chunks of the delta rule, the last of them short."""
    teacher = load_teacher(open_checkpoint(tiny_path(name)), CPU)
    layers = tuple(range(len(teacher.layers)))
    target = open_target(tiny_path(name), feature_layers=layers, num_threads=1)
    ids = np.random.default_rng(2).integers(0, 500, 150)
    chain = DraftTree.chain(tuple(int(token) for token in ids))
    target.state.begin(chain, is_committed=True)
    output = target.forward([len(ids) - 1])
    read = teacher.read(torch.from_numpy(ids)[None], layers)
    assert np.abs(read.features[0].numpy() - output.features[: len(ids)]).max() < TOLERANCE
    assert np.abs(teacher.logits(read.hidden)[0, -1].numpy() - output.logits).max() < TOLERANCE


@pytest.mark.parametrize("name", ("llama", "qwen35-mtp"))
def test_a_row_that_is_done_may_be_stepped_again(name):
    teacher = load_teacher(open_checkpoint(tiny_path(name)), CPU)
    ids = torch.from_numpy(np.random.default_rng(3).integers(0, 500, (2, 9)))
    cache, places = teacher.new_cache(2, 16), torch.tensor([8, 8])
    teacher.fill(ids, cache, places)
    idle, live = torch.ones(2, dtype=torch.bool), torch.zeros(2, dtype=torch.bool)
    for _ in range(2):
        teacher.step(ids[:, 8], places, idle, cache, 16)
    logits = teacher.step(ids[:, 8], places, live, cache, 16)
    assert torch.allclose(logits, teacher.logits(teacher.read(ids).hidden)[:, 8], atol=TOLERANCE)


@pytest.mark.parametrize("name", ("llama", "qwen35-mtp"))
def test_half_as_many_bits_give_nearly_the_same(name):
    """What a GPU trains with."""
    checkpoint = open_checkpoint(tiny_path(name))
    teacher = load_teacher(checkpoint, CPU, torch.bfloat16)
    ids = torch.from_numpy(np.random.default_rng(5).integers(0, 500, (2, 80)))
    exact = load_teacher(checkpoint, CPU)
    expected = exact.logits(exact.read(ids).hidden)
    logits = teacher.logits(teacher.read(ids).hidden)
    assert logits.dtype == torch.bfloat16
    assert (logits - expected).abs().mean() < 0.03 * expected.abs().mean()
    cache, places = teacher.new_cache(2, 90), torch.tensor([79, 40])
    teacher.fill(ids, cache, places)
    tokens = ids[range(2), places]
    stepped = teacher.step(tokens, places, torch.zeros(2, dtype=torch.bool), cache, 90)
    assert (stepped - expected[range(2), places]).abs().mean() < 0.03 * expected.abs().mean()
