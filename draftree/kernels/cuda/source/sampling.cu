// Choosing a token for each row of logits, and ranking a draft's candidates: the largest logit / T + noise. Blocks
// share out a row in slices; each leaves the best of its slice, and the last one to finish picks from those.
constexpr int VALUES = 32;  // logits a thread
constexpr int SLICE = THREADS * VALUES;

// How logits become scores. Tokens below the border (a key of logit / T) are out.
struct Scoring {
  const float* logits;
  u64 noise;
  u64 border;
  float temperature;
  int vocab;
  bool is_noisy;
};

DEV float scaled(float logit, float temperature) { return temperature > 0.0f ? __fdiv_rn(logit, temperature) : logit; }

DEV float noisy(float value, const Scoring& s, int token, bool is_rough) {
  if (s.border && key_of(value, token) < s.border) return minus_infinity();
  const u32 bits = noise_bits(s.noise, token);
  return __fadd_rn(value, is_rough ? rough_noise(bits) : exact_noise(bits));
}

// The token of a thread's value i, counted from the start of the slice: four neighbours come with one load.
DEV int place(int i) { return (i / 4 * THREADS + threadIdx.x) * 4 + i % 4; }

// Where a thread keeps its value i in shared memory: neighbours in neighbouring banks.
DEV int slot(int i) { return i * THREADS + threadIdx.x; }

// v[slot(i)] = the values of the slice that starts at token `first`; each thread reads only what it wrote.
DEV void load_values(const Scoring& s, int first, float* v) {
#pragma unroll
  for (int i = 0; i < VALUES; i += 4) {
    const int token = first + place(i);
    float4 four = make_float4(minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity());
    if (token + 3 < s.vocab) {
      four = *reinterpret_cast<const float4*>(s.logits + token);
    } else {
      if (token < s.vocab) four.x = s.logits[token];
      if (token + 1 < s.vocab) four.y = s.logits[token + 1];
      if (token + 2 < s.vocab) four.z = s.logits[token + 2];
    }
    v[slot(i)] = four.x, v[slot(i + 1)] = four.y, v[slot(i + 2)] = four.z, v[slot(i + 3)] = four.w;
  }
  if (s.temperature > 0.0f)
#pragma unroll 2
    for (int i = 0; i < VALUES; i++) v[slot(i)] = __fdiv_rn(v[slot(i)], s.temperature);
}

// A slice's scores. Where impossible tokens are not wanted even as the last choice, they have no key.
struct SliceKeys {
  const float* v;
  int first, vocab;
  bool keep_infinite;
  DEV_MEMBER float score(int i) const { return v[slot(i)]; }
  DEV_MEMBER u64 key(int i) const {
    const int token = first + place(i);
    return token < vocab && (keep_infinite || score(i) > minus_infinity()) ? key_of(score(i), token) : 0;
  }
};

// best->sorted = the `count` best keys of the slice that starts at token `first`; v keeps the scores.
DEV void select_slice(const Scoring& s, int first, int count, bool keep_infinite, float* v, Best* best) {
  const SliceKeys keys = {v, first, s.vocab, keep_infinite};
  bool is_rough = s.is_noisy;
  int num_keys;
  while (true) {
    load_values(s, first, v);
    if (s.is_noisy)
#pragma unroll 2
      for (int i = 0; i < VALUES; i++) v[slot(i)] = noisy(v[slot(i)], s, first + place(i), is_rough);
    num_keys = list_best(keys, VALUES, count, is_rough ? 2.0f * ROUGH_ERROR : 0.0f, best);
    if (num_keys <= ROOM) break;
    is_rough = false;  // scores so large that the noise is lost in their rounding
  }
  if (is_rough)
    for (int i = threadIdx.x; i < num_keys; i += THREADS) {
      const int token = token_of(best->keys[i]);
      best->keys[i] = key_of(noisy(scaled(s.logits[token], s.temperature), s, token, false), token);
    }
  sort_listed(num_keys, count, best);
}

