"""The gated delta rule: a matrix of state per value head, decayed and corrected by every token.

A committed pass advances the committed state in place. A tree pass leaves it alone: it walks the
tree depth-first with one scratch state per depth and keeps keys, values and gates per node, from
which a commit replays the path. All use one update function, so tree + commit, chunks and token by
token are bit-equal. It does not know the projections around it.
"""

# ruff: noqa: ANN001, ANN202  (numba inspects the kernels' signatures)
import math

import numpy as np

from draftree.kernels.cpu.elementwise import row_count
from draftree.kernels.cpu.instruction import LANES
from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.norm import sum_squares
from draftree.kernels.cpu.pass_args import IS_TREE, NUM_TOKENS, PATH_LEN, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import (
    fma,
    load,
    load_f32,
    load_i64,
    load_splat,
    splat,
    store,
    store_f32,
    store_i64,
)
from draftree.kernels.ops import LayerStore

_COLS = 64  # columns of a state that one thread advances at a time
_NORM_EPS = np.float32(1e-6)


class DeltaState(LayerStore):
    """state [value_heads, key dim, value dim]; per node of the last tree what a commit needs."""

    def __init__(self, key_heads: int, value_heads: int, head_dim: int, max_nodes: int) -> None:
        assert head_dim % LANES == 0, f"head_dim {head_dim} is not a multiple of {LANES}"
        assert value_heads % key_heads == 0
        self.key_heads, self.value_heads, self.head_dim = key_heads, value_heads, head_dim
        self.state = np.zeros((value_heads, head_dim, head_dim), np.float32)
        self.keys = np.zeros((max_nodes, key_heads, head_dim), np.float32)  # normalised
        self.values = np.zeros((max_nodes, value_heads, head_dim), np.float32)
        self.gates = np.zeros((max_nodes, value_heads, 2), np.float32)  # decay, beta


def delta_scratch_len(
    step: PassArgs, key_heads: int, value_heads: int, head_dim: int, num_threads: int
) -> int:
    """How many float32 of scratch `record_gated_delta` needs; layers of one shape can share."""
    per_row = 2 * key_heads * head_dim + 2 * value_heads
    per_thread = step.max_nodes * head_dim * _COLS
    return step.max_tokens * per_row + 6 * (step.max_nodes + 1) + num_threads * per_thread


@njit(inline="always")
def _advance_64(source, s_row, target, t_row, k, v, q, gates, out, key_dim, has_out):
    """S = decay source, d = beta (v - k^T S), target = S + k d^T, out = q^T target; 64 columns."""
    decay, beta = load_splat(gates), load_splat(gates + 4)
    a0, a1, a2, a3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    for i in range(key_dim):
        p, ki = source + i * s_row, load_splat(k + 4 * i)
        a0, a1 = fma(ki, load(p) * decay, a0), fma(ki, load(p + 64) * decay, a1)
        a2, a3 = fma(ki, load(p + 128) * decay, a2), fma(ki, load(p + 192) * decay, a3)
    a0, a1 = beta * (load(v) - a0), beta * (load(v + 64) - a1)
    a2, a3 = beta * (load(v + 128) - a2), beta * (load(v + 192) - a3)
    o0, o1, o2, o3 = splat(0.0), splat(0.0), splat(0.0), splat(0.0)
    for i in range(key_dim):
        p, t, ki = source + i * s_row, target + i * t_row, load_splat(k + 4 * i)
        s0, s1 = fma(ki, a0, load(p) * decay), fma(ki, a1, load(p + 64) * decay)
        s2, s3 = fma(ki, a2, load(p + 128) * decay), fma(ki, a3, load(p + 192) * decay)
        store(t, s0)
        store(t + 64, s1)
        store(t + 128, s2)
        store(t + 192, s3)
        if has_out:
            qi = load_splat(q + 4 * i)
            o0, o1 = fma(qi, s0, o0), fma(qi, s1, o1)
            o2, o3 = fma(qi, s2, o2), fma(qi, s3, o3)
    if has_out:
        store(out, o0)
        store(out + 64, o1)
        store(out + 128, o2)
        store(out + 192, o3)


@njit(inline="always")
def _advance_16(source, s_row, target, t_row, k, v, q, gates, out, key_dim, has_out):
    """The same for 16 columns."""
    decay, beta = load_splat(gates), load_splat(gates + 4)
    a = splat(0.0)
    for i in range(key_dim):
        a = fma(load_splat(k + 4 * i), load(source + i * s_row) * decay, a)
    a = beta * (load(v) - a)
    o = splat(0.0)
    for i in range(key_dim):
        s = fma(load_splat(k + 4 * i), a, load(source + i * s_row) * decay)
        store(target + i * t_row, s)
        if has_out:
            o = fma(load_splat(q + 4 * i), s, o)
    if has_out:
        store(out, o)


