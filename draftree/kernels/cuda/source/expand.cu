// Units back to rows of 16-bit floats for the vendor matmul, with the very operands that linear_kernel multiplies.
extern "C" __global__ void __launch_bounds__(256) expand_kernel(const u8* units, u16* out, int num_chunks, int out_stride) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, rows32 = warp & 3, half = warp >> 2;
  const u8* unit = units + static_cast<u64>(blockIdx.x) * UNIT_BYTES;
  const int tile = blockIdx.x / num_chunks, chunk = blockIdx.x % num_chunks;
  for (int m = 0; m < 2; m++) {
    const int strip = rows32 * 2 + m;
    const Scales scales = load_scales(unit, strip, half, lane);
    u16* to = out + static_cast<u64>(tile * ROWS + strip * 16 + (lane >> 2)) * out_stride + chunk * COLS + half * HALF_COLS + (lane & 3) * 8;
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      u32 a[2][4];
      load_operands(unit, scales, strip, half, group, lane, a);
      *reinterpret_cast<uint4*>(to + group * 32) = make_uint4(a[0][0], a[0][2], a[1][0], a[1][2]);
      *reinterpret_cast<uint4*>(to + 8 * out_stride + group * 32) = make_uint4(a[0][1], a[0][3], a[1][1], a[1][3]);
    }
  }
}

// out[token][row] (+)= product * scales (+ bias), for a slab of rows that the vendor matmul has just made.
extern "C" __global__ void rescale_kernel(const float* product, const float* row_scale, const float* token_scale, const float* bias,
                                          float* out, int slab_rows, int num_rows, int out_stride, int add_to_out) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
  if (row >= num_rows) return;
  float* to = out + static_cast<u64>(token) * out_stride + row;
  float y = product[static_cast<u64>(token) * slab_rows + row] * row_scale[row] * token_scale[token];
  if (bias) y += bias[row];
  if (add_to_out) y += *to;
  *to = y;
}
