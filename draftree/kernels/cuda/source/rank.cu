// The best candidates of each row of logits, with log-probabilities.

// Blocks [slices, rows]; control counts the rows. Row i of a draft stands for the position i + 1 after the root of
// `target`, and with a temperature rows after the first have other weights; with positions, a row is that
// of node rows[i], and its tokens stand one position further.
KERNEL void LAUNCH_BOUNDS(THREADS)
    rank_kernel(const float* logits, const int* control, const int* target, const int* rows, const int* positions,
                const int* words, u64* slices, float2* weights, int* arrived, int* ids, float* log_probs, int stride, int vocab, int count,
                float later_logits, float later_noise) {
  DYNAMIC_SHARED(memory);
  SliceWorkspace& workspace = *reinterpret_cast<SliceWorkspace*>(memory);
  Best& best = workspace.best;
  __shared__ float parts[THREADS / 32];
  __shared__ double double_parts[THREADS / 32];
  let_later_grids_start();
  wait_for_earlier_grids();
  const int row = blockIdx.y;
  if (row >= control[NUM_ROWS]) return;
  const float temperature = temperature_of(words);
  const bool is_later = !positions && row > 0 && temperature > 0.0f;
  const float weight = is_later ? later_logits : 1.0f, noise_size = __fmul_rn(temperature, is_later ? later_noise : 1.0f);
  const int position = positions ? positions[rows[row]] + 1 : target[COMMITTED] + 1 + row;
  const Scoring s = {logits + static_cast<u64>(row) * stride, noise_key(word_pair(words, SEED), position),
                     0, __fdiv_rn(noise_size, weight), vocab, noise_size > 0.0f};
  select_slice(s, blockIdx.x * SLICE, count, true, workspace.v, &best);
  if (!s.is_noisy) weigh_slice(workspace.v, best.sorted[0] ? score_of(best.sorted[0]) : minus_infinity(), weights, parts);
  if (!merge_slices(slices, arrived, count, &best)) return;
  const u64 key = threadIdx.x < count ? best.sorted[threadIdx.x] : 0;
  const float top = score_of(best.sorted[0]), score = score_of(key);
  if (s.is_noisy) {  // the scores as if nothing but the candidates existed
    const float behind = noise_size * (score - top);
    const float total = block_sum(threadIdx.x < count ? expf(behind) : 0.0f, parts);
    if (threadIdx.x < count) log_probs[row * count + threadIdx.x] = behind - logf(total);
  } else {
    const double log_sum = log_total(weights, top, double_parts);
    if (threadIdx.x < count) log_probs[row * count + threadIdx.x] = static_cast<float>(score - log_sum);
  }
  if (threadIdx.x < count) ids[row * count + threadIdx.x] = token_of(key);
}
