"""The gated delta rule over long chains on the GPU, against the reference."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.gated_delta_prefill import (
    chunk_shared_bytes,
    gated_delta_prefill,
    plan_pass,
)
from tests.kernels.delta_layers import Layers, relative_error
from tests.kernels.emulator import emulated_gpu
from tests.kernels.passes import randn

PREFILLS = [
    # key heads, value heads, head_dim, rows, factor of the decays
    (1, 2, 16, 65, 1.0),
    (2, 4, 32, 200, 0.01),
    (1, 1, 64, 128, 1.0),
    (1, 1, 64, 200, 20.0),
    (1, 1, 128, 65, 0.02),
]


@pytest.mark.parametrize("case", PREFILLS, ids=str)
def test_prefill_equals_reference(any_gpu, case):
    *shape, count, rate = case
    rng = np.random.default_rng(count)
    layers = Layers(any_gpu, *shape)
    layers.decay *= rate
    inputs, before = layers.random_inputs(rng, count), randn(rng, shape[1], shape[2], shape[2])
    inputs[0][3] = 0.0
    layers.states[0].restore((torch.as_tensor(before),))
    expected, after = layers.reference(inputs, before)
    out = layers.run(gated_delta_prefill, inputs, count)
    assert relative_error(out, expected) < 1e-3
    assert relative_error(layers.snapshot(), after) < 1e-3
    first = layers.snapshot()
    layers.states[0].restore((torch.as_tensor(before),))
    again = layers.run(gated_delta_prefill, inputs, count + 70)  # of which so many are not live
    np.testing.assert_array_equal(again, out)
    np.testing.assert_array_equal(layers.snapshot(), first)


def test_prefill_of_similar_keys_and_full_gates(any_gpu):
    """Corrections that undo each other: the hardest case for the solved form."""
    layers = Layers(any_gpu, 1, 1, 32)
    rng = np.random.default_rng(9)
    inputs, before = layers.random_inputs(rng, 130), randn(rng, 1, 32, 32) * 1e4
    inputs[0][:, 32:64] = 1.0 + 0.3 * inputs[0][:, 32:64]
    inputs[0][:, 64:] *= 1e5  # values beyond what 16-bit floats can hold
    inputs[1][:], inputs[2][:] = -20.0, 8.0
    layers.states[0].restore((torch.as_tensor(before),))
    expected, after = layers.reference(inputs, before)
    out = layers.run(gated_delta_prefill, inputs, 130)
    assert relative_error(out, expected) < 2e-3
    assert relative_error(layers.snapshot(), after) < 2e-3


def test_prefill_goes_slab_by_slab(any_gpu, monkeypatch):
    monkeypatch.setattr("draftree.kernels.cuda.gated_delta_prefill._SLAB_ROWS", 64)
    layers, whole = Layers(any_gpu, 1, 1, 16), Layers(any_gpu, 1, 1, 16)
    inputs = layers.random_inputs(np.random.default_rng(10), 130)
    out = layers.run(gated_delta_prefill, inputs, 130)
    monkeypatch.undo()
    np.testing.assert_array_equal(out, whole.run(gated_delta_prefill, inputs, 130))
    np.testing.assert_array_equal(layers.snapshot(), whole.snapshot())


def test_chips_with_less_room_give_the_same_bits():
    """Fewer chunks are read ahead."""
    large = emulated_gpu()
    small = replace(large, shared_per_block=60_000)
    assert [plan_pass(64, chip).num_stages for chip in (large, small)] == [2, 1]
    results = []
    for chip in (large, small):
        layers, rng = Layers(chip, 1, 1, 64), np.random.default_rng(12)
        out = layers.run(gated_delta_prefill, layers.random_inputs(rng, 150), 150)
        results.append((out, layers.snapshot()))
    np.testing.assert_equal(*results)


@pytest.mark.parametrize("shared", [101376, 166912, 232448])
def test_blocks_fit_every_chip(shared):
    chip = Gpu(0, 90, 100, shared + 1024, shared)
    for dim in (16, 32, 64, 128):
        assert chunk_shared_bytes(dim) + 1024 <= shared
        assert plan_pass(dim, chip).shared_bytes + 256 <= shared