// The best keys of all slices of a row.
struct RowKeys {
  const u64* row;
  int total;
  DEV_MEMBER u64 key(int i) const {
    const int at = i * THREADS + threadIdx.x;
    return at < total ? __ldcg(row + at) : 0;
  }
  DEV_MEMBER float score(int i) const { return score_of(key(i)); }
};

// The last block of a row returns true, with the row's `count` best keys sorted.
DEV bool merge_slices(u64* slices, int* arrived, int count, Best* best) {
  const int num_slices = gridDim.x, total = num_slices * count;
  u64* row = slices + static_cast<u64>(blockIdx.y) * num_slices * MAX_TOP_K;
  if (threadIdx.x < count) row[blockIdx.x * count + threadIdx.x] = best->sorted[threadIdx.x];
  if (!is_last_block(arrived + blockIdx.y, num_slices, best)) return false;
  const RowKeys keys = {row, total};
  sort_listed(list_best(keys, (total + THREADS - 1) / THREADS, count, 0.0f, best), count, best);
  return true;
}

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

// Adds up e^(value - top) of a slice, for the last block to normalise with.
DEV void weigh_slice(const float* v, float top, float2* weights, float* parts) {
  float sum = 0.0f;
  if (top > minus_infinity())
    for (int i = 0; i < VALUES; i++) sum += expf(v[slot(i)] - top);
  sum = block_sum(sum, parts);
  if (threadIdx.x == 0) weights[blockIdx.y * gridDim.x + blockIdx.x] = make_float2(top, sum);
}

// The logarithm of the sum of e^value over a row.
DEV double log_total(const float2* weights, float top, double* parts) {
  double term = 0.0;
  if (threadIdx.x < gridDim.x) {
    const float2 slice = __ldcg(weights + blockIdx.y * gridDim.x + threadIdx.x);
    if (slice.y > 0.0f) term = slice.y * exp(static_cast<double>(slice.x) - top);
  }
  return top + log(block_sum(term, parts));
}

// Blocks [slices, rows]. Row i stands for the position i + 1 after the root of `target`; control counts the rows.
extern "C" __global__ void __launch_bounds__(THREADS)
    rank_kernel(const float* logits, const int* control, const int* target, const int* words, u64* slices, float2* weights,
                int* arrived, int* ids, float* log_probs, int stride, int vocab, int count) {
  __shared__ Best best;
  __shared__ float v[SLICE], parts[THREADS / 32];
  __shared__ double double_parts[THREADS / 32];
  let_later_grids_start();
  wait_for_earlier_grids();
  const int row = blockIdx.y;
  if (row >= control[NUM_ROWS]) return;
  const float temperature = temperature_of(words);
  const Scoring s = {logits + static_cast<u64>(row) * stride, noise_key(word_pair(words, SEED), target[COMMITTED] + 1 + row),
                     0, temperature, vocab, temperature > 0.0f};
  select_slice(s, blockIdx.x * SLICE, count, true, v, &best);
  if (!s.is_noisy) weigh_slice(v, best.sorted[0] ? score_of(best.sorted[0]) : minus_infinity(), weights, parts);
  if (!merge_slices(slices, arrived, count, &best)) return;
  const u64 key = threadIdx.x < count ? best.sorted[threadIdx.x] : 0;
  const float top = score_of(best.sorted[0]), score = score_of(key);
  if (s.is_noisy) {  // the scores as if nothing but the candidates existed
    const float total = block_sum(threadIdx.x < count ? expf(score - top) : 0.0f, parts);
    if (threadIdx.x < count) log_probs[row * count + threadIdx.x] = score - top - logf(total);
  } else {
    const double log_sum = log_total(weights, top, double_parts);
    if (threadIdx.x < count) log_probs[row * count + threadIdx.x] = static_cast<float>(score - log_sum);
  }
  if (threadIdx.x < count) ids[row * count + threadIdx.x] = token_of(key);
}
