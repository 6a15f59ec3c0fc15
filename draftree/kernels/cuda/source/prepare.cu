// Makes the input of a matrix product, a row a cluster (row_op.cu).
// rows, if given, says which row of x each row is made from. copy, if given, gets the rows as they came (NORM).
KERNEL CLUSTER_DIMS void LAUNCH_BOUNDS(WARPS * 32, BLOCKS_AN_SM)
    prepare_kernel(const float* x, const float* other, const float* weight, const int* rows, u8* out, float* token_scale,
                   const int* live, float* copy, float eps, int num_cols, int padded_cols, int x_stride, int other_stride,
                   int copy_stride, int x_tiles) {
  const int token = row_of_block();
  RowSlices row;
  begin_cluster();
  let_later_grids_start();
  row.load_weights(weight, num_cols);
  wait_for_earlier_grids();
  const int num_live = live ? *live : token + 1;
  const int from = OP == NORM && rows ? (token < num_live ? rows[token] : 0) : token;
  row.load(x + static_cast<u64>(from) * x_stride, other + static_cast<u64>(token) * other_stride, num_cols);
  if (OP == NORM && copy && token < num_live) row.copy(copy + static_cast<u64>(token) * copy_stride, num_cols);
  row.combine(eps);
  // Only here it matters whether the row is live, so that no load had to wait for the answer.
  if (token >= num_live) return;
  const float largest = row.finish(num_cols, eps);
  store_scaled(row.v, largest, out, token_scale, padded_cols, x_tiles);
}
