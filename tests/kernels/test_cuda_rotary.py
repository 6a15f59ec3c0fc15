"""Norms of heads and rotary positions on the GPU: against float64, and keys and values on their way
into the cache against the steps one by one, in bits.
"""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from benchmarks.kv_coder import rotate  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.kv_cache import CudaKv, KvShape, PageTable  # noqa: E402
from draftree.kernels.cuda.ops import CudaOps  # noqa: E402
from draftree.kernels.cuda.pass_args import NUM_TOKENS, CudaPassArgs  # noqa: E402
from draftree.kernels.cuda.rotary import RopeArgs, rope_and_store_kv, rope_table  # noqa: E402
from draftree.kernels.cuda.store import WeightStore  # noqa: E402
from draftree.kernels.ops import HeadNorm, Heads, Rope  # noqa: E402
from draftree.kernels.quant.kv_format import KEY_FORMATS, VALUE_FORMATS  # noqa: E402
from tests.kernels.cuda_cache import POISON, write_rows  # noqa: E402
from tests.kernels.passes import make_tree  # noqa: E402
from tests.kernels.reference.norm import rms_norm_reference  # noqa: E402
from tests.kernels.reference.rope import rope_reference  # noqa: E402

EPS, NUM_POSITIONS = 1e-5, 3000


def step_at(gpu: Gpu, positions: list[int], num_live: int) -> CudaPassArgs:
    step = CudaPassArgs(len(positions), 1, gpu)
    step.positions[: len(positions)] = torch.tensor(positions, dtype=torch.int32)
    step.control[NUM_TOKENS] = num_live
    return step


def frequencies(rotary_dim: int) -> np.ndarray:
    return 1e4 ** (-np.arange(0, rotary_dim, 2, dtype=np.float64) / rotary_dim)


def heads_of(num_rows: int, num_heads: int, head_dim: int, gpu: Gpu, seed: int = 0):
    """Columns of a wider array of float32."""
    generator = torch.Generator().manual_seed(seed)
    wide = torch.randn((num_rows, 8 + num_heads * head_dim + 4), generator=generator) * 3
    return wide.to(gpu.place)[:, 8 : 8 + num_heads * head_dim]


def expect(x, head_dim, norm, rotary_dim, positions, interleaved) -> torch.Tensor:
    out = x.cpu().double().unflatten(1, (-1, head_dim))
    if norm is not None:
        out = rms_norm_reference(out, norm.cpu(), EPS)
    if rotary_dim:
        inv_freq = torch.from_numpy(frequencies(rotary_dim))
        out = rope_reference(out, positions.cpu(), inv_freq, interleaved)
    return out.flatten(1)


def rope_alone(turn: RopeArgs, step: CudaPassArgs, gpu: Gpu) -> None:
    """In place, as queries; what is written beside them is thrown away."""
    zeros = torch.zeros((len(turn.x), turn.head_dim), device=gpu.place)
    cache = new_cache(1, turn.head_dim, NUM_POSITIONS, gpu)
    rope_and_store_kv(turn, turn._replace(x=zeros), zeros, cache, step, gpu)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("head_dim", "rotary_dim"), [(16, 16), (32, 8), (64, 64), (256, 64), (256, 0), (80, 80)]
)
@pytest.mark.parametrize("has_norm", [False, True])
def test_heads_equal_the_reference(
    head_dim: int, rotary_dim: int, interleaved: bool, has_norm: bool, any_gpu: Gpu
) -> None:
    x = heads_of(6, 5, head_dim, any_gpu)
    around = x.clone()
    norm = torch.linspace(0.5, 2, head_dim, device=any_gpu.place) if has_norm else None
    table = rope_table(frequencies(rotary_dim), NUM_POSITIONS, any_gpu) if rotary_dim else None
    step = step_at(any_gpu, [0, 1, 17, 2999, 17, 5], num_live=5)
    expected = expect(x, head_dim, norm, rotary_dim, step.positions[:6], interleaved)
    rope_alone(RopeArgs(x, norm, EPS, head_dim, table, interleaved), step, any_gpu)
    torch.testing.assert_close(x.cpu().double()[:5], expected[:5], atol=3e-6, rtol=1e-6)
    assert torch.equal(x[5], around[5]), "a row that is not live was touched"


TREE = make_tree([0, 0, 1, 1, 3, 5], 6)


def set_pass(step: CudaPassArgs, *, is_tree: bool, committed: int) -> None:
    nodes = np.zeros(len(TREE), np.int32)
    if is_tree:
        step.set_tree(nodes, np.array(TREE.parents), TREE.depths, committed)
    else:
        step.set_chain(nodes, committed)


def new_cache(kv_heads: int, head_dim: int, capacity: int, gpu: Gpu) -> CudaKv:
    return CudaKv(KvShape(kv_heads, head_dim), PageTable(capacity, gpu), gpu)


