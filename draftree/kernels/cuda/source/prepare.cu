// Makes the input of a matrix product, a row a cluster: what OP computes, then what halves.cu says. Rows start at
// multiples of 16 bytes, and columns come in whole slices.
#define PLAIN 0
#define NORM 1         // x / root mean square * weight
#define SILU_MUL 2     // silu(x) * other
#define SIGMOID_MUL 3  // x * sigmoid(other)
#define GATED_NORM 4   // the norm of every HEAD_DIM columns, times silu(other)
constexpr bool HAS_OTHER = OP >= SILU_MUL, HAS_NORM = OP == NORM || OP == GATED_NORM;

// How far the values of a norm are scaled, given the sum of their squares.
DEV float norm_factor(float squares, int num_cols, float eps) {
  return 1.0f / sqrtf(__fadd_rn(squares / static_cast<float>(num_cols), eps));
}

// The sum over the threads that share a head.
DEV float sum_head(float v) {
  for (int d = 1; d < HEAD_DIM / SLICE; d <<= 1) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
  return v;
}

DEV float sum_squares(const float* v) {
  float sum = 0.0f;
  for (int i = 0; i < SLICE; i++) sum = __fmaf_rn(v[i], v[i], sum);
  return sum;
}

DEV void copy_slice(const float* v, float* to) {
  reinterpret_cast<float4*>(to)[0] = make_float4(v[0], v[1], v[2], v[3]);
  reinterpret_cast<float4*>(to)[1] = make_float4(v[4], v[5], v[6], v[7]);
}

// rows, if given, says which row of x each row is made from. copy, if given, gets the rows as they came (NORM).
KERNEL CLUSTER_DIMS void LAUNCH_BOUNDS(WARPS * 32, BLOCKS_AN_SM)
    prepare_kernel(const float* x, const float* other, const float* weight, const int* rows, u8* out, float* token_scale,
                   const int* live, float* copy, float eps, int num_cols, int padded_cols, int x_stride, int other_stride,
                   int copy_stride, int x_tiles) {
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
  if (OP == NORM && copy && token < num_live)
#pragma unroll
    for (int k = 0; k < KEPT; k++)
      if (slice_column(k) < num_cols) copy_slice(v[k], copy + static_cast<u64>(token) * copy_stride + slice_column(k));
  float squares[KEPT], largest = 0.0f;
#pragma unroll
  for (int k = 0; k < KEPT; k++) {
    if (HAS_NORM) squares[k] = sum_squares(v[k]);
    const float factor = OP == GATED_NORM ? norm_factor(sum_head(squares[k]), HEAD_DIM, eps) : 1.0f;
    for (int i = 0; i < SLICE; i++) {
      if (OP == GATED_NORM) v[k][i] = __fmul_rn(__fmul_rn(__fmul_rn(v[k][i], factor), w[k][i]), silu(z[k][i]));
      if (OP == NORM) v[k][i] = __fmul_rn(v[k][i], w[k][i]);
      if (OP == SIGMOID_MUL) v[k][i] = __fmul_rn(v[k][i], sigmoid(z[k][i]));
      if (OP == SILU_MUL) v[k][i] = __fmul_rn(silu(v[k][i]), z[k][i]);
    }
  }
  // Only here it matters whether the row is live, so that no load had to wait for the answer.
  if (token >= num_live) return;
  if (OP == NORM) {  // one exchange for both
    largest = largest_of_slices(v);
    const float factor = norm_factor(reduce_row(squares, largest), num_cols, eps);
    largest = __fmul_rn(largest, factor);
    for (int k = 0; k < KEPT; k++)
      for (int i = 0; i < SLICE; i++) v[k][i] = __fmul_rn(v[k][i], factor);
  } else {
    largest = largest_of_row(v);
  }
  store_scaled(v, largest, out, token_scale, padded_cols, x_tiles);
}
