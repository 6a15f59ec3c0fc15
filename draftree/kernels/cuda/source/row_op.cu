// What a matrix product's input is made from, a row at a time (halves.cu): the row in slices, and what OP computes of it.
// Rows start at multiples of 16 bytes, and columns come in whole slices.
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

// The threads' slices of a row.
struct RowSlices {
  float v[KEPT][SLICE], w[KEPT][SLICE], z[KEPT][SLICE], squares[KEPT];

  // Weights never change: they need not wait for earlier grids.
  DEV_MEMBER void load_weights(const float* weight, int num_cols) {
    if (!HAS_NORM) return;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int column = slice_column(k);
      load_slice(weight, OP == GATED_NORM ? column % HEAD_DIM : column, column < num_cols, w[k]);
    }
  }

  DEV_MEMBER void load(const float* row, const float* other, int num_cols) {
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
      const int column = slice_column(k);
      load_slice(row, column, column < num_cols, v[k]);
      if (HAS_OTHER) load_slice(other, column, column < num_cols, z[k]);
    }
  }

  // The row as it came.
  DEV_MEMBER void copy(float* to, int num_cols) const {
#pragma unroll
    for (int k = 0; k < KEPT; k++)
      if (slice_column(k) < num_cols) copy_slice(v[k], to + slice_column(k));
  }

  // What each value becomes by itself, or with its head.
  DEV_MEMBER void combine(float eps) {
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
  }

  // What takes all of the row; returns its largest value. All threads of the row call.
  DEV_MEMBER float finish(int num_cols, float eps) {
    if (OP != NORM) return largest_of_row(v);
    float largest = largest_of_slices(v);  // one exchange for both
    const float factor = norm_factor(reduce_row(squares, largest), num_cols, eps);
    for (int k = 0; k < KEPT; k++)
      for (int i = 0; i < SLICE; i++) v[k][i] = __fmul_rn(v[k][i], factor);
    return __fmul_rn(largest, factor);
  }
};
