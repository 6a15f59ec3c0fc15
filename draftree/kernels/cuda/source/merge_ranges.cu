// Attention over ranges of keys, put together by the sums of their weights: some lanes of a warp a row of a head.
// With `has_before`, `out` holds what earlier ranges came to, and `sums` the logarithm of their weights' sum.
constexpr int WARPS = 8, LANES = HEAD_DIM / 8, ROWS_A_WARP = 32 / LANES;

struct Range {
  const u16* found;     // [heads][rows][HEAD_DIM], rows and heads as far apart as the strides say
  const float* weight;  // [heads][rows] logarithm of the sum
  int head_stride, row_stride;
};
#define RANGE(i) const u16 *found##i, const float *weight##i, int head_stride##i, int row_stride##i
#define RANGE_OF(i) {found##i, weight##i, head_stride##i, row_stride##i}

DEV void add_scaled(float* sum, float factor, float4 a, float4 b) {
  const float v[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
  for (int i = 0; i < 8; i++) sum[i] = __fmaf_rn(v[i], factor, sum[i]);
}

KERNEL void LAUNCH_BOUNDS(WARPS * 32)
    merge_ranges_kernel(RANGE(0), RANGE(1), RANGE(2), RANGE(3), int num_ranges, int num_rows, float* out, int out_stride,
                        float* sums, int has_before) {
  const Range ranges[4] = {RANGE_OF(0), RANGE_OF(1), RANGE_OF(2), RANGE_OF(3)};
  const int lane = threadIdx.x & 31, dim = lane % LANES * 8, head = blockIdx.y;
  const int own_row = (blockIdx.x * WARPS + threadIdx.x / 32) * ROWS_A_WARP + lane / LANES, row = min(own_row, num_rows - 1);
  float* to = out + static_cast<u64>(row) * out_stride + head * HEAD_DIM + dim;
  const u64 at = static_cast<u64>(head) * num_rows + row;
  uint4 found[4];
  float weight[4];
  const float before = has_before ? sums[at] : weight0[at];
  float largest = before;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (i >= num_ranges) continue;
    const Range& from = ranges[i];
    found[i] = *reinterpret_cast<const uint4*>(from.found + static_cast<u64>(head) * from.head_stride +
                                               static_cast<u64>(row) * from.row_stride + dim);
    weight[i] = from.weight[at];
    largest = fmaxf(largest, weight[i]);
  }
  float4* vectors = reinterpret_cast<float4*>(to);
  float v[8] = {}, total = 0.0f;
  if (has_before) {
    total = expf(__fsub_rn(before, largest));
    add_scaled(v, total, vectors[0], vectors[1]);
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    if (i >= num_ranges) continue;
    const float share = expf(__fsub_rn(weight[i], largest));
    total = __fadd_rn(total, share);
    const uint4 h = found[i];
    add_scaled(v, share, make_float4(lower_half(h.x), upper_half(h.x), lower_half(h.y), upper_half(h.y)),
               make_float4(lower_half(h.z), upper_half(h.z), lower_half(h.w), upper_half(h.w)));
  }
  const float factor = 1.0f / total;
  __syncwarp();  // all lanes have read what is written now
  if (own_row >= num_rows) return;
  vectors[0] = make_float4(v[0] * factor, v[1] * factor, v[2] * factor, v[3] * factor);
  vectors[1] = make_float4(v[4] * factor, v[5] * factor, v[6] * factor, v[7] * factor);
  if (dim == 0) sums[at] = largest + logf(total);
}
