"""The Walsh-Hadamard transform of a head's row: it spreads a large number over all dimensions.

Rounding by the largest number then costs less. Queries and keys that are both transformed have the
products they had, times the order; every stage is sums and differences in a fixed order.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures)
import numpy as np
from llvmlite import ir

from draftree.kernels.cpu.instruction import LANES, instruction, shuffle
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.simd import load, store


@instruction("f32x16 -> f32x16")
def _transform_lanes(builder, value):
    for step in (1, 2, 4, 8):
        others = shuffle(builder, (value, value), [i ^ step for i in range(LANES)])
        signs = ir.Constant(value.type, [-1.0 if i & step else 1.0 for i in range(LANES)])
        value = builder.fadd(others, builder.fmul(value, signs))
    return value


@njit
def hadamard_order(head_dim):
    """Numbers that are transformed together: the largest power of two that divides head_dim."""
    return np.float32(head_dim & -head_dim)


@njit
def transform_row(row, head_dim):
    """In place, not normalised: the squares of a row add up to the order times what they did."""
    end, order_bytes = row + 4 * head_dim, 4 * (head_dim & -head_dim)
    for c in range(row, end, 64):
        store(c, _transform_lanes(load(c)))
    step = 64
    while step < order_bytes:
        for first in range(row, end, 2 * step):
            for c in range(first, first + step, 64):
                a, b = load(c), load(c + step)
                store(c, a + b)
                store(c + step, a - b)
        step *= 2
