"""The GPU's weight layout: the CUDA sources of packing and decoding, run on the host as C++."""

import ctypes
import shutil
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource
from draftree.kernels.cuda.layout import ROWS, unit_format
from draftree.kernels.cuda.linear import plan_linear
from draftree.kernels.cuda.sample import random_raw
from draftree.kernels.quant.formats import QuantType, dequantize

NATIVE = [
    *(QuantType.Q4_K, QuantType.Q5_K, QuantType.Q6_K, QuantType.Q8_0, QuantType.Q4_0),
    *(QuantType.Q4_1, QuantType.Q5_0, QuantType.Q5_1, QuantType.F16, QuantType.BF16, QuantType.F32),
]

# Single instructions and thread indices, spelled in C++; stands in for source/bits.cu.
HOST = r"""
#include <cmath>
#include <cstring>
#include <algorithm>
typedef unsigned char u8; typedef unsigned short u16;
typedef unsigned int u32; typedef unsigned long long u64;
#define DEV static inline
#define __global__
#define __launch_bounds__(n)
using std::max; using std::min;
struct uint2 { u32 x, y; }; static uint2 make_uint2(u32 x, u32 y) { return {x, y}; }
 struct uint4 { u32 x, y, z, w; };
static uint4 make_uint4(u32 x, u32 y, u32 z, u32 w) { return {x, y, z, w}; }
static struct { u32 x, y; } threadIdx, blockIdx, blockDim;
template <class T, class F> T cast(F f) { T t; memcpy(&t, &f, sizeof t); return t; }
static float __uint_as_float(u32 v) { return cast<float>(v); }
static float __shfl_xor_sync(u32, float v, int) { return v; }
static double value(u32 v) { return (double)cast<_Float16>((u16)v); }
static u16 rounded(double v) { return cast<u16>((_Float16)v); }
template <class F> u32 both(F f) { return f(0) | (u32)f(16) << 16; }
static u32 hsub2(u32 a, u32 b) {
  return both([&](int s) { return rounded(value(a >> s) - value(b >> s)); }); }
static u32 __byte_perm(u32 a, u32 b, u32 s) {
  u64 v = (u64)b << 32 | a; u32 r = 0;
  for (int i = 0; i < 4; i++) r |= (u32)(v >> ((s >> 4 * i & 7) * 8) & 255) << 8 * i;
  return r; }
static u32 dup_lo(u32 v) { return __byte_perm(v, v, 0x1010); }
static u32 dup_hi(u32 v) { return __byte_perm(v, v, 0x3232); }
static u32 rotate_right(u32 v, int n) { return n ? v >> n | v << (32 - n) : v; }
static u16 to_half(float v) { return rounded(v); }
static float lower_half(u32 v) { return value(v); }
static float upper_half(u32 v) { return value(v >> 16); }
static float __fmul_rn(float a, float b) { return a * b; }
static float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static float from_half(u16 v) { return value(v); }
static float pow2(int e) { return std::ldexp(1.0f, e); }
static int exponent_to(float v, int top) { return v == 0 ? 0 : top - std::ilogb(v); }
"""

RUN = r"""
extern "C" void pack(const u8* raw, u8* units, float* scale, int rows, int cols, int chunks) {
  for (int r = 0; r < rows; r++) {
    float largest = 0;
    for (int b = 0; b < cols / BLOCK_LEN; b++)
      largest = fmaxf(largest, block_bound(raw + ((u64)r * (cols / BLOCK_LEN) + b) * BLOCK_BYTES));
    scale[r] = pow2(-exponent_to(largest, 13));
  }
  blockDim.x = 256;
  for (blockIdx.x = 0; blockIdx.x < (rows + 127) / 128 * chunks * 4; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++)
      repack_kernel(raw, scale, units, rows, cols, chunks);
}
extern "C" void unpack(const u8* units, const float* scale, u16* out, int tiles, int chunks) {
  for (blockIdx.x = 0; blockIdx.x < tiles * chunks; blockIdx.x++)
    for (threadIdx.x = 0; threadIdx.x < 256; threadIdx.x++)
      expand_kernel(units, scale, out, chunks, chunks * COLS);
}
"""


def _build(qtype: QuantType, folder: Path) -> ctypes.CDLL:
    compiler = shutil.which("g++")
    if not compiler:
        pytest.skip("no C++ compiler (g++) to run the CUDA sources on the host with")
    macros = (*unit_format(qtype).macros, ("SOURCE", qtype.value))
    text = KernelSource("host", ("format", "repack", "expand"), macros).text()
    source = folder / "host.cpp"
    source.write_text(HOST + text + RUN)
    command = [
        compiler,
        "-std=c++17",
        "-O1",
        "-w",
        "-shared",
        "-fPIC",
        source,
        "-o",
        folder / "host.so",
    ]
    subprocess.run(command, check=True, timeout=120)
    return ctypes.CDLL(str(folder / "host.so"))


def _pointer(array: np.ndarray) -> ctypes.c_void_p:
    return ctypes.c_void_p(array.ctypes.data)


@pytest.mark.parametrize("qtype", NATIVE, ids=lambda qtype: qtype.name)
def test_units_decode_to_the_weights(qtype: QuantType, tmp_path: Path) -> None:
    library = _build(qtype, tmp_path)
    form = unit_format(qtype)
    num_rows, num_cols = 150, 768 if qtype.block_len == 256 else 576
    raw = random_raw(qtype, num_rows, num_cols, torch.Generator().manual_seed(1)).numpy()
    tiles, chunks = -(-num_rows // ROWS), -(-num_cols // form.cols)
    units = np.full((tiles, chunks, form.unit_bytes), 0xEE, np.uint8)
    scale = np.ones(tiles * ROWS, np.float32)
    out = np.full((tiles * ROWS, chunks * form.cols), np.nan, np.float16)
    sizes = num_rows, num_cols, chunks
    library.pack(_pointer(raw), _pointer(units), _pointer(scale), *sizes)
    library.unpack(_pointer(units), _pointer(scale), _pointer(out), tiles, chunks)
    weights = dequantize(raw, qtype).astype(np.float64)
    assert not out[num_rows:].any() and not out[:, num_cols:].any()
    difference = out[:num_rows, :num_cols].astype(np.float64) * scale[:num_rows, None] - weights
    assert np.linalg.norm(difference) < 4e-4 * np.linalg.norm(weights)
    largest = np.abs(weights).max(axis=1, keepdims=True)
    assert np.all(np.abs(difference) < 1.5e-3 * largest)
    if qtype in (QuantType.F16, QuantType.BF16):
        assert not difference.any()


def test_layouts_stay_within_their_bits() -> None:
    assert unit_format(QuantType.Q4_K).bits_per_weight <= 4.7
    for qtype in QuantType:
        form = unit_format(qtype)
        assert form.bits_per_weight <= max(form.qtype.bits_per_weight + 0.125, 4.0)
        assert form.unit_bytes % 16 == 0, "units are copied 16 bytes at a time"


@pytest.mark.parametrize("shared", [(101376, 102400), (166912, 167936), (232448, 233472)])
def test_every_format_and_number_of_tokens_has_a_plan_that_fits(shared: tuple[int, int]) -> None:
    per_block, per_sm = shared
    device = Gpu(0, 90, 100, per_sm, per_block)
    for qtype in NATIVE:
        for num_tokens in range(1, 65):
            plan = plan_linear(unit_format(qtype), num_tokens, device)
            assert plan.num_stages >= 2
            assert plan.shared_bytes + 1024 < per_block
            assert 8 * plan.token_tiles >= min(num_tokens, 16), "small passes take one launch"
