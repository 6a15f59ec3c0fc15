// A row of activations as 16-bit floats, scaled by its own power of two so that nothing overflows: the last step of
// every kernel whose result a matrix product reads.
// IN_ROWS: plain rows [tokens][padded columns] for cuBLAS. Else the order in which linear_kernel reads:
// [cols / 128][x_tiles], each [4 groups][lane = 4 (token % 8) + t] 8 halves, which are columns 4t..4t+3 and
// 16+4t..16+4t+3 of a group, the first two of each four times 16; then [lane] the sum over group t, halved,
// as a leading and a remaining half.
// WARPGROUPS: the same values, but each tile [4 groups][2 times 16 columns][first or second two of each four][token % 8][t] 2
// halves, so that what a matrix instruction reads of 8 tokens lies in pieces of 128 bytes.
//
// CLUSTER blocks share a row, and each of their threads has KEPT slices of it in registers. Columns are padded to 32
// slices, so whole warps have columns or none.
#ifndef IN_ROWS
#define IN_ROWS 0
#endif
#ifndef WARPGROUPS
#define WARPGROUPS 0
#endif
constexpr int SLICE = 8;  // columns

#if CLUSTER > 1
#define CLUSTER_DIMS __cluster_dims__(CLUSTER, 1, 1)
DEV int cluster_rank() {
  int rank;
  asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank));
  return rank;
}

DEV void meet_cluster() {
  asm volatile("barrier.cluster.arrive.release;\nbarrier.cluster.wait.acquire;" ::: "memory");
}

// Writes to the same place in another block's shared memory.
DEV void store_in_block(float* place, int rank, float v) {
  asm volatile("{.reg .u32 there; mapa.shared::cluster.u32 there, %0, %1; st.shared::cluster.f32 [there], %2;}" ::"r"(
                   shared_address(place)),
               "r"(rank), "f"(v)
               : "memory");
}
#else
#define CLUSTER_DIMS
DEV int cluster_rank() { return 0; }
DEV void meet_cluster() { __syncthreads(); }
DEV void store_in_block(float* place, int rank, float v) { *place = v; }
#endif

// Before anything else: a block's shared memory may be written once the block runs. No other grid is waited for.
DEV void begin_cluster() {
#if CLUSTER > 1
  asm volatile("barrier.cluster.arrive.relaxed;\nbarrier.cluster.wait;" ::: "memory");
#endif
}

DEV int row_of_block() { return blockIdx.x / CLUSTER; }

DEV int slice_column(int k) { return ((cluster_rank() * KEPT + k) * WARPS * 32 + threadIdx.x) * SLICE; }

DEV void load_slice(const float* row, int column, bool inside, float* v) {
  const float4* from = reinterpret_cast<const float4*>(row + column);
  const float4 zero = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  const float4 a = inside ? from[0] : zero, b = inside ? from[1] : zero;
  v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

DEV u32 pack_halves(float even, float odd) { return to_half(even) | static_cast<u32>(to_half(odd)) << 16; }

// A slice as halves at `to`, where the token's part of a group begins, and the sum of 32 columns.
DEV void store_halves(const float* v, u8* to, u32* sum_to, int column) {
  u32 h[4];
  float sum = 0.0f;
  for (int i = 0; i < 4; i++) {
    const float factor = i & 1 ? 1.0f : 16.0f;
    h[i] = pack_halves(v[2 * i] * factor, v[2 * i + 1] * factor);
    sum += (lower_half(h[i]) + upper_half(h[i])) / factor;
  }
  const int t = column % 16 / 4, step = column % 32 / 16;
#if WARPGROUPS
  uint2* piece = reinterpret_cast<uint2*>(to + step * 256 + t * 4);
  piece[0] = make_uint2(h[0], h[2]);
  piece[16] = make_uint2(h[1], h[3]);
#else
  uint2* lane = reinterpret_cast<uint2*>(to + t * 16 + step * 8);
  lane[0] = make_uint2(h[0], h[1]);
  lane[2] = make_uint2(h[2], h[3]);
#endif
  sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 1));
  sum = 0.5f * __fadd_rn(sum, __shfl_xor_sync(~0u, sum, 2));
  if (column % 32) return;
  const float leading = from_half(to_half(sum));
  *sum_to = pack_halves(leading, sum - leading);
}

