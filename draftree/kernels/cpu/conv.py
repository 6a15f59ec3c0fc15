"""Causal depthwise convolution over tokens, then SiLU.

Each row sees its own input and the kernel - 1 before it: earlier rows of a chain, ancestors in a
tree, then the committed window. A committed pass moves the window on; a tree pass keeps its inputs
per node for a commit.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures)
import numpy as np

from draftree.kernels.cpu.elementwise import row_count
from draftree.kernels.cpu.instruction import LANES
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.pass_args import IS_TREE, NUM_TOKENS, PATH_LEN, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import fma, load, load_i64, silu, splat, store
from draftree.kernels.ops import LayerStore

_COLS = 64  # channels that one thread takes at a time, through all rows


class ConvState(LayerStore):
    """window [kernel - 1, channels]: committed inputs, oldest first; inputs of a tree's nodes."""

    def __init__(self, channels: int, kernel_len: int, max_nodes: int) -> None:
        assert channels % LANES == 0, f"{channels} channels are not a multiple of {LANES}"
        assert kernel_len >= 2
        self.channels, self.kernel_len = channels, kernel_len
        self.window = np.zeros((kernel_len - 1, channels), np.float32)
        self.inputs = np.zeros((max_nodes, channels), np.float32)


@njit(inline="always")
def _copy(target, source, count):
    for c in range(0, 4 * count, 64):
        store(target + c, load(source + c))


@kernel
def _conv_kernel(args, ticket, thread, num_threads):
    control, depths, ancestors, max_nodes = args[0], args[1], args[2], args[3]
    channels, taps = args[4], args[5]
    x, x_row, out, out_row = args[6], args[7], args[8], args[9]
    weight, window, inputs = args[10], args[11], args[12]
    num_rows, is_tree = load_i64(control + 8 * NUM_TOKENS), load_i64(control + 8 * IS_TREE) != 0
    history, stride = taps - 1, 4 * channels
    blocks = (channels + _COLS - 1) // _COLS
    for block in range(blocks * thread // num_threads, blocks * (thread + 1) // num_threads):
        first = 4 * _COLS * block
        count = min(_COLS, channels - _COLS * block)
        for row in range(num_rows):
            depth = row
            if is_tree:
                depth = load_i64(depths + 8 * row)
            for c in range(first, first + 4 * count, 64):
                total = splat(0.0)
                for tap in range(taps):
                    before = depth - history + tap  # below 0 lies the window
                    p = window + (history + before) * stride
                    if before >= 0:
                        source = before
                        if is_tree:
                            source = load_i64(ancestors + 8 * (row * max_nodes + before))
                        p = x + source * x_row
                    total = fma(load(weight + tap * stride + c), load(p + c), total)
                store(out + row * out_row + c, silu(total))
            if is_tree:
                _copy(inputs + row * stride + first, x + row * x_row + first, count)
        if not is_tree:
            for i in range(history):  # later entries are still old when an earlier one takes them
                source = i + num_rows
                p = x + (source - history) * x_row
                if source < history:
                    p = window + source * stride
                _copy(window + i * stride + first, p + first, count)


@kernel
def _conv_commit_kernel(args, ticket, thread, num_threads):
    path_len, path, channels, history = load_i64(args[0]), args[1], args[2], args[3]
    window, inputs, stride = args[4], args[5], 4 * args[2]
    blocks = (channels + _COLS - 1) // _COLS
    for block in range(blocks * thread // num_threads, blocks * (thread + 1) // num_threads):
        first = 4 * _COLS * block
        count = min(_COLS, channels - _COLS * block)
        for i in range(history):
            source = i + path_len
            p = window + source * stride
            if source >= history:
                p = inputs + load_i64(path + 8 * (source - history)) * stride
            _copy(window + i * stride + first, p + first, count)


def record_conv(
    program: Program,
    step: PassArgs,
    x: np.ndarray,
    weight: np.ndarray,
    state: ConvState,
    out: np.ndarray,
) -> None:
    """out [max_tokens, channels] = silu(sum of taps); weight [channels, kernel], last tap: now."""
    assert weight.shape == (state.channels, state.kernel_len), "the weight does not fit the state"
    assert x.shape[1] == out.shape[1] == state.channels
    assert not np.may_share_memory(x, out), "later rows still need the inputs: out must not be x"
    assert all(a.dtype == np.float32 and a.strides[-1] == 4 for a in (x, out))
    by_tap = np.ascontiguousarray(weight.T, dtype=np.float32)
    program.add(
        _conv_kernel,
        *(step.control, step.depths, step.ancestors, step.max_nodes),
        *(state.channels, state.kernel_len, x, x.strides[0], out, out.strides[0]),
        *(by_tap, state.window, state.inputs),
        reads=(x, by_tap, state.window),
        writes=(out, state.window, state.inputs),
    )


def record_conv_commit(program: Program, step: PassArgs, state: ConvState) -> None:
    """Move the window along step.path, from the inputs that the last tree pass stored."""
    program.add(
        _conv_commit_kernel,
        *(row_count(step, PATH_LEN), step.path, state.channels, state.kernel_len - 1),
        *(state.window, state.inputs),
        reads=(state.inputs,),
        writes=(state.window,),
    )
