"""The matrix product of the CPU path: out = x @ weight.T (+ bias), recorded into a program.

A token's result is the same bits whatever the number of tokens in the pass and of threads.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures; types are numba's)
from functools import cache

import numpy as np

from draftree.kernels.cpu.amx import AMX_TOKENS
from draftree.kernels.cpu.atomic import take_item
from draftree.kernels.cpu.form import ALL_FORMS
from draftree.kernels.cpu.isa import ALL_ISAS, AMX
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.kernel import Kernel, kernel
from draftree.kernels.cpu.pack import Weight
from draftree.kernels.cpu.pass_args import NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.quantize import QuantizedRows, record_quantize, wants_pairs
from draftree.kernels.cpu.simd import load_f32, load_i64, store_f32
from draftree.kernels.cpu.tile import (
    LARGEST_TILE,
    begin_tiles,
    end_tiles,
    multiply_matrix,
    multiply_tile,
)
from draftree.kernels.cpu.word import stack_bytes

_MATRIX_TOKENS = 12  # below this number of tokens the dot products are faster
_SHARES = 4  # of a thread's strips, each taken as a whole
_AHEAD_BYTES = 8192  # weights are asked for at least so early
_TOKEN_BLOCK_BYTES = 1 << 20  # of x, to stay in a core's cache while all strips pass by


@cache
def _linear_kernel(form: int, isa: int, lanes: int) -> Kernel:
    """args: control word, strips, strip bytes, number of strips, x, x stride, cols, out, rows,
    bias, accumulate, tokens per block, then strips, strip bytes and number of strips of the
    product that comes next.

    Every thread has strips of its own, which it takes in order, so that those it asks for early
    are those that it multiplies; who has finished helps the others.
    """
    has_matrices = ALL_ISAS[isa] == AMX and not ALL_FORMS[form].is_float

    @kernel
    def _linear(args, ticket, thread, num_threads):
        num_tokens, num_strips, token_block = load_i64(args[0]), args[3], args[11]
        cols, x_step, out_stride, add = args[6], args[5], 4 * args[8], args[10]
        edge = stack_bytes(1024)
        num_blocks = (num_tokens + token_block - 1) // token_block
        ahead = (_AHEAD_BYTES + args[2] - 1) // args[2]
        next_first = args[12] + thread * args[14] // num_threads * args[13]
        use_matrices = has_matrices and num_tokens >= _MATRIX_TOKENS
        if use_matrices:
            begin_tiles(form, isa, num_tokens)
        num_items = _SHARES * num_blocks
        turn, item = take_item(ticket, thread, num_threads, 0, num_items)
        while turn < num_threads:
            owner = (thread + turn) % num_threads
            begin = owner * num_strips // num_threads
            end = (owner + 1) * num_strips // num_threads
            share, count = item % _SHARES, end - begin
            first_token = item // _SHARES * token_block
            last_token = min(first_token + token_block, num_tokens)
            while first_token < last_token:
                left = last_token - first_token
                if has_matrices and left >= _MATRIX_TOKENS:
                    tile = min(left, AMX_TOKENS)
                else:
                    tile = min(left, LARGEST_TILE)
                x = args[4] + first_token * x_step
                for strip in range(
                    begin + share * count // _SHARES, begin + (share + 1) * count // _SHARES
                ):
                    weights = args[1] + strip * args[2]
                    later = weights + ahead * args[2]
                    if strip + ahead >= end and turn == 0:
                        later = next_first + (strip + ahead - end) * args[2]
                    bias = args[9] + 4 * strip * lanes if args[9] != 0 else 0
                    width = min(lanes, args[8] - strip * lanes)
                    out = args[7] + first_token * out_stride + 4 * strip * lanes
                    place, step = out, out_stride
                    if width < lanes:
                        place, step = edge, 64
                        if add != 0:
                            _copy_rows(out, out_stride, edge, 64, tile, width)
                    if has_matrices and tile >= _MATRIX_TOKENS:
                        multiply_matrix(
                            form, tile, weights, later, x, x_step, cols, place, step, bias, add
                        )
                    else:
                        multiply_tile(
                            form, isa, tile, weights, later, x, x_step, cols, place, step, bias, add
                        )
                    if width < lanes:
                        _copy_rows(edge, 64, out, out_stride, tile, width)
                first_token += tile
            turn, item = take_item(ticket, thread, num_threads, turn, num_items)
        if use_matrices:
            end_tiles(form, isa)

    return _linear


@njit
def _copy_rows(source, source_stride, target, target_stride, num_rows, width):
    for row in range(num_rows):
        for i in range(width):
            value = load_f32(source + row * source_stride + 4 * i)
            store_f32(target + row * target_stride + 4 * i, value)


def _token_block(row_bytes: int) -> int:
    """Tokens whose x fits the cache, a multiple of sixteen."""
    return max(16, _TOKEN_BLOCK_BYTES // row_bytes // 16 * 16)


def record_linear(
    program: Program,
    step: PassArgs,
    x: np.ndarray | QuantizedRows,
    weight: Weight,
    out: np.ndarray,
    *,
    bias: np.ndarray | None = None,
    accumulate: bool = False,
    rows_word: int = NUM_TOKENS,
    buffer: np.ndarray | None = None,
) -> None:
    """out[i] (+)= x[i] @ weight.T (+ bias) for the rows counted by a control word.

    x float32 [max_tokens, cols], or what record_quantize made of it; out float32
    [max_tokens, rows]; bias float32 [rows]. buffer: for record_quantize, called if needed.
    """
    assert out.dtype == np.float32 and out.flags.c_contiguous and out.shape[1] == weight.rows
    if not weight.form.is_float and isinstance(x, np.ndarray):
        x = record_quantize(program, step, x, isa=weight.isa, buffer=buffer, rows_word=rows_word)
    source = x.source if isinstance(x, QuantizedRows) else x
    assert source.dtype == np.float32 and source.flags.c_contiguous
    assert source.shape[1] == weight.cols, f"x has {source.shape[1]} columns, not {weight.cols}"
    rows = source if weight.form.is_float or isinstance(x, np.ndarray) else x.records
    if isinstance(x, QuantizedRows):
        assert x.is_paired == wants_pairs(weight.isa), "quantised for other weights"
    num_strips, strip_bytes = weight.data.shape
    offsets: np.ndarray | int = 0
    if bias is not None:
        offsets = np.zeros(num_strips * weight.strip_rows, dtype=np.float32)
        offsets[: weight.rows] = bias
    words = (
        *(step.control[rows_word:], weight.data, strip_bytes, num_strips, rows, rows.strides[0]),
        *(weight.cols, out, weight.rows, offsets, int(accumulate), _token_block(rows.strides[0])),
    )
    form, isa = ALL_FORMS.index(weight.form), ALL_ISAS.index(weight.isa)
    multiply = _linear_kernel(form, isa, weight.strip_rows)
    reads = (rows, out) if accumulate else (rows,)
    program.add(multiply, *words, reads=reads, writes=(out,), weights=weight.data)
