// The token that follows each row of logits: the largest logit / T + noise among those that pass the filters.

// The choice among the `count` best values of a row, sorted: top_p of what they hold, then min_p, then noise.
DEV void choose_sorted(const Scoring& s, const int* words, int count, double* weights, Best* best) {
  const u64 key = threadIdx.x < count ? best->sorted[threadIdx.x] : 0;
  const double top = score_of(best->sorted[0]), top_p = word_double(words, TOP_P);
  const float value = score_of(key);
  if (threadIdx.x < count) weights[threadIdx.x] = exp(value - top);
  if (threadIdx.x == 0) best->num_keys = count;
  __syncthreads();
  if (threadIdx.x == 0 && top_p < 1.0) {
    double total = 0.0, held = 0.0;
    for (int i = 0; i < count; i++) total += weights[i];
    int kept = 0;
    while (kept < count && held < top_p * total) held += weights[kept++];
    best->num_keys = kept;
  }
  __syncthreads();
  const bool is_in = threadIdx.x < best->num_keys && value >= static_cast<float>(top + word_double(words, LOG_MIN_P)) &&
                     value > minus_infinity();
  const int token = token_of(key);
  if (threadIdx.x < count) best->keys[threadIdx.x] = is_in ? key_of(noisy(value, s, token, false), token) : 0;
  __syncthreads();
  sort_listed(count, 1, best);
}

// The largest of a block's keys, for all of its threads.
DEV u64 largest_of_block(u64 key, u64* parts) {
  for (int d = 16; d; d >>= 1) key = max(key, __shfl_xor_sync(~0u, key, d));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = key;
  __syncthreads();
  for (int i = 0; i < THREADS / 32; i++) key = max(key, parts[i]);
  __syncthreads();
  return key;
}

// The row's largest logit, known to its last block: the same as selecting one, with less to do.
DEV void choose_largest(const float* logits, int vocab, u64* slices, int* arrived, int* chosen, u64* parts, Best* best) {
  const int first = blockIdx.x * SLICE;
  float4 four[VALUES / 4];
#pragma unroll
  for (int i = 0; i < VALUES / 4; i++) four[i] = load_four(logits, first + place(4 * i), vocab);
  float top = four[0].x;
  int best_place = 0;
#pragma unroll
  for (int i = 0; i < VALUES; i++) {
    const float value = i % 4 == 0 ? four[i / 4].x : i % 4 == 1 ? four[i / 4].y : i % 4 == 2 ? four[i / 4].z : four[i / 4].w;
    if (value > top) top = value, best_place = i;
  }
  const int token = first + place(best_place);
  u64 key = largest_of_block(token < vocab ? key_of(top, token) : 0, parts);
  u64* row = slices + static_cast<u64>(blockIdx.y) * gridDim.x * MAX_TOP_K;
  if (threadIdx.x == 0) row[blockIdx.x] = key;
  if (!is_last_block(arrived + blockIdx.y, gridDim.x, best)) return;
  key = largest_of_block(threadIdx.x < gridDim.x ? __ldcg(row + threadIdx.x) : 0, parts);
  if (threadIdx.x == 0) chosen[blockIdx.y] = token_of(key);
}

// Blocks [slices, rows]. Row i is that of node rows[i]; its token will stand one position further.
KERNEL void LAUNCH_BOUNDS(THREADS)
    choose_kernel(const float* logits, const int* control, const int* rows, const int* positions, const int* words,
                  const u64* thresholds, u64* slices, int* arrived, int* chosen, int stride, int vocab) {
  DYNAMIC_SHARED(memory);
  SliceWorkspace& workspace = *reinterpret_cast<SliceWorkspace*>(memory);
  Best& best = workspace.best;
  __shared__ double weights[MAX_TOP_K];
  let_later_grids_start();
  wait_for_earlier_grids();
  const int row = blockIdx.y;
  if (row >= control[NUM_ROWS]) return;
  const float temperature = temperature_of(words);
  if (temperature == 0.0f) {
    choose_largest(logits + static_cast<u64>(row) * stride, vocab, slices, arrived, chosen, best.groups, &best);
    return;
  }
  const int top_k = words[TOP_K];
  const bool is_short = top_k > 0 && top_k <= MAX_TOP_K && top_k < vocab;
  const int count = is_short ? top_k : 1;
  const Scoring s = {logits + static_cast<u64>(row) * stride,
                     noise_key(word_pair(words, SEED), positions[rows[row]] + 1),
                     thresholds && !is_short ? thresholds[row] : 0,
                     temperature,
                     vocab,
                     !is_short};
  select_slice(s, blockIdx.x * SLICE, count, false, workspace.v, &best);
  if (!merge_slices(slices, arrived, count, &best)) return;
  if (is_short) choose_sorted(s, words, count, weights, &best);
  if (threadIdx.x == 0) chosen[row] = best.sorted[0] ? token_of(best.sorted[0]) : 0;
}