@njit
def _advance(cols, source, s_row, target, t_row, k, v, q, gates, out, key_dim, has_out):
    """One token for some columns of a head's state; without has_out, q and out are not used."""
    if cols == _COLS:
        if has_out:
            _advance_64(source, s_row, target, t_row, k, v, q, gates, out, key_dim, True)
        else:
            _advance_64(source, s_row, target, t_row, k, v, q, gates, out, key_dim, False)
    else:
        for c in range(0, 4 * cols, 64):
            p, t = source + c, target + c
            _advance_16(p, s_row, t, t_row, k, v + c, q, gates, out + c, key_dim, has_out)


@njit
def _depth_first(parents, num_nodes, order):
    """order[0 : num_nodes] = the nodes, every subtree in one piece; room for 3 num_nodes + 2."""
    first, after = order + 8 * num_nodes, order + 8 * (2 * num_nodes + 1)
    for i in range(num_nodes + 1):
        store_i64(first + 8 * i, -1)
    for i in range(num_nodes - 1, -1, -1):  # num_nodes stands for "no parent"
        parent = load_i64(parents + 8 * i)
        parent = num_nodes if parent < 0 else parent
        store_i64(after + 8 * i, load_i64(first + 8 * parent))
        store_i64(first + 8 * parent, i)
    node = load_i64(first + 8 * num_nodes)
    for i in range(num_nodes):
        store_i64(order + 8 * i, node)
        following = load_i64(first + 8 * node)
        while following < 0 and node >= 0:
            following = load_i64(after + 8 * node)
            node = load_i64(parents + 8 * node)
        node = following


@njit(inline="always")
def _normalize(source, target, count, scale):
    factor = splat(scale / math.sqrt(sum_squares(source, count) + _NORM_EPS))
    for c in range(0, 4 * count, 64):
        store(target + c, load(source + c) * factor)


@njit(inline="always")
def _write_gates(target, alpha, beta_logit, ssm_a, dt_bias):
    """decay = e^(ssm_a softplus(alpha + dt_bias)), beta = sigmoid(beta_logit), from float64."""
    x = np.float64(load_f32(alpha)) + np.float64(load_f32(dt_bias))
    softplus = max(x, 0.0) + math.log1p(math.exp(-abs(x)))
    store_f32(target, np.float32(math.exp(np.float64(load_f32(ssm_a)) * softplus)))
    store_f32(target + 4, np.float32(1.0 / (1.0 + math.exp(-np.float64(load_f32(beta_logit))))))


@kernel
def _delta_prepare_kernel(args, ticket, thread, num_threads):
    control, parents = args[0], args[1]
    key_heads, value_heads, head_dim = args[2], args[3], args[4]
    qkv, qkv_row, alpha, alpha_row = args[5], args[6], args[7], args[8]
    beta, beta_row = args[9], args[10]
    ssm_a, dt_bias = args[11], args[12]
    queries, keys, gates, order = args[13], args[14], args[15], args[16]
    node_keys, node_values, node_gates = args[17], args[18], args[19]
    num_rows, is_tree = load_i64(control + 8 * NUM_TOKENS), load_i64(control + 8 * IS_TREE) != 0
    if is_tree and thread == num_threads - 1:
        _depth_first(parents, num_rows, order)
    key_cols = key_heads * head_dim
    scale = np.float32(1.0 / math.sqrt(head_dim))
    per_row = key_heads + value_heads
    total = num_rows * per_row
    for item in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        row, head = item // per_row, item % per_row
        source = qkv + row * qkv_row
        if head < key_heads:
            place = 4 * (row * key_cols + head * head_dim)
            _normalize(source + 4 * head * head_dim, queries + place, head_dim, scale)
            p_k = source + 4 * (key_cols + head * head_dim)
            _normalize(p_k, keys + place, head_dim, np.float32(1.0))
            if is_tree:
                for c in range(0, 4 * head_dim, 64):
                    store(node_keys + place + c, load(keys + place + c))
            continue
        head -= key_heads
        place = 8 * (row * value_heads + head)
        p_alpha, p_beta = alpha + row * alpha_row + 4 * head, beta + row * beta_row + 4 * head
        _write_gates(gates + place, p_alpha, p_beta, ssm_a + 4 * head, dt_bias + 4 * head)
        if is_tree:
            store_f32(node_gates + place, load_f32(gates + place))
            store_f32(node_gates + place + 4, load_f32(gates + place + 4))
            p_v = source + 4 * (2 * key_cols + head * head_dim)
            target = node_values + 4 * (row * value_heads + head) * head_dim
            for c in range(0, 4 * head_dim, 64):
                store(target + c, load(p_v + c))