DEV void store_slice(float* v, float scale, u8* out, int token, int column, int padded_cols, int x_tiles) {
  for (int i = 0; i < SLICE; i++) v[i] *= scale;
#if IN_ROWS
  u32 h[4];
  for (int i = 0; i < 4; i++) h[i] = pack_halves(v[2 * i], v[2 * i + 1]);
  reinterpret_cast<uint4*>(out)[(static_cast<u64>(token) * padded_cols + column) / 8] = make_uint4(h[0], h[1], h[2], h[3]);
#else
  u8* tile = out + (static_cast<u64>(column / 128) * x_tiles + token / 8) * 2176;
  const int group = column % 128 / 32, place = token % 8;
  u32* sums = reinterpret_cast<u32*>(tile + 2048) + place * 4;
  store_halves(v, tile + group * 512 + place * (WARPGROUPS ? 16 : 64), sums + group, column);
#endif
}

DEV float sum_warp(float v) {
  for (int d = 16; d; d >>= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
  return v;
}

DEV float largest_of_warp(float v) {
  for (int d = 16; d; d >>= 1) v = fmaxf(v, __shfl_xor_sync(~0u, v, d));
  return v;
}

// Over all threads of a row: the sum, of 256 columns each and then over those in the same order, whatever the number
// of blocks, warps and slices; and the largest.
DEV float reduce_row(const float* own, float& largest) {
  __shared__ float sums[KEPT * WARPS * CLUSTER], peaks[WARPS * CLUSTER];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    const float part = sum_warp(own[k]);
    if (lane < CLUSTER) store_in_block(sums + (cluster_rank() * KEPT + k) * WARPS + warp, lane, part);
  }
  largest = largest_of_warp(largest);
  if (lane < CLUSTER) store_in_block(peaks + cluster_rank() * WARPS + warp, lane, largest);
  meet_cluster();
  float sum = 0.0f;
#pragma unroll
  for (int i = lane; i < KEPT * WARPS * CLUSTER; i += 32) sum = __fadd_rn(sum, sums[i]);
#pragma unroll
  for (int i = lane; i < WARPS * CLUSTER; i += 32) largest = fmaxf(largest, peaks[i]);
  largest = largest_of_warp(largest);
  return sum_warp(sum);
}

DEV float largest_of_slices(const float (*v)[SLICE]) {
  float largest = 0.0f;
#pragma unroll
  for (int k = 0; k < KEPT; k++)
    for (int i = 0; i < SLICE; i++) largest = fmaxf(largest, fabsf(v[k][i]));
  return largest;
}

// What a row is scaled by. Plain rows stay as they are if they fit: then nothing has to be scaled back.
DEV int row_exponent(float largest) { return IN_ROWS && largest > 0x1p-6f && largest < 0x1p15f ? 0 : exponent_to(largest, 10); }

// Ends a row: the threads' slices (0 outside the row), scaled by what the largest of the row asks for.
DEV void store_scaled(float (*v)[SLICE], float largest, u8* out, float* token_scale, int padded_cols, int x_tiles) {
  const int token = row_of_block(), e = row_exponent(largest);
  if (threadIdx.x == 0 && cluster_rank() == 0) token_scale[token] = pow2(-e);
#pragma unroll
  for (int k = 0; k < KEPT; k++)
    if (slice_column(k) < padded_cols) store_slice(v[k], pow2(e), out, token, slice_column(k), padded_cols, x_tiles);
}

// A row for the block itself: halves, then sums.
DEV void store_own(float (*v)[SLICE], float largest, u8* out, float* token_scale, int padded_cols) {
  const int e = exponent_to(largest, 10);
  u32* sums = reinterpret_cast<u32*>(out + padded_cols * 2);
  if (threadIdx.x == 0) *token_scale = pow2(-e);
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    const int column = slice_column(k);
    if (column >= padded_cols) continue;
    for (int i = 0; i < SLICE; i++) v[k][i] *= pow2(e);
    store_halves(v[k], out + column / 32 * 64, sums + column / 32, column);
  }
}

// The largest of a row that CLUSTER blocks share.
DEV float largest_of_row(const float (*v)[SLICE]) {
  __shared__ float part[32 * CLUSTER];
  const int lane = threadIdx.x & 31;
  float largest = largest_of_warp(largest_of_slices(v));
  if (lane < CLUSTER) store_in_block(part + cluster_rank() * WARPS + (threadIdx.x >> 5), lane, largest);
  meet_cluster();
#pragma unroll
  for (int i = 0; i < CLUSTER; i++)
    if (lane + i * 32 < WARPS * CLUSTER) largest = fmaxf(largest, part[lane + i * 32]);
  return largest_of_warp(largest);
}