def bits(cache: CudaKv) -> torch.Tensor:
    return cache.pool


@pytest.mark.parametrize("is_tree", [False, True])
@pytest.mark.parametrize("has_norm", [False, True])
@pytest.mark.parametrize(
    ("q_heads", "kv_heads", "head_dim", "rotary_dim"),
    [
        (4, 2, 16, 16),
        (0, 3, 32, 8),
        (5, 5, 64, 64),
        (3, 1, 80, 80),
        (6, 1, 256, 64),
        (0, 4, 128, 0),
    ],
)
def test_one_launch_equals_turning_and_then_writing(
    q_heads: int,
    kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    has_norm: bool,
    is_tree: bool,
    any_gpu: Gpu,
) -> None:
    num_rows, committed, gpu = len(TREE) + 2, 50, any_gpu
    table = rope_table(frequencies(rotary_dim), NUM_POSITIONS, gpu) if rotary_dim else None
    step = CudaPassArgs(num_rows, num_rows, gpu)
    set_pass(step, is_tree=is_tree, committed=committed)
    q, k, v = (
        heads_of(num_rows, heads, head_dim, gpu, seed)
        for seed, heads in enumerate((q_heads, kv_heads, kv_heads))
    )
    k[1, 3], v[0, 2], v[2, 1] = -1e8, 1e9, -float("inf")
    norms = [torch.linspace(a, 2, head_dim, device=gpu.place) if has_norm else None for a in (0, 1)]
    rest = head_dim, table, head_dim == 16
    queries, keys = RopeArgs(q, norms[0], EPS, *rest), RopeArgs(k, norms[1], 0.25, *rest)

    q_alone, k_alone = queries._replace(x=q.clone()), keys._replace(x=k.clone())
    apart, together = (new_cache(kv_heads, head_dim, committed + 20, gpu) for _ in range(2))
    apart.pool.fill_(POISON), together.pool.fill_(POISON)
    if q_heads:
        rope_alone(q_alone, step, gpu)
    rope_alone(k_alone, step, gpu)
    write_rows(k_alone.x, v, apart, step)

    kept = k.clone(), v.clone()
    rope_and_store_kv(queries if q_heads else None, keys, v, together, step, gpu)
    assert torch.equal(q, q_alone.x)
    assert torch.equal(bits(together), bits(apart))
    assert torch.equal(k, kept[0]) and torch.equal(v, kept[1])
    is_written = (together.pool.view(torch.int16) != -1).sum()
    assert is_written == 2 * kv_heads * len(TREE) * head_dim


def test_keys_in_the_cache_equal_the_reference(any_gpu: Gpu) -> None:
    k, v = heads_of(6, 2, 64, any_gpu), heads_of(6, 2, 64, any_gpu, seed=1)
    norm = torch.linspace(0.5, 2, 64, device=any_gpu.place)
    table = rope_table(frequencies(32), NUM_POSITIONS, any_gpu)
    positions, cache = [0, 1, 17, 2999, 16, 5], new_cache(2, 64, NUM_POSITIONS, any_gpu)
    step = step_at(any_gpu, positions, num_live=6)
    rope_and_store_kv(None, RopeArgs(k, norm, EPS, 64, table, False), v, cache, step, any_gpu)
    expected = expect(k, 64, norm, 32, step.positions[:6], False), v.cpu().double()
    for part, rows in zip(cache.rows(0, NUM_POSITIONS), expected, strict=True):
        halves = part.contiguous().view(torch.float16)
        got = halves[:, positions].transpose(0, 1).flatten(1).cpu().double()
        torch.testing.assert_close(got, rows, atol=1e-4, rtol=1e-3)


