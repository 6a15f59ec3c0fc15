// Makes the input of a matrix product, a row a cluster: what OP computes, then what halves.cu says. Rows start at
// multiples of 16 bytes, and columns come in whole slices.
#define PLAIN 0
#define NORM 1         // x / root mean square * weight
#define SILU_MUL 2     // silu(x) * other
#define SIGMOID_MUL 3  // x * sigmoid(other)
#define GATED_NORM 4   // the norm of every HEAD_DIM columns, times silu(other)
constexpr bool HAS_OTHER = OP >= SILU_MUL, HAS_NORM = OP == NORM || OP == GATED_NORM;

// How far every value of a norm is scaled; the sum of squares is the thread's own.
DEV float norm_factor(float squares, int num_cols, float eps) {
  if (OP == NORM) {
    squares = sum_block(squares);
  } else {
    for (int d = 1; d < HEAD_DIM / SLICE; d <<= 1) squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, d));
    num_cols = HEAD_DIM;
  }
  return 1.0f / sqrtf(__fadd_rn(squares / static_cast<float>(num_cols), eps));
}

DEV float sum_squares(const float* v, float sum) {
  for (int i = 0; i < SLICE; i++) sum = __fmaf_rn(v[i], v[i], sum);
  return sum;
}

// rows, if given, says which row of x each row is made from.
extern "C" __global__ CLUSTER_DIMS void __launch_bounds__(1024, 1)
    prepare_kernel(const float* x, const float* other, const float* weight, const int* rows, u8* out, float* token_scale,
                   const int* live, float eps, int num_cols, int padded_cols, int x_stride, int other_stride, int x_tiles) {
  const int token = row_of_block();
  float v[KEPT][SLICE], w[KEPT][SLICE], z[KEPT][SLICE];
  begin_cluster();
  let_later_grids_start();
  if (HAS_NORM) {
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int column = slice_column(k);
      load_slice(weight, OP == GATED_NORM ? column % HEAD_DIM : column, column < num_cols, w[k]);
    }
  }
  wait_for_earlier_grids();
  const int num_live = live ? *live : token + 1;
  const float* row = x + static_cast<u64>(OP == NORM && rows ? (token < num_live ? rows[token] : 0) : token) * x_stride;
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    const int column = slice_column(k);
    load_slice(row, column, column < num_cols, v[k]);
    if (HAS_OTHER) load_slice(other + static_cast<u64>(token) * other_stride, column, column < num_cols, z[k]);
  }
  float factor[KEPT], squares = 0.0f;
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    if (OP == NORM) squares = sum_squares(v[k], squares);
    if (OP == GATED_NORM) factor[k] = norm_factor(sum_squares(v[k], 0.0f), HEAD_DIM, eps);
  }
  if (OP == NORM) squares = norm_factor(squares, num_cols, eps);
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    if (OP == NORM) factor[k] = squares;
    for (int i = 0; i < SLICE; i++) {
      if (HAS_NORM) v[k][i] = __fmul_rn(__fmul_rn(v[k][i], factor[k]), w[k][i]);
      if (OP == SIGMOID_MUL) v[k][i] = __fmul_rn(v[k][i], sigmoid(z[k][i]));
      if (OP == GATED_NORM) v[k][i] = __fmul_rn(v[k][i], silu(z[k][i]));
      if (OP == SILU_MUL) v[k][i] = __fmul_rn(silu(v[k][i]), z[k][i]);
    }
  }
  store_row(v, token < num_live, out, token_scale, padded_cols, x_tiles);
}
