// out[i] = x[rows[i]], or x[i] without rows; a thread copies 16 bytes.
KERNEL void copy_kernel(const float* x, const int* rows, float* out, const int* live, int num_vectors, int x_stride,
                                       int out_stride) {
  let_later_grids_start();
  wait_for_earlier_grids();
  const int row = blockIdx.x, i = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= *live || i >= num_vectors) return;
  const float* from = x + static_cast<u64>(rows ? rows[row] : row) * x_stride;
  reinterpret_cast<float4*>(out + static_cast<u64>(row) * out_stride)[i] = reinterpret_cast<const float4*>(from)[i];
}