@pytest.mark.parametrize("dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["q8_0", "q4", "tq3_0"])
def test_formats_are_written_as_the_plain_coder_does(name: str, dim: int, any_gpu: Gpu) -> None:
    """Sums of squares run in another order, so a number in thousands may fall beside a border."""
    q, k, v = (heads_of(40, 2, dim, any_gpu, seed) for seed in range(3))
    k[3], v[4], v[5, :9] = 0.0, 0.0, 50.0
    shape, gpu = KvShape(2, dim, KEY_FORMATS[name], VALUE_FORMATS[name]), any_gpu
    cache, expected = (CudaKv(shape, PageTable(300, gpu), gpu) for _ in range(2))
    step, before = CudaPassArgs(40, 1, gpu), q.clone()
    step.set_chain(np.zeros(40, np.int32), 230)
    args = None, EPS, dim, None, False
    rope_and_store_kv(RopeArgs(q, *args), RopeArgs(k, *args), v, cache, step, gpu)
    write_rows(k, v, expected, step)
    differs = (cache.pool != expected.pool).sum() / cache.shape.page_bytes * 256 / 40
    assert differs < 2e-3
    turned = rotate(before.unflatten(1, (2, dim)).cpu().numpy())
    torch.testing.assert_close(q.unflatten(1, (2, dim)).cpu(), torch.from_numpy(turned))


def test_rows_have_the_same_bits_alone(any_gpu: Gpu) -> None:
    x, norm = heads_of(9, 7, 64, any_gpu), torch.linspace(0.5, 2, 64, device=any_gpu.place)
    rest = norm, EPS, 64, rope_table(frequencies(32), NUM_POSITIONS, any_gpu), False
    before = x.clone()
    rope_alone(RopeArgs(x, *rest), step_at(any_gpu, list(range(100, 109)), num_live=9), any_gpu)
    for row in (0, 4, 8):
        one = before[row : row + 1].clone()
        rope_alone(RopeArgs(one, *rest), step_at(any_gpu, [100 + row], num_live=1), any_gpu)
        assert torch.equal(one[0], x[row])


def test_no_live_rows_change_nothing(any_gpu: Gpu) -> None:
    q, k, v = (heads_of(3, 2, 32, any_gpu, seed) for seed in range(3))
    before, table = q.clone(), rope_table(frequencies(32), 8, any_gpu)
    rest = torch.ones(32, device=any_gpu.place), EPS, 32, table, False
    step, cache = step_at(any_gpu, [1, 2, 3], num_live=0), new_cache(2, 32, 8, any_gpu)
    rope_and_store_kv(RopeArgs(q, *rest), RopeArgs(k, *rest), v, cache, step, any_gpu)
    assert torch.equal(q, before) and not cache.pool.any()


def test_operations_turn_and_write_in_one_launch(any_gpu: Gpu) -> None:
    """With queries and without; keys stay as they are."""
    ops = CudaOps(WeightStore(any_gpu), max_tokens=8, max_nodes=8, max_ctx=64)
    q, k, v = (heads_of(8, heads, 32, any_gpu, heads) for heads in (4, 2, 2))
    rope = Rope(ops.rope_table(frequencies(16)), 32, interleaved=True)
    before, norm = q.clone(), HeadNorm(ops.constant(np.ones(32)), EPS)
    ops.step.set_chain(np.zeros(5, np.int32), 7)
    for turned in ((q, k), (k,)):
        cache, expected = ops.new_kv(2, 32), new_cache(2, 32, 64, any_gpu)
        copies = [x.clone() for x in turned]
        for x in copies:
            rope_alone(RopeArgs(x, norm.weight, EPS, 32, rope.table, True), ops.step, any_gpu)
        write_rows(copies[-1], v, expected, ops.step)
        kept = k.clone()
        with ops.capture() as program:
            queries = Heads(q, norm) if len(turned) == 2 else None
            ops.rope_and_store_kv(queries, Heads(k, norm), v, cache, rope)
        program.launch(8)
        assert torch.equal(cache.pool, expected.pool)
        assert torch.equal(k, kept), "keys were turned in place"
        if len(turned) == 2:
            assert torch.equal(q, copies[0]) and not torch.equal(q, before)


def test_table_is_exact_far_out(any_gpu: Gpu) -> None:
    table = rope_table(frequencies(64), 40000, any_gpu).cpu().double().numpy()
    for position in (0, 16383, 16384, 39999):
        angles = position * frequencies(64)
        np.testing.assert_allclose(table[position, :, 0], np.cos(angles), atol=6e-8)
        np.testing.assert_allclose(table[position, :, 1], np.sin(angles), atol=6e-8)


def test_what_does_not_fit_is_refused(any_gpu: Gpu) -> None:
    x, table = heads_of(3, 2, 32, any_gpu), rope_table(frequencies(64), 8, any_gpu)
    step, cache = step_at(any_gpu, [1, 2, 3], num_live=3), new_cache(2, 32, 8, any_gpu)
    plain = RopeArgs(x, None, EPS, 32, None, False)

    def refuse(match: str, q: RopeArgs | None, k: RopeArgs) -> None:
        with pytest.raises(ValueError, match=match):
            rope_and_store_kv(q, k, x, cache, step, any_gpu)

    refuse("64 rotary dims of heads of 32", None, plain._replace(table=table))
    refuse("norm of 32", None, plain._replace(norm=torch.ones(16, device=any_gpu.place)))
    refuse("float32 rows of 64", None, plain._replace(x=heads_of(3, 1, 32, any_gpu)))
    refuse("same rows", None, plain.first(2))
    refuse("turned alike", plain._replace(interleaved=True), plain)
    refuse("turned alike", plain._replace(table=table), plain)
    refuse("turned alike", plain._replace(head_dim=16), plain._replace(head_dim=16))
