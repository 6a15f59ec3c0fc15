// Queries and keys in place: the norm of every head, then the turn of its first 2 * half values by the row's position.
// A warp a head of HEAD_DIM values; heads of q come first, then those of k.
constexpr int WARPS = 8;
constexpr int VALUES = (HEAD_DIM + 31) / 32;

// table: [positions][half] cosine and sine, or none: no turn. A norm is a weight [HEAD_DIM], or none.
extern "C" __global__ void __launch_bounds__(WARPS * 32)
    rotary_kernel(float* q, const float* q_norm, float* k, const float* k_norm, const float2* table, const int* positions,
                  const int* live, float eps, int q_heads, int q_stride, int k_heads, int k_stride, int half, int is_interleaved) {
  __shared__ float shared[WARPS][HEAD_DIM];
  const int row = blockIdx.x, lane = threadIdx.x & 31;
  int head = blockIdx.y * WARPS + (threadIdx.x >> 5);
  const bool is_key = head >= q_heads;
  if (is_key) head -= q_heads;
  let_later_grids_start();
  if (is_key && head >= k_heads) return;
  const float* norm = is_key ? k_norm : q_norm;
  float* x = (is_key ? k + static_cast<u64>(row) * k_stride : q + static_cast<u64>(row) * q_stride) + head * HEAD_DIM;
  float v[VALUES], w[VALUES], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < VALUES; j++) w[j] = norm && lane + j * 32 < HEAD_DIM ? norm[lane + j * 32] : 0.0f;
  wait_for_earlier_grids();
  const int num_live = *live, position = table ? positions[row] : 0;
#pragma unroll
  for (int j = 0; j < VALUES; j++) v[j] = lane + j * 32 < HEAD_DIM ? x[lane + j * 32] : 0.0f;
#pragma unroll
  for (int j = 0; j < VALUES; j++) squares = __fmaf_rn(v[j], v[j], squares);
  for (int d = 16; d; d >>= 1) squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, d));
  if (row >= num_live) return;
  const float factor = 1.0f / sqrtf(__fadd_rn(squares / static_cast<float>(HEAD_DIM), eps));
  float* turned = shared[threadIdx.x >> 5];
#pragma unroll
  for (int j = 0; j < VALUES; j++) {
    const int i = lane + j * 32;
    if (norm) v[j] = __fmul_rn(__fmul_rn(v[j], factor), w[j]);
    if (i < 2 * half)
      turned[i] = v[j];
    else if (i < HEAD_DIM)
      x[i] = v[j];
  }
  __syncwarp();
  for (int i = lane; i < half; i += 32) {
    const int at = is_interleaved ? 2 * i : i, beside = is_interleaved ? at + 1 : at + half;
    const float2 angle = table[static_cast<u64>(position) * half + i];
    const float a = turned[at], b = turned[beside];
    x[at] = __fmaf_rn(a, angle.x, -__fmul_rn(b, angle.y));
    x[beside] = __fmaf_rn(b, angle.x, __fmul_rn(a, angle.y));
  }
}
