// Activations to 16-bit floats, each token scaled by its own power of two so that nothing overflows.
// IN_ROWS: plain rows [tokens][padded columns] for a vendor matmul. Else the order in which linear_kernel reads:
// [cols / 128][x_tiles], each [4 groups][lane = 4 (token % 8) + t] 8 halves, which are columns 4t..4t+3 and
// 16+4t..16+4t+3 of a group, the first two of each four times 16; then sums over 16 columns, halved, as a leading
// and a remaining half: [leading, remaining][lane] the groups 2t and 2t + 1 of 16 columns.
constexpr int SLICE = 8;  // columns a thread

DEV u32 pack_halves(float even, float odd) { return to_half(even) | static_cast<u32>(to_half(odd)) << 16; }

DEV void store_tile_slice(const float* v, u8* tile, int token, int column) {
  u32 h[4];
  float sum = 0.0f;
  for (int i = 0; i < 4; i++) {
    const float factor = i & 1 ? 1.0f : 16.0f;
    h[i] = pack_halves(v[2 * i] * factor, v[2 * i + 1] * factor);
    sum += (lower_half(h[i]) + upper_half(h[i])) / factor;
  }
  const int lane = token % 8 * 4 + column % 16 / 4;
  uint2* to = reinterpret_cast<uint2*>(tile + column % 128 / 32 * 512 + lane * 16 + column % 32 / 16 * 8);
  to[0] = make_uint2(h[0], h[1]);
  to[2] = make_uint2(h[2], h[3]);  // the next lane's
  const float first = 0.5f * (sum + __shfl_xor_sync(~0u, sum, 1));  // 16 columns
  const float second = __shfl_xor_sync(~0u, first, 2);              // the next 16
  if (column % 32) return;
  u32* sums = reinterpret_cast<u32*>(tile + 2048) + token % 8 * 4 + column % 128 / 32;
  const u32 leading = pack_halves(first, second);
  sums[0] = leading;
  sums[32] = pack_halves(first - lower_half(leading), second - upper_half(leading));
}

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
  const int e = exponent_to(largest, 10);
  if (threadIdx.x == 0) token_scale[token] = pow2(-e);
  const float scale = pow2(e);
  for (int i = threadIdx.x * SLICE; i < padded_cols; i += blockDim.x * SLICE) {
    float v[SLICE];
    for (int j = 0; j < SLICE; j++) v[j] = i + j < num_cols ? row[i + j] * scale : 0.0f;
#if IN_ROWS
    u32 h[4];
    for (int j = 0; j < 4; j++) h[j] = pack_halves(v[2 * j], v[2 * j + 1]);
    reinterpret_cast<uint4*>(out)[(static_cast<u64>(token) * padded_cols + i) / 8] = make_uint4(h[0], h[1], h[2], h[3]);
#else
    store_tile_slice(v, out + (static_cast<u64>(i / 128) * x_tiles + token / 8) * 2304, token, i);
#endif
  }
}
