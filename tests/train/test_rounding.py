"""Four-bit weights: what a file gives back, how near it is, and where gradients go."""

import gguf
import numpy as np
import pytest
import torch

from draftree.train.draft import Matrix
from draftree.train.rounding import round_weights

Q4_1 = gguf.GGMLQuantizationType.Q4_1


def _weights():
    torch.manual_seed(0)
    weights = 0.05 * torch.randn(24, 96)
    weights[0, :32] = 0.3  # all equal
    weights[1, :32] = 0.0
    weights[2, :31] = 1e-9  # a step below what float16 can state
    weights[3, 5] = 40.0
    return weights


def test_a_file_gives_exactly_the_rounded_weights():
    bits = round_weights(_weights())
    raw = bits.pack()
    assert raw.dtype == np.uint8 and raw.shape == (24, 60)
    assert np.array_equal(gguf.quants.dequantize(raw, Q4_1), bits.weights().numpy())
    assert bits.numbers.min() == 0 and bits.numbers.max() == 15


def test_no_block_is_worse_than_from_smallest_to_largest():
    weights = _weights()
    plain = gguf.quants.dequantize(gguf.quants.quantize(weights.numpy(), Q4_1), Q4_1)
    errors = [
        (torch.as_tensor(rounded) - weights).square().view(-1, 32).sum(1)
        for rounded in (plain, round_weights(weights).weights())
    ]
    # The other rounds numbers half up and before its scales are float16.
    assert (errors[1] <= 1.02 * errors[0] + 1e-9).all()
    assert errors[1][12:].sum() < 0.9 * errors[0][12:].sum()


@pytest.mark.parametrize("value", [0.0, 0.25, -3.0])
def test_equal_weights_stay_as_they_are(value):
    assert torch.equal(
        round_weights(torch.full((2, 32), value)).weights(), torch.full((2, 32), value)
    )


def test_gradients_pass_to_the_weights_before_rounding():
    matrix = Matrix(8, 32)
    x = torch.randn(4, 32)
    matrix(x).square().sum().backward()
    plain = matrix.weight.grad.clone()
    matrix.rounded = round_weights(matrix.weight).weights()
    assert torch.equal(matrix.used(), matrix.rounded) and not torch.equal(
        matrix.used(), matrix.weight
    )
    matrix.weight.grad = None
    matrix(x).sum().backward()
    assert torch.allclose(matrix.weight.grad, x.sum(0).expand(8, 32), atol=1e-5)
    assert not torch.allclose(matrix.weight.grad, plain)
