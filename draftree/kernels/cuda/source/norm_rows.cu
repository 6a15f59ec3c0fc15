// out = x / root mean square * weight, a row a block. Sums run in an order that depends on the columns alone.
constexpr int THREADS = 256;

KERNEL void norm_rows_kernel(const float* x, const float* weight, float* out, const int* live, float eps, int num_cols,
                                            int x_stride, int out_stride) {
  __shared__ float sums[THREADS];
  const int row = blockIdx.x, thread = threadIdx.x;
  let_later_grids_start();
  wait_for_earlier_grids();
  if (row >= *live) return;
  const float* from = x + static_cast<u64>(row) * x_stride;
  float* to = out + static_cast<u64>(row) * out_stride;
  float sum = 0.0f;
  for (int c = thread; c < num_cols; c += THREADS) sum = __fmaf_rn(from[c], from[c], sum);
  sums[thread] = sum;
  for (int d = THREADS / 2; d > 0; d >>= 1) {
    __syncthreads();
    if (thread < d) sums[thread] = __fadd_rn(sums[thread], sums[thread + d]);
  }
  __syncthreads();
  const float factor = 1.0f / sqrtf(__fadd_rn(sums[0] / static_cast<float>(num_cols), eps));
  for (int c = thread; c < num_cols; c += THREADS) to[c] = __fmul_rn(__fmul_rn(from[c], factor), weight[c]);
}