@kernel
def _delta_kernel(args, ticket, thread, num_threads):
    control, depths, order = args[0], args[1], args[2]
    key_heads, value_heads, head_dim, cols = args[3], args[4], args[5], args[6]
    v, v_row, out, out_row = args[7], args[8], args[9], args[10]
    queries, keys, gates = args[11], args[12], args[13]
    state, scratch, thread_bytes, scratch_threads = args[14], args[15], args[16], args[17]
    num_rows, is_tree = load_i64(control + 8 * NUM_TOKENS), load_i64(control + 8 * IS_TREE) != 0
    if thread >= scratch_threads:
        return
    num_threads = min(num_threads, scratch_threads)
    blocks = head_dim // cols
    total = value_heads * blocks
    state_row, own_row = 4 * head_dim, 4 * cols
    own = scratch + thread * thread_bytes
    for item in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        head, first = item // blocks, item % blocks * cols
        committed = state + 4 * (head * head_dim * head_dim + first)
        for i in range(num_rows):
            row = i
            source, s_row, target, t_row = committed, state_row, committed, state_row
            if is_tree:
                row = load_i64(order + 8 * i)
                depth = load_i64(depths + 8 * row)
                target, t_row = own + depth * own_row * head_dim, own_row
                if depth > 0:
                    source, s_row = target - own_row * head_dim, own_row
            p_key = 4 * (row * key_heads + head % key_heads) * head_dim
            column = 4 * (head * head_dim + first)
            k, q, p_v = keys + p_key, queries + p_key, v + row * v_row + column
            gate, p_out = gates + 8 * (row * value_heads + head), out + row * out_row + column
            _advance(cols, source, s_row, target, t_row, k, p_v, q, gate, p_out, head_dim, True)


@kernel
def _delta_commit_kernel(args, ticket, thread, num_threads):
    path_len, path = load_i64(args[0]), args[1]
    key_heads, value_heads, head_dim, cols = args[2], args[3], args[4], args[5]
    state, keys, values, gates = args[6], args[7], args[8], args[9]
    blocks = head_dim // cols
    total = value_heads * blocks
    for item in range(total * thread // num_threads, total * (thread + 1) // num_threads):
        head, first = item // blocks, item % blocks * cols
        committed, row = state + 4 * (head * head_dim * head_dim + first), 4 * head_dim
        for j in range(path_len):
            node = load_i64(path + 8 * j)
            k = keys + 4 * (node * key_heads + head % key_heads) * head_dim
            v = values + 4 * ((node * value_heads + head) * head_dim + first)
            gate = gates + 8 * (node * value_heads + head)
            _advance(cols, committed, row, committed, row, k, v, k, gate, v, head_dim, False)


def record_gated_delta(
    program: Program,
    step: PassArgs,
    qkv: np.ndarray,
    alpha: np.ndarray,
    beta_logit: np.ndarray,
    ssm_a: np.ndarray,
    dt_bias: np.ndarray,
    state: DeltaState,
    out: np.ndarray,
    scratch: np.ndarray,
) -> None:
    """out [max_tokens, value_heads * head_dim] from qkv: queries, keys, values after convolution.

    alpha, beta_logit [max_tokens, value_heads]; ssm_a, dt_bias [value_heads]. Value head j uses
    key head j % key_heads. Queries and keys are normalised here, queries also scaled by 1 /
    sqrt(head_dim).
    """
    kh, vh, dim = state.key_heads, state.value_heads, state.head_dim
    assert qkv.shape[1] == (2 * kh + vh) * dim and out.shape[1] == vh * dim
    cols = _COLS if dim % _COLS == 0 else LANES
    lens = (step.max_tokens * kh * dim,) * 2 + (2 * step.max_tokens * vh, 6 * (step.max_nodes + 1))
    assert scratch.dtype == np.float32 and scratch.flags.c_contiguous
    queries, keys, gates, order, own = np.split(scratch.reshape(-1), np.cumsum(lens))
    thread_len = step.max_nodes * dim * _COLS
    assert own.size >= thread_len, "the scratch is too small, see delta_scratch_len"
    tree = (state.keys, state.values, state.gates)
    inputs = (qkv, alpha, beta_logit, ssm_a, dt_bias)
    assert all(x.dtype == np.float32 and x.strides[-1] == 4 for x in inputs)
    program.add(
        _delta_prepare_kernel,
        *(step.control, step.parents, kh, vh, dim, qkv, qkv.strides[0], alpha, alpha.strides[0]),
        *(beta_logit, beta_logit.strides[0], ssm_a, dt_bias, queries, keys, gates, order, *tree),
        reads=inputs,
        writes=(scratch, *tree),
    )
    values = qkv[:, 2 * kh * dim :]
    program.add(
        _delta_kernel,
        *(step.control, step.depths, order, kh, vh, dim, cols, values, values.strides[0]),
        *(out, out.strides[0], queries, keys, gates, state.state, own, 4 * thread_len),
        own.size // thread_len,
        reads=(qkv, scratch, state.state),
        writes=(out, scratch, state.state),
    )


def record_delta_commit(program: Program, step: PassArgs, state: DeltaState) -> None:
    """Advance the committed state along step.path, from what the last tree pass stored per node."""
    dim = state.head_dim
    cols = _COLS if dim % _COLS == 0 else LANES
    tree = (state.keys, state.values, state.gates)
    program.add(
        _delta_commit_kernel,
        *(row_count(step, PATH_LEN), step.path, state.key_heads, state.value_heads, dim, cols),
        *(state.state, *tree),
        reads=tree,
        writes=(state.state,),
    )
