import numpy as np
import pytest
import torch

from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.rope import record_rope, rope_table
from tests.kernels.passes import make_tree, pool, randn, set_rows
from tests.kernels.reference.rope import rope_reference

HEADS = 3


def _inv_freq(rotary_dim, base=1e5):
    return 1.0 / base ** (np.arange(rotary_dim // 2) / (rotary_dim // 2))


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(32, 32), (64, 64), (64, 16), (128, 128), (256, 64), (80, 40)]
)
def test_rope_equals_reference(head_dim, rotary_dim, interleaved):
    rng = np.random.default_rng(head_dim + rotary_dim)
    x, inv_freq = randn(rng, 9, HEADS * head_dim), _inv_freq(rotary_dim)
    before = x.copy()
    step, program = PassArgs(9, 9), Program(pool(2))
    table = rope_table(inv_freq, 5000)
    record_rope(program, step, x, HEADS, head_dim, rotary_dim, table, interleaved)
    set_rows(step, 7, committed=4000)
    program.run()
    heads = torch.from_numpy(before[:7]).unflatten(1, (HEADS, head_dim))
    positions = torch.arange(4000, 4007)
    expected = rope_reference(heads, positions, torch.from_numpy(inv_freq), interleaved)
    np.testing.assert_allclose(x[:7], expected.flatten(1), atol=2e-6)
    np.testing.assert_array_equal(x[7:], before[7:])


def test_nodes_of_a_tree_turn_by_their_depth():
    rng = np.random.default_rng(0)
    tree = make_tree([0, 0, 1, 2, 3], 5)
    row = randn(rng, 64)
    x = np.tile(row, (6, 1))
    step, program = PassArgs(6, 6), Program(pool(2))
    record_rope(program, step, x, 1, 64, 64, rope_table(_inv_freq(64), 64), False)
    tree.load(step, 20)
    program.run()
    chain = np.tile(row, (6, 1))
    program = Program(pool(1))
    record_rope(program, step, chain, 1, 64, 64, rope_table(_inv_freq(64), 64), False)
    set_rows(step, 6, committed=20)
    program.run()
    np.testing.assert_array_equal(x, chain[tree.depths])


def test_a_view_of_heads_leaves_what_lies_between():
    rng = np.random.default_rng(3)
    x = randn(rng, 4, 2 * 2 * 32)
    before = x.copy().reshape(4, 2, 2, 32)
    step, program = PassArgs(4, 4), Program(pool(3))
    view = x.reshape(4, 2, 2, 32)[:, :, 0]
    record_rope(program, step, view, 2, 32, 32, rope_table(_inv_freq(32), 8), True)
    set_rows(step, 4, committed=1)
    program.run()
    after = x.reshape(4, 2, 2, 32)
    np.testing.assert_array_equal(after[:, :, 1], before[:, :, 1])
    assert not np.array_equal(after[:, :, 0], before[:, :, 0])
