"""The gated delta rule in chunks against one token after the other."""

import pytest
import torch

from draftree.train.delta_net import TeacherDeltaNet, gated_delta
from tests.kernels.reference.gated_delta import gated_delta_reference

HEADS, KEY_HEADS, DIM = 4, 2, 16


def _net(kernel_len=4):
    channels = (2 * KEY_HEADS + HEADS) * DIM
    rows = channels + HEADS * DIM + 2 * HEADS
    return TeacherDeltaNet(
        inputs=torch.randn(rows, 24) * 0.3,
        output=torch.randn(24, HEADS * DIM) * 0.3,
        conv=torch.randn(channels, kernel_len),
        decay=-torch.rand(HEADS) * 4,
        decay_bias=torch.randn(HEADS),
        norm=torch.ones(DIM),
        key_heads=KEY_HEADS,
        value_heads=HEADS,
        head_dim=DIM,
        eps=1e-6,
    )


@pytest.mark.parametrize("length", (1, 2, 63, 64, 65, 150))
def test_chunks_give_what_single_tokens_do(length):
    """Decays from hardly any to all within a chunk; keys that are alike and strengths near one."""
    torch.manual_seed(length)
    net = _net()
    qkv = torch.randn(2, length, (2 * KEY_HEADS + HEADS) * DIM) + 0.5
    alpha, beta = torch.randn(2, length, HEADS) * 4, torch.randn(2, length, HEADS) * 4
    state = torch.randn(2, HEADS, DIM, DIM)
    log_decay = net.decay * torch.nn.functional.softplus(alpha + net.decay_bias)
    gates = log_decay.transpose(1, 2), beta.sigmoid().transpose(1, 2)
    mixed, after = gated_delta(*net._split_heads(qkv), *gates, state)
    for row in range(2):
        inputs = qkv[row], alpha[row], beta[row], net.decay, net.decay_bias, state[row], KEY_HEADS
        expected, expected_after = gated_delta_reference(*inputs)
        assert torch.allclose(mixed[row].transpose(0, 1), expected, atol=1e-4)
        assert torch.allclose(after[row], expected_after, atol=1e-4)


def test_only_the_tokens_to_be_kept_are_in_the_cache():
    torch.manual_seed(0)
    net, x = _net(), torch.randn(3, 70, 24)
    num_kept = torch.tensor([1, 2, 66])
    _, padded = net._mix(x, num_kept, net.new_cache(3, 0))
    for row, count in enumerate(num_kept.tolist()):
        _, alone = net._mix(x[row : row + 1, :count], None, net.new_cache(1, 0))
        for kept, expected in zip(padded, alone, strict=True):
            assert torch.allclose(kept[row], expected[0], atol=1e-5)
    for kept, expected in zip(net._mix(x, torch.zeros(3).long(), padded)[1], padded, strict=True):
        assert torch.equal(kept, expected)


def test_it_can_be_learned_through():
    """Decays so strong that a plain exponential of their differences would overflow."""
    torch.manual_seed(1)
    parts = [torch.randn(1, HEADS, 64, DIM, requires_grad=True) for _ in range(3)]
    log_decay = torch.full((1, HEADS, 64), -20.0, requires_grad=True)
    strength = torch.full((1, HEADS, 64), 0.5, requires_grad=True)
    mixed, _ = gated_delta(*parts, log_decay, strength, torch.zeros(1, HEADS, DIM, DIM))
    mixed.square().sum().backward()
    for part in (*parts, log_decay, strength):
        assert part.grad is not None and bool(part.grad.isfinite().all())
