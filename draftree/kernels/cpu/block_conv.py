"""Convolution over the rows of a pass whose coefficients each row brings along.

A row sees itself and the rows before it in the same pass. Columns come in groups that share what a
row brings; a coefficient is that and a base of its own for every column.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures)
import numpy as np

from draftree.kernels.cpu.elementwise import row_count
from draftree.kernels.cpu.instruction import LANES
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.pass_args import NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import fma, load, load_i64, load_splat, splat, store


@kernel
def _block_conv_kernel(args, ticket, thread, num_threads):
    num_rows, width, group_len, taps = load_i64(args[0]), args[1], args[2], args[3]
    x, x_row, own, own_row = args[4], args[5], args[6], args[7]
    base, out, out_row, is_added = args[8], args[9], args[10], args[11]
    num_groups = width // group_len
    for row in range(num_rows * thread // num_threads, num_rows * (thread + 1) // num_threads):
        for c in range(0, width, 16):
            total = splat(0.0)
            for tap in range(min(taps, row + 1)):
                more = load_splat(own + row * own_row + 4 * (tap * num_groups + c // group_len))
                weight = load(base + 4 * (tap * width + c)) + more
                total = fma(weight, load(x + (row - tap) * x_row + 4 * c), total)
            p_out = out + row * out_row + 4 * c
            if is_added != 0:
                total = load(p_out) + total
            store(p_out, total)


def record_block_conv(
    program: Program,
    step: PassArgs,
    x: np.ndarray,
    own: np.ndarray,
    base: np.ndarray,
    out: np.ndarray,
    *,
    is_added: bool,
) -> None:
    """out = sum over taps of (base[tap] + own[row, tap, group]) * x[row - tap]; own: columns
    [taps * groups] of each row, base: [taps, width]. is_added: to what out holds.
    """
    taps, width = base.shape
    group_len = width * taps // own.shape[1]
    assert group_len % LANES == 0, f"groups of {group_len} are not a multiple of {LANES}"
    assert x.shape[1] == out.shape[1] == width and own.shape[1] == taps * width // group_len
    assert not np.may_share_memory(x, out), "later rows still need the inputs: out must not be x"
    assert base.flags.c_contiguous
    assert all(a.dtype == np.float32 and a.strides[-1] == 4 for a in (x, own, base, out))
    program.add(
        _block_conv_kernel,
        *(row_count(step, NUM_TOKENS), width, group_len, taps, x, x.strides[0]),
        *(own, own.strides[0], base, out, out.strides[0], int(is_added)),
        reads=(x, own, base, out) if is_added else (x, own, base),
        writes=(out,),
    )
