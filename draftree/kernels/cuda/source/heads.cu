// Queries of a pass's last QUERY_LEN live rows and keys of all, before they are rotated: normed where there is a norm,
// a warp a head. queries: [q_heads][QUERY_LEN][HEAD_DIM]; keys: half floats [kv_heads][max_ctx][HEAD_DIM] at the rows'
// positions.
constexpr int WARPS = 8;
constexpr int NUMBERS = (HEAD_DIM + 31) / 32;  // of a lane

KERNEL void LAUNCH_BOUNDS(WARPS * 32)
    heads_kernel(const int* live, const int* positions, const float* q, const float* q_norm, float q_eps, int q_heads,
                 int q_stride, const float* k, const float* k_norm, float k_eps, int kv_heads, int k_stride,
                 float* queries, u16* keys, int max_ctx) {
  const int row = blockIdx.x, lane = threadIdx.x & 31;
  const int head = blockIdx.y * WARPS + (threadIdx.x >> 5), key_head = head - q_heads;
  const bool is_query = key_head < 0;
  let_later_grids_start();
  wait_for_earlier_grids();
  const int num_live = *live, query = row - num_live + QUERY_LEN;
  if (key_head >= kv_heads || row >= num_live || (is_query && query < 0)) return;
  const float* from = is_query ? q + static_cast<u64>(row) * q_stride + head * HEAD_DIM
                               : k + static_cast<u64>(row) * k_stride + key_head * HEAD_DIM;
  const float* norm = is_query ? q_norm : k_norm;
  float x[NUMBERS], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < NUMBERS; j++) x[j] = lane + j * 32 < HEAD_DIM ? from[lane + j * 32] : 0.0f;
#pragma unroll
  for (int j = 0; j < NUMBERS; j++) squares = __fmaf_rn(x[j], x[j], squares);
  for (int d = 16; d; d >>= 1) squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, d));
  const float mean = squares / static_cast<float>(HEAD_DIM);
  const float factor = 1.0f / sqrtf(__fadd_rn(mean, is_query ? q_eps : k_eps));
#pragma unroll
  for (int j = 0; j < NUMBERS; j++) {
    const int dim = lane + j * 32;
    if (dim >= HEAD_DIM) continue;
    const float value = norm ? __fmul_rn(__fmul_rn(x[j], factor), norm[dim]) : x[j];
    if (is_query)
      queries[(head * QUERY_LEN + query) * HEAD_DIM + dim] = value;
    else
      keys[(static_cast<u64>(key_head) * max_ctx + positions[row]) * HEAD_DIM + dim] =
          to_half(fminf(fmaxf(value, -65504.0f), 65504.0f));
  }
}
