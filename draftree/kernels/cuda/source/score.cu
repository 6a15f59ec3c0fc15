// Log-probabilities along the accepted path: of each token that was chosen, and of the most probable ones beside it.

// Blocks [slices, rows], after the accept walk. Row i is that of the path's node i. records: [num_records][MAX_NODES][ROW_LEN],
// see kernels/cuda/scores.py; they may lie in the host's memory.
KERNEL void LAUNCH_BOUNDS(THREADS)
    score_kernel(const float* logits, const int* control, const int* tokens, const int* path, const int* words, u64* slices,
                 float2* weights, int* arrived, int* records, int num_records, int stride, int vocab) {
  DYNAMIC_SHARED(memory);
  SliceWorkspace& workspace = *reinterpret_cast<SliceWorkspace*>(memory);
  Best& best = workspace.best;
  __shared__ float parts[THREADS / 32];
  __shared__ double double_parts[THREADS / 32];
  let_later_grids_start();
  wait_for_earlier_grids();
  const int row = blockIdx.y, path_len = control[PATH_LEN], count = words[NUM_SCORES];
  if (row >= path_len) return;
  const Scoring s = {logits + static_cast<u64>(path[row]) * stride, 0, 0, 0.0f, vocab, false};
  select_slice(s, blockIdx.x * SLICE, count, true, workspace.v, &best);
  weigh_slice(workspace.v, best.sorted[0] ? score_of(best.sorted[0]) : minus_infinity(), weights, parts);
  if (!merge_slices(slices, arrived, count, &best)) return;
  const double log_sum = log_total(weights, score_of(best.sorted[0]), double_parts);
  int* record = records + ((words[NUM_ROUNDS] - 1) % num_records * MAX_NODES + row) * ROW_LEN;
  if (threadIdx.x == 0) {
    const int token = row + 1 < path_len ? tokens[path[row + 1]] : words[ANCHOR];  // the bonus
    record[0] = __float_as_int(static_cast<float>(s.logits[token] - log_sum));
  }
  if (threadIdx.x >= count) return;
  const u64 key = best.sorted[threadIdx.x];
  record[1 + threadIdx.x] = token_of(key);
  record[1 + MAX_TOP_K + threadIdx.x] = __float_as_int(static_cast<float>(score_of(key) - log_sum));
}
