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

// Blocks [slices, rows]. Row i is that of node rows[i]; its token will stand one position further.
extern "C" __global__ void __launch_bounds__(THREADS)
    choose_kernel(const float* logits, const int* control, const int* rows, const int* positions, const int* words,
                  const u64* borders, u64* slices, int* arrived, int* chosen, int stride, int vocab) {
  __shared__ Best best;
  __shared__ float v[SLICE];
  __shared__ double weights[MAX_TOP_K];
  let_later_grids_start();
  wait_for_earlier_grids();
  const int row = blockIdx.y;
  if (row >= control[NUM_ROWS]) return;
  const float temperature = temperature_of(words);
  const int top_k = words[TOP_K];
  const bool is_short = temperature > 0.0f && top_k > 0 && top_k <= MAX_TOP_K && top_k < vocab;
  const int count = is_short ? top_k : 1;
  const Scoring s = {logits + static_cast<u64>(row) * stride,
                     noise_key(word_pair(words, SEED), positions[rows[row]] + 1),
                     borders && !is_short && temperature > 0.0f ? borders[row] : 0,
                     temperature,
                     vocab,
                     temperature > 0.0f && !is_short};
  select_slice(s, blockIdx.x * SLICE, count, temperature == 0.0f, v, &best);
  if (!merge_slices(slices, arrived, count, &best)) return;
  if (is_short) choose_sorted(s, words, count, weights, &best);
  if (threadIdx.x == 0) chosen[row] = best.sorted[0] ? token_of(best.sorted[0]) : 0;
}
