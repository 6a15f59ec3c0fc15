"""Operations on rows where every element goes its own way: products, sums, copies.

Arrays are float32 [max_tokens, cols]; rows may lie apart (column slices), and where an operation
speaks of heads an array may be a view [max_tokens, num_heads, head_dim] with its own strides. It
knows nothing of models.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures)
import numpy as np

from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.pass_args import NUM_ROWS, NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import load, load_first, load_i64, sigmoid, silu, store, store_first

_SILU_MUL, _SIGMOID_MUL, _COPY = range(3)
_CHUNK = 256  # columns a thread takes at once


def head_strides(x: np.ndarray, num_heads: int, head_dim: int) -> tuple[int, int]:
    """Bytes from row to row and head to head of [rows, num_heads * head_dim] or a view of heads."""
    assert x.dtype == np.float32 and x.strides[-1] == 4, "rows of consecutive float32 are expected"
    if x.ndim == 3:
        assert x.shape[1:] == (num_heads, head_dim), f"{x.shape} is not {num_heads} x {head_dim}"
        return x.strides[0], x.strides[1]
    assert x.shape[1] == num_heads * head_dim, f"{x.shape} is not {num_heads} x {head_dim}"
    return x.strides[0], head_dim * 4


def row_count(step: PassArgs, rows_word: int) -> np.ndarray:
    """The control word that counts a pass's rows, as an array that kernels can point to."""
    return step.control[rows_word : rows_word + 1]


@kernel
def _elementwise_kernel(args, ticket, thread, num_threads):
    num_rows, op = load_i64(args[0]), args[1]
    num_heads, head_dim = args[2], args[3]
    a, a_row, a_head = args[4], args[5], args[6]
    b, b_row, b_head = args[7], args[8], args[9]
    out, out_row, out_head = args[10], args[11], args[12]
    index = args[13]
    num_chunks = (head_dim + _CHUNK - 1) // _CHUNK
    total = num_rows * num_heads * num_chunks
    for item in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        first = item % num_chunks * _CHUNK
        head = item // num_chunks % num_heads
        row = item // num_chunks // num_heads
        source = row
        if index != 0:
            source = load_i64(index + 8 * row)
        p_a = a + source * a_row + head * a_head
        p_b = b + row * b_row + head * b_head
        p_out = out + row * out_row + head * out_head
        last = min(head_dim, first + _CHUNK)
        whole = first + (last - first) // 16 * 16
        if op == _SILU_MUL:
            for c in range(4 * first, 4 * whole, 64):
                store(p_out + c, silu(load(p_a + c)) * load(p_b + c))
        elif op == _SIGMOID_MUL:
            for c in range(4 * first, 4 * whole, 64):
                store(p_out + c, load(p_a + c) * sigmoid(load(p_b + c)))
        else:
            for c in range(4 * first, 4 * whole, 64):
                store(p_out + c, load(p_a + c))
        rest = last - whole
        if rest > 0:
            value = load_first(p_a + 4 * whole, rest)
            other = value
            if b != 0:
                other = load_first(p_b + 4 * whole, rest)
            if op == _SILU_MUL:
                value = silu(value) * other
            elif op == _SIGMOID_MUL:
                value = value * sigmoid(other)
            store_first(p_out + 4 * whole, rest, value)


def _record(
    program: Program,
    step: PassArgs,
    op: int,
    a: np.ndarray,
    b: np.ndarray | None,
    out: np.ndarray,
    index: np.ndarray | None = None,
) -> None:
    """out = op(a, b) row by row; all are [rows, cols], or views [rows, num_heads, head_dim]. index:
    which rows of a, as many as logits are wanted of.
    """
    views = [x for x in (a, b, out) if x is not None]
    split = next((x.shape[1:] for x in views if x.ndim == 3), (1, out.shape[1]))
    num_heads, head_dim = split
    strides = [head_strides(x, num_heads, head_dim) for x in views]
    a_strides, out_strides = strides[0], strides[-1]
    b_strides = strides[1] if b is not None else (0, 0)
    program.add(
        _elementwise_kernel,
        row_count(step, NUM_TOKENS if index is None else NUM_ROWS),
        *(op, num_heads, head_dim, a, *a_strides, 0 if b is None else b, *b_strides),
        *(out, *out_strides, 0 if index is None else index),
        reads=tuple(x for x in (a, b) if x is not None),
        writes=(out,),
    )


def record_silu_mul(
    program: Program, step: PassArgs, gate: np.ndarray, up: np.ndarray, out: np.ndarray
) -> None:
    """out = silu(gate) * up; out may be gate or up."""
    _record(program, step, _SILU_MUL, gate, up, out)


def record_sigmoid_mul(program: Program, step: PassArgs, x: np.ndarray, gate: np.ndarray) -> None:
    """x *= sigmoid(gate); either may be a view [rows, num_heads, head_dim]."""
    _record(program, step, _SIGMOID_MUL, x, gate, x)


def record_gather_rows(program: Program, step: PassArgs, x: np.ndarray, out: np.ndarray) -> None:
    """out[i] = x[step.rows[i]]."""
    _record(program, step, _COPY, x, None, out, index=step.rows)


def record_copy_columns(
    program: Program, step: PassArgs, src: np.ndarray, dst: np.ndarray, dst_column: int
) -> None:
    """dst[:, dst_column : dst_column + cols] = src."""
    target = dst[:, dst_column : dst_column + src.shape[1]]
    assert target.shape[1] == src.shape[1], "the columns do not fit into the destination"
    _record(program, step, _COPY, src, None, target)
