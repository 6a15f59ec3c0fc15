// Rows of logits in slices, a block each: the best scores of a slice, where a score is logit / T, with noise or without.
// Each block leaves the best of its slice, and the last one of a row picks from those.
constexpr int VALUES = 32;  // logits a thread
constexpr int SLICE = THREADS * VALUES;

// What a block keeps in shared memory: its slice of the values, and the best so far.
struct SliceWorkspace {
  Best best;
  __align__(8) float v[SLICE];
};
static_assert(sizeof(SliceWorkspace) <= WORKSPACE_BYTES, "as in sampling.py");

// How logits become scores. Tokens below the threshold (a key of logit / T) are out.
struct Scoring {
  const float* logits;
  u64 noise;
  u64 threshold;
  float temperature;
  int vocab;
  bool is_noisy;
};

DEV float scaled(float logit, float temperature) { return temperature > 0.0f ? __fdiv_rn(logit, temperature) : logit; }

DEV float noisy(float value, const Scoring& s, int token, bool is_rough) {
  if (s.threshold && key_of(value, token) < s.threshold) return minus_infinity();
  const u32 bits = noise_bits(s.noise, token);
  return __fadd_rn(value, is_rough ? rough_noise(bits) : exact_noise(bits));
}

// The token of a thread's value i, counted from the start of the slice: four neighbours come with one load.
DEV int place(int i) { return (i / 4 * THREADS + threadIdx.x) * 4 + i % 4; }

// Where a thread keeps its value i in shared memory: neighbours in neighbouring banks.
DEV int slot(int i) { return i * THREADS + threadIdx.x; }

// Four neighbouring logits, minus infinity beyond the vocabulary.
DEV float4 load_four(const float* logits, int token, int vocab) {
  if (token + 3 < vocab) return *reinterpret_cast<const float4*>(logits + token);
  float4 four = make_float4(minus_infinity(), minus_infinity(), minus_infinity(), minus_infinity());
  if (token < vocab) four.x = logits[token];
  if (token + 1 < vocab) four.y = logits[token + 1];
  if (token + 2 < vocab) four.z = logits[token + 2];
  return four;
}

// v[slot(i)] = the values of the slice that starts at token `first`; each thread reads only what it wrote.
DEV void load_values(const Scoring& s, int first, float* v) {
#pragma unroll
  for (int i = 0; i < VALUES; i += 4) {
    const float4 four = load_four(s.logits, first + place(i), s.vocab);
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
