"""The emulator itself: what CUDA promises holds, and what a chip would not forgive is refused."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.compile import Gpu, load_kernel  # noqa: E402
from tests.kernels.emulator import EmulationError, Snippet, emulated_gpu  # noqa: E402


def launch(
    gpu: Gpu, parameters: str, body: str, *args, block=32, grid=(1,), shared_bytes=0, files=()
) -> None:
    code = f'extern "C" __global__ void kernel({parameters}) {{\n{body}\n}}\n'
    source = Snippet("kernel", ("bits", *files), code=code)
    load_kernel(source, gpu).launch(grid, block, *args, shared_bytes=shared_bytes)


@pytest.fixture(scope="module")
def gpu() -> Gpu:
    return emulated_gpu()


def ints(*shape: int) -> torch.Tensor:
    return torch.full(shape, -7, dtype=torch.int32)


def test_threads_meet_at_barriers_and_share_memory(gpu: Gpu) -> None:
    out = ints(3, 2, 96)
    body = """
      extern __shared__ __align__(16) int dynamic[];
      __shared__ int fixed[96];
      const int i = threadIdx.x, block = blockIdx.y * gridDim.x + blockIdx.x;
      for (int round = 0; round < 3; round++) {
        dynamic[i] = i * 10 + block;
        __syncthreads();
        fixed[i] = dynamic[95 - i] + round;
        __syncthreads();
      }
      out[block * blockDim.x + i] = fixed[(i + 1) % 96];"""
    launch(gpu, "int* out", body, out, block=96, grid=(2, 3), shared_bytes=384)
    i, block = torch.arange(96), torch.arange(6).view(3, 2, 1)
    assert torch.equal(out, (10 * (95 - (i + 1) % 96) + block + 2).int())


def test_a_forgotten_barrier_shows(gpu: Gpu) -> None:
    out = torch.zeros(2, 64)
    body = """
      __shared__ float values[64];
      values[threadIdx.x] = 1.0f;
      BARRIER
      out[threadIdx.x] = values[threadIdx.x ^ 32];
      __syncthreads();
      values[threadIdx.x] = 2.0f;
      BARRIER
      out[64 + threadIdx.x] = values[threadIdx.x ^ 32];"""
    launch(gpu, "float* out", body.replace("BARRIER", "__syncthreads();"), out, block=64)
    assert (out[0] == 1).all() and (out[1] == 2).all()
    launch(gpu, "float* out", body.replace("BARRIER", ""), out, block=64)
    # The first half of the block runs first, then, past a barrier, the second.
    assert out[0, :32].isnan().all() and (out[0, 32:] == 1).all()
    assert (out[1, 32:] == 1).all() and (out[1, :32] == 2).all()


def test_votes_of_a_block_and_threads_that_have_returned(gpu: Gpu) -> None:
    out = ints(70, 4)
    body = """
      const int i = threadIdx.x;
      if (i == 5 || i >= 64) return;
      out[i * 4] = __syncthreads_count(i % 3 == 0);
      out[i * 4 + 1] = __syncthreads_and(i < 64);
      out[i * 4 + 2] = __syncthreads_or(i == 63);
      out[i * 4 + 3] = __syncthreads_and(i);"""
    launch(gpu, "int* out", body, out, block=70)
    rows = [i for i in range(64) if i != 5]
    assert (out[rows] == torch.tensor([22, 1, 1, 0])).all()
    assert (out[[5, 64, 69]] == -7).all()


def test_shuffles(gpu: Gpu) -> None:
    out = ints(8, 32)
    body = """
      const int i = threadIdx.x;
      out[i] = __shfl_sync(~0u, i * 3, i + 5);
      out[32 + i] = __shfl_sync(~0u, i, 1, 8);
      out[64 + i] = __shfl_up_sync(~0u, i, 3);
      out[96 + i] = __shfl_down_sync(~0u, i, 3, 16);
      out[128 + i] = __shfl_xor_sync(~0u, i, 9);
      out[160 + i] = static_cast<int>(__shfl_sync(~0u, static_cast<u64>(i) << 33, 7) >> 32);
      out[192 + i] = static_cast<int>(__shfl_xor_sync(~0u, i + 0.5f, 1) * 2.0f);
      out[224 + i] = i < 16 ? __shfl_sync(0xFFFFu, i, 2) : __shfl_sync(0xFFFF0000u, i, 20);"""
    launch(gpu, "int* out", body, out)
    i = np.arange(32)
    expected = [
        *((i + 5) % 32 * 3, i // 8 * 8 + 1, np.where(i < 3, i, i - 3)),
        *(np.where(i % 16 < 13, i + 3, i), i ^ 9, np.full(32, 14), (i ^ 1) * 2 + 1),
        np.where(i < 16, 2, 20),
    ]
    assert np.array_equal(out.numpy(), np.stack(expected))


def test_votes_and_sums_of_a_warp(gpu: Gpu) -> None:
    out = ints(9, 32)
    body = """
      const int i = threadIdx.x;
      out[i] = __ballot_sync(~0u, i & 1);
      out[32 + i] = __any_sync(~0u, i == 3) * 2 + __all_sync(~0u, i < 31);
      out[64 + i] = __reduce_add_sync(~0u, i);
      out[96 + i] = __reduce_max_sync(~0u, -i - 1);
      out[128 + i] = __reduce_min_sync(~0u, static_cast<u32>(-i - 1)) == 0xFFFFFFE0u;
      out[160 + i] = __match_any_sync(~0u, i % 4);
      if (i % 2) out[192 + i] = __reduce_or_sync(0xAAAAAAAAu, 1 << i % 4);
      __syncwarp();
      if (i >= 8) return;
      out[256 + i] = __all_sync(~0u, i < 8);
      out[224 + i] = __activemask() >> i & 1;"""
    launch(gpu, "int* out", body, out)
    i = np.arange(32)
    assert (out[0] == -0x55555556).all() and (out[1] == 2).all()
    assert (out[2] == 496).all() and (out[3] == -1).all() and (out[4] == 1).all()
    assert np.array_equal(out[5].numpy().view(np.uint32), 0x11111111 << (i % 4))
    assert (out[6, 1::2] == 10).all() and (out[6, 0::2] == -7).all()
    assert (out[7:, :8] == 1).all() and (out[7:, 8:] == -7).all()


def test_atomics_and_the_last_block(gpu: Gpu) -> None:
    counters, longs = torch.zeros(8, dtype=torch.int32), torch.zeros(2, dtype=torch.int64)
    floats, out = torch.zeros(2), ints(4)
    body = """
      __shared__ bool is_last;
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      atomicAdd(counters, 2), atomicMax(counters + 1, i), atomicMin(counters + 2, -i);
      atomicAdd(longs, 1ull << 33), atomicAdd(floats, 0.5f), atomicOr(counters + 3, 1 << i % 7);
      for (bool done = false; !done;) {  // a lock
        if (atomicCAS(counters + 4, 0, 1)) continue;
        counters[5] = counters[5] + 1;
        atomicExch(counters + 4, 0), done = true;
      }
      __threadfence();
      __syncthreads();
      if (threadIdx.x == 0) is_last = atomicAdd(counters + 6, 1) == gridDim.x - 1;
      __syncthreads();
      if (is_last && threadIdx.x < 4) out[threadIdx.x] = __ldcg(counters + threadIdx.x);"""
    parameters = "int* counters, u64* longs, float* floats, int* out"
    launch(gpu, parameters, body, counters, longs, floats, out, block=64, grid=(5,))
    assert out.tolist() == [640, 319, -319, 127]
    assert longs[0] == 320 << 33 and floats[0] == 160.0 and counters[5] == 320


def test_matrix_instructions_and_loads_of_matrices(gpu: Gpu) -> None:
    generator = torch.Generator().manual_seed(3)
    a, b = (torch.randn(size, generator=generator).half() for size in ((16, 16), (8, 16)))
    c, out = torch.randn((16, 8), generator=generator), torch.zeros(3, 16, 8)
    body = """
      __shared__ __align__(16) u16 sa[16][16], sb[8][16], st[16][8];
      const int lane = threadIdx.x, g = lane / 4, t = lane % 4;
      for (int i = lane; i < 256; i += 32) sa[i / 16][i % 16] = a[i];
      for (int i = lane; i < 128; i += 32) sb[i / 16][i % 16] = b[i], st[i % 16][i / 16] = b[i];
      __syncwarp();
      u32 ra[4], rb[2], rt[2], rb4[4];
      load_matrix_x4(ra, &sa[lane % 16][lane / 16 * 8]);
      load_matrix_x2(rb, &sb[lane % 8][lane / 8 % 2 * 8]);
      load_matrix_x2_trans(rt, &st[lane % 16][0]);
      load_matrix_x4_trans(rb4, &st[lane % 16][0]);
      float sum[3][4];
      for (int i = 0; i < 4; i++) sum[0][i] = c[(g + i / 2 * 8) * 8 + t * 2 + i % 2];
      mma(sum[0], ra, rb[0], rb[1]);
      mma_new(sum[1], ra, rt[0], rb4[1]);
      mma_new_short(sum[2], ra + 2, rb[1]);  // the columns from 8 on
      for (int n = 0; n < 3; n++)
        for (int i = 0; i < 4; i++)
          out[n * 128 + (g + i / 2 * 8) * 8 + t * 2 + i % 2] = sum[n][i];"""
    launch(gpu, "const u16* a, const u16* b, const float* c, float* out", body, a, b, c, out)
    product = a.double() @ b.double().T
    upper = a.double()[:, 8:] @ b.double()[:, 8:].T
    for got, expected in zip(out, (product + c, product, upper), strict=True):
        assert torch.allclose(got.double(), expected, rtol=1e-6, atol=1e-5)


def test_halves_round_as_they_should(gpu: Gpu) -> None:
    halves = np.arange(65536, dtype=np.uint32).astype(np.uint16)
    rng = np.random.default_rng(0)
    floats = rng.integers(0, 2**32, 65536, dtype=np.uint32).view(np.float32)
    near = halves.view(np.float16).astype(np.float32)
    nudge = 1 + rng.integers(-2, 3, 30000) * 2.0**-12
    floats[:30000] = near[:30000] * nudge.astype(np.float32)
    floats[30000:30009] = [
        65519.9,
        65520,
        65504,
        2**-25,
        2**-24 * 1.5,
        -(2**-25) * 1.01,
        0,
        -0.0,
        1,
    ]
    wide, narrow = torch.zeros(65536), torch.zeros(65536, dtype=torch.int16)
    pairs = torch.zeros((2, 32768), dtype=torch.int32)
    body = """
      const int i = blockIdx.x * blockDim.x + threadIdx.x;
      wide[i] = i % 2 ? upper_half(halves[i - 1] | halves[i] << 16) : from_half(halves[i]);
      narrow[i] = to_half(floats[i]);
      if (i >= 32768) return;
      const u32 a = halves[i] | halves[i + 1] << 16, b = halves[i * 7919 % 65536] | 0x3C010000;
      pairs[i] = hmul2(a, b), pairs[32768 + i] = hsub2(a, b);"""
    parameters = "const u16* halves, const float* floats, float* wide, u16* narrow, u32* pairs"
    arrays = torch.from_numpy(halves.view(np.int16)), torch.from_numpy(floats)
    launch(gpu, parameters, body, *arrays, wide, narrow, pairs, block=1024, grid=(64,))
    assert np.array_equal(wide.numpy(), near, equal_nan=True)
    with np.errstate(all="ignore"):
        expected = floats.astype(np.float16)
        assert np.array_equal(narrow.numpy().view(np.float16), expected, equal_nan=True)
        i = np.arange(32768)
        a = np.stack([halves[i], halves[i + 1]], 1).view(np.float16)
        b = np.stack([halves[i * 7919 % 65536], np.full(32768, 0x3C01, np.uint16)], 1)
        for got, wanted in zip(
            pairs, (a * b.view(np.float16), a - b.view(np.float16)), strict=True
        ):
            assert np.array_equal(
                got.numpy().view(np.float16).reshape(-1, 2), wanted, equal_nan=True
            )


def test_single_instructions(gpu: Gpu) -> None:
    out = torch.zeros(20, dtype=torch.int64)
    body = """
      if (threadIdx.x) return;
      const u32 v = 0x89ABCDEFu;
      const u64 values[] = {__byte_perm(v, 0x01234567u, 0x7140), __byte_perm(v, 0, 0x4848),
          __funnelshift_r(v, 0x12345678u, 8), __funnelshift_l(v, 0x12345678u, 8), __popc(v),
          __clz(0x00F0),
          __ffs(0x0100), __brev(1u), __umulhi(v, v), __umul64hi(~0ull, 16), max(-1, 2), min(3u, 7),
          __float_as_uint(__fmaf_rn(1.0f + 0x1p-13f, 1.0f - 0x1p-13f, -1.0f)),
          __float_as_uint(__fdiv_rn(1.0f, 3.0f)),
          __float_as_uint(__fadd_rn(__fmul_rn(1.0f + 0x1p-13f, 1.0f - 0x1p-13f), -1.0f)),
          static_cast<u32>(__float2int_rn(2.5f)),
          static_cast<u32>(__dp4a(0x01FF0203, 0x04050607, 1)),
          rotate_right(v, 4), dup_hi(v), static_cast<u64>(exponent_to(3.0f, 10))};
      for (int i = 0; i < 20; i++) out[i] = values[i];"""
    launch(gpu, "u64* out", body, out)
    expected = [
        *(0x01CD67EF, 0x00FF00FF, 0x7889ABCD, 0x34567889, 20, 24, 9, 1 << 31),
        *(0x89ABCDEF**2 >> 32, 15, 2, 3, 0xB2800000, 0x3EAAAAAB, 0, 2),
        *(4 - 5 + 12 + 21 + 1, 0xF89ABCDE, 0x89AB89AB, 9),
    ]
    assert [hex(v) for v in out.tolist()] == [hex(v) for v in expected]


def test_copies_arrive_when_they_are_waited_for(gpu: Gpu) -> None:
    data, out = torch.arange(256, dtype=torch.float32), torch.zeros(3, 128)
    body = """
      __shared__ __align__(16) float here[2][128];
      const int i = threadIdx.x;
      for (int stage = 0; stage < 2; stage++) {
        copy16_async(&here[stage][i * 4], data + stage * 128 + i * 4);
        commit_copies();
      }
      for (int k = 0; k < 4; k++) out[i * 4 + k] = here[0][i * 4 + k];
      wait_copies<1>();
      const float is_missing = here[1][i * 4] != here[1][i * 4];
      for (int k = 0; k < 4; k++) out[128 + i * 4 + k] = here[0][i * 4 + k] + is_missing;
      wait_copies<0>();
      __syncwarp();
      for (int k = 0; k < 4; k++) out[256 + i * 4 + k] = here[1][(i * 4 + k + 64) % 128];"""
    launch(gpu, "const float* data, float* out", body, data, out)
    assert out[0].isnan().all() and torch.equal(out[1], data[:128] + 1)
    assert torch.equal(out[2], data[128:].roll(-64))


def test_a_warp_feeds_the_others_through_barriers_in_memory() -> None:
    data, out = torch.arange(8 * 64, dtype=torch.int32), ints(8, 64)
    body = """
      __shared__ __align__(16) int stage[2][64];
      __shared__ u64 full[2], empty[2];
      const int i = threadIdx.x;
      for (int s = 0; s < 2 && i == 0; s++) init_barrier(full + s, 1), init_barrier(empty + s, 64);
      __syncthreads();
      if (i == 64)
        for (int step = 0; step < 8; step++) {
          if (step >= 2) wait_barrier(empty + step % 2, (step / 2 - 1) & 1);
          expect_bytes(full + step % 2, 256);
          copy_bulk(stage[step % 2], data + step * 64, 256, full + step % 2);
        }
      if (i >= 64) return;
      for (int step = 0; step < 8; step++) {
        wait_barrier(full + step % 2, step / 2 & 1);
        out[step * 64 + i] = stage[step % 2][63 - i];
        meet_some(1, 64);
        arrive(empty + step % 2);
      }"""
    gpu = emulated_gpu(90)
    launch(gpu, "const int* data, int* out", body, data, out, block=96, files=("ring",))
    assert torch.equal(out, data.view(8, 64).flip(1))


WRONG = {
    "lanes that never come": (
        "if (threadIdx.x < 5) __shfl_sync(~0u, 1, 0);\n else __syncthreads();",
        "5 for lanes",
    ),
    "a barrier that half of a block skips": (
        "if (threadIdx.x < 32) meet_some(1, 64);\n else __syncthreads();",
        "64 wait at a barrier",
    ),
    "waiting for a later block": ("while (__ldcv(out) != 1) __nanosleep(10);", "64 spin"),
    "a lane outside its mask": ("__ballot_sync(1u << 3, 1);", "not in its own mask"),
    "lanes in different operations": (
        "if (threadIdx.x & 1) __ballot_sync(~0u, 1);\n else __shfl_sync(~0u, 1, 0);",
        "different operations",
    ),
    "half a matrix instruction": (
        "float c[4]; u32 a[4] = {};\n if (threadIdx.x & 1) return;\n mma_new(c, a, 0, 0);",
        "all 32 lanes",
    ),
    "a vector at an odd place": (
        "*reinterpret_cast<uint4*>(out + 1) = make_uint4(0, 0, 0, 0);",
        "bits:[0-9]+: the address .* is not aligned",
    ),
    "an index outside an array": (
        "int v[4] = {};\n v[out[0] + 20 + threadIdx.x] = 1;\n out[0] = v[0];",
        "the index 13 is outside",
    ),
    "behind shared memory": (
        "extern __shared__ int s[];\n s[threadIdx.x] = 0;",
        "behind the 128 bytes",
    ),
    "a barrier of odd threads": ("meet_some(1, 40);", "no barrier 1 of 40"),
    "a copy at an odd place": (
        "__shared__ __align__(16) u8 to[64];\n copy16_async(to + 8, out);",
        "16 bytes is not aligned",
    ),
    "a failed assertion": ("assert(threadIdx.x < 40);", "thread 40: an assertion failed"),
}


@pytest.mark.parametrize("case", WRONG)
def test_what_a_chip_would_not_forgive(case: str, gpu: Gpu) -> None:
    # One kernel for all cases is compiled once.
    cases = enumerate(body for body, _ in WRONG.values())
    body = "\n".join(f"if (which == {i}) {{ {body} }}" for i, body in cases)
    which, (_, message) = list(WRONG).index(case), WRONG[case]
    with pytest.raises(EmulationError, match=message):
        launch(gpu, "int* out, int which", body, ints(16), which, block=64, shared_bytes=128)


def test_arguments_are_checked(gpu: Gpu) -> None:
    parameters, body = "int* out, int a, float b", "out[0] = a, out[1] = b * 4.0f;"
    out = ints(2)
    launch(gpu, parameters, body, out, -3, 0.25)
    assert out.tolist() == [-3, 1]
    for args in ((out, 1, 2), (1, out, 0.5), (out, 1)):
        with pytest.raises(EmulationError, match="takes arguments pif, not"):
            launch(gpu, parameters, body, *args)
    with pytest.raises(OverflowError):
        launch(gpu, parameters, body, out, 2**31, 0.5)
    with pytest.raises(EmulationError, match="2048 threads"):
        launch(gpu, parameters, body, out, 1, 0.5, block=2048)
    launch(gpu, "const int* maybe, int* out", "out[0] = maybe == nullptr;", None, out)
    assert out[0] == 1


def test_what_is_not_cplusplus_is_shown(gpu: Gpu) -> None:
    with pytest.raises(EmulationError, match=r"bits:\d+:\d+: error: .*unknown_function"):
        launch(gpu, "int* out", "unknown_function(out);", ints(1))
