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

constexpr int THREADS = 1024;
constexpr int KEPT = 3;  // slices a thread keeps in registers between the two passes

DEV void load_slice(const float* row, int column, int num_cols, float* v) {
  const float4* from = reinterpret_cast<const float4*>(row + column);
  const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float4 a = column < num_cols ? from[0] : zero, b = column < num_cols ? from[1] : zero;
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

DEV void store_slice(float* v, float scale, u8* out, int token, int column, int padded_cols, int x_tiles) {
  for (int i = 0; i < SLICE; i++) v[i] *= scale;
#if IN_ROWS
  u32 h[4];
  for (int i = 0; i < 4; i++) h[i] = pack_halves(v[2 * i], v[2 * i + 1]);
  reinterpret_cast<uint4*>(out)[(static_cast<u64>(token) * padded_cols + column) / 8] = make_uint4(h[0], h[1], h[2], h[3]);
#else
  store_tile_slice(v, out + (static_cast<u64>(column / 128) * x_tiles + token / 8) * 2304, token, column);
#endif
}

// A block a token. Rows start at multiples of 16 bytes, and columns come in whole slices.
extern "C" __global__ void __launch_bounds__(THREADS) prepare_kernel(const float* x, u8* out, float* token_scale,
                                                                    const int* live, int num_cols, int padded_cols,
                                                                    int x_stride, int x_tiles) {
  __shared__ float part[THREADS / 32];
  let_later_grids_start();
  wait_for_earlier_grids();
  const int token = blockIdx.x, first = threadIdx.x * SLICE;
  if (live && token >= *live) return;
  const float* row = x + static_cast<u64>(token) * x_stride;
  float kept[KEPT][SLICE], v[SLICE], largest = 0.0f;
#pragma unroll
  for (int k = 0; k < KEPT; k++) load_slice(row, first + k * THREADS * SLICE, num_cols, kept[k]);
#pragma unroll
  for (int k = 0; k < KEPT; k++)
    for (int i = 0; i < SLICE; i++) largest = fmaxf(largest, fabsf(kept[k][i]));
  for (int column = first + KEPT * THREADS * SLICE; column < num_cols; column += THREADS * SLICE) {
    load_slice(row, column, num_cols, v);
    for (int i = 0; i < SLICE; i++) largest = fmaxf(largest, fabsf(v[i]));
  }
  for (int d = 16; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  if ((threadIdx.x & 31) == 0) part[threadIdx.x >> 5] = largest;
  __syncthreads();
  largest = part[threadIdx.x & 31];
  for (int d = 16; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  const int e = exponent_to(largest, 10);
  if (threadIdx.x == 0) token_scale[token] = pow2(-e);
  // Whole warps have columns or none, since columns are padded to 32 slices.
#pragma unroll
  for (int k = 0; k < KEPT; k++)
    if (first + k * THREADS * SLICE < padded_cols)
      store_slice(kept[k], pow2(e), out, token, first + k * THREADS * SLICE, padded_cols, x_tiles);
  for (int column = first + KEPT * THREADS * SLICE; column < padded_cols; column += THREADS * SLICE) {
    load_slice(row, column, num_cols, v);
    store_slice(v, pow2(e), out, token, column, padded_cols, x_tiles);
  }
}
