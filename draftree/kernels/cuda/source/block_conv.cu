// out = sum over taps of (base[tap] + what the row brings for the tap and the column's group) * x[row - tap]; rows before
// the first of the pass count as zeros. A thread has one column of one row.
KERNEL void block_conv_kernel(const float* x, const float* own, const float* base, float* out, const int* live, int width,
                                             int group_len, int taps, int x_stride, int own_stride, int out_stride, int is_added) {
  let_later_grids_start();
  wait_for_earlier_grids();
  const int row = blockIdx.x, column = blockIdx.y * blockDim.x + threadIdx.x;
  if (row >= *live || column >= width) return;
  const float* coefficients = own + static_cast<u64>(row) * own_stride + column / group_len;
  float sum = 0.0f;
  for (int tap = 0; tap < taps && tap <= row; tap++) {
    const float weight = __fadd_rn(base[tap * width + column], coefficients[tap * (width / group_len)]);
    sum = __fmaf_rn(weight, x[static_cast<u64>(row - tap) * x_stride + column], sum);
  }
  float* to = out + static_cast<u64>(row) * out_stride + column;
  *to = is_added ? __fadd_rn(*to, sum) : sum;
}
