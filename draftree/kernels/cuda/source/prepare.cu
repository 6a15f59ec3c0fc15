// Activations to 16-bit floats, each token scaled by its own power of two so that nothing overflows.
// IN_ROWS: plain rows [tokens][padded columns] for a vendor matmul; else the order in which linear_kernel reads:
// [cols / 128][x_tiles][4 groups][32 lanes] 8 halves, lane = 4 (token % 8) + t, columns 8t..8t+7 of a group.
extern "C" __global__ void __launch_bounds__(512) prepare_kernel(const float* x, u8* out, float* token_scale,
                                                                const int* live, int num_cols, int padded_cols,
                                                                int x_stride, int x_tiles) {
  __shared__ float part[16];
  let_later_grids_start();
  wait_for_earlier_grids();
  const int token = blockIdx.x;
  if (live && token >= *live) return;
  const float* row = x + static_cast<u64>(token) * x_stride;
  float largest = 0.0f;
  for (int i = threadIdx.x; i < num_cols; i += blockDim.x) largest = fmaxf(largest, fabsf(row[i]));
  for (int d = 16; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = largest;
  __syncthreads();
  for (int i = 0; i < 16; i++) largest = fmaxf(largest, part[i]);
  const int e = exponent_to(largest, 14);
  if (threadIdx.x == 0) token_scale[token] = pow2(-e);
  const float scale = pow2(e);
  for (int i = threadIdx.x * 8; i < padded_cols; i += blockDim.x * 8) {
    u32 v[4];
    for (int j = 0; j < 4; j++) {
      const float even = i + 2 * j < num_cols ? row[i + 2 * j] : 0.0f;
      const float odd = i + 2 * j + 1 < num_cols ? row[i + 2 * j + 1] : 0.0f;
      v[j] = to_half(even * scale) | static_cast<u32>(to_half(odd * scale)) << 16;
    }
#if IN_ROWS
    const u64 at = (static_cast<u64>(token) * padded_cols + i) / 8;
#else
    const u64 at = ((static_cast<u64>(i / 128) * x_tiles + token / 8) * 4 + i % 128 / 32) * 32 + token % 8 * 4 + i % 32 / 8;
#endif
    reinterpret_cast<uint4*>(out)[at] = make_uint4(v[0], v[1], v[2], v[3]);
  }
}
