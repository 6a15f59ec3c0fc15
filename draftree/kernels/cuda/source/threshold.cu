// The threshold of top_k and top_p in long rows: first into bins by distance from the top, then those of the one bin in
// which the threshold lies. Weights are whole numbers, so sums do not depend on the order. Slices as in slice.cu.
constexpr int NUM_BINS = 1024;
constexpr float BINS_PER_UNIT = 32.0f;
constexpr int MEMBERS = 4096;  // of a bin, that a row's list can hold
static_assert(NUM_BINS <= ROOM, "bins take the place of keys");
constexpr int BINS_A_THREAD = NUM_BINS / THREADS;
static_assert(MEMBERS * sizeof(u64) <= SLICE * sizeof(float), "members take the place of the values");

struct Search {
  float top;
  u64 inside;  // only keys from here on count
  bool is_mass;
};

DEV float row_top(const float* peaks) {
  float top = minus_infinity();
  for (int i = threadIdx.x % 32; i < gridDim.x; i += 32) top = fmaxf(top, peaks[blockIdx.y * gridDim.x + i]);
  for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  return top;
}

DEV int bin_of(float value, float top) { return fminf((top - value) * BINS_PER_UNIT, NUM_BINS - 1.0f); }

// One, or e^(value - top) in units of 2^-40; what lies in the last bin has none of those.
DEV u64 weight_of(float value, const Search& search) {
  return search.is_mass ? static_cast<u64>(expf(value - search.top) * 1099511627776.0f) : 1;
}

DEV bool is_searched(const int* words, int vocab, bool is_mass) {
  const int top_k = words[TOP_K];
  if (!(temperature_of(words) > 0.0f) || (top_k > 0 && top_k <= MAX_TOP_K)) return false;
  return is_mass ? word_double(words, TOP_P) < 1.0 : top_k > 0 && top_k < vocab;
}

// The largest value of each slice.
KERNEL void LAUNCH_BOUNDS(THREADS)
    peak_kernel(const float* logits, const int* control, const int* words, float* peaks, int stride, int vocab) {
  DYNAMIC_SHARED(memory);
  SliceWorkspace& workspace = *reinterpret_cast<SliceWorkspace*>(memory);
  float* v = workspace.v;
  __shared__ float parts[THREADS / 32];
  let_later_grids_start();
  wait_for_earlier_grids();
  if (blockIdx.y >= control[NUM_ROWS]) return;
  const Scoring s = {logits + static_cast<u64>(blockIdx.y) * stride, 0, 0, temperature_of(words), vocab, false};
  load_values(s, blockIdx.x * SLICE, v);
  float top = minus_infinity();
  for (int i = 0; i < VALUES; i++) top = fmaxf(top, v[slot(i)]);
  for (int d = 16; d; d >>= 1) top = fmaxf(top, __shfl_xor_sync(~0u, top, d));
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = top;
  __syncthreads();
  for (int i = 0; i < THREADS / 32; i++) top = fmaxf(top, parts[i]);
  if (threadIdx.x == 0) peaks[blockIdx.y * gridDim.x + blockIdx.x] = top;
}

// Adds a slice's weights to the row's bins, which are zero before. The last bin has no end and is left out.
KERNEL void LAUNCH_BOUNDS(THREADS)
    bin_kernel(const float* logits, const int* control, const int* words, const float* peaks, const u64* thresholds, u64* bins,
               int stride, int vocab, int is_mass) {
  DYNAMIC_SHARED(memory);
  SliceWorkspace& workspace = *reinterpret_cast<SliceWorkspace*>(memory);
  float* v = workspace.v;
  u64* own = workspace.best.keys;
  let_later_grids_start();
  wait_for_earlier_grids();
  if (blockIdx.y >= control[NUM_ROWS] || !is_searched(words, vocab, is_mass)) return;
  const Scoring s = {logits + static_cast<u64>(blockIdx.y) * stride, 0, 0, temperature_of(words), vocab, false};
  const Search search = {row_top(peaks), is_mass ? thresholds[blockIdx.y] : 0, is_mass != 0};
  for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) own[i] = 0;
  __syncthreads();
  load_values(s, blockIdx.x * SLICE, v);
  for (int i = 0; i < VALUES; i++) {
    const float value = v[slot(i)];
    const int bin = bin_of(value, search.top);
    if (bin == NUM_BINS - 1 || key_of(value, blockIdx.x * SLICE + place(i)) < search.inside) continue;
    const u64 weight = weight_of(value, search);
    if (weight) atomicAdd(own + bin, weight);
  }
  __syncthreads();
  for (int i = threadIdx.x; i < NUM_BINS; i += THREADS)
    if (own[i]) atomicAdd(bins + blockIdx.y * NUM_BINS + i, own[i]);
}

struct Found {
  u64 parts[THREADS / 32];
  u64 held;  // by the bins before
  int bin;
};

// The bin in which `held` reaches what is wanted: a number, or a share of all. Returns what is wanted.
DEV u64 find_bin(const u64* bins, const int* words, bool is_mass, Found* found) {
  u64 own[BINS_A_THREAD], sum = 0;
  for (int i = 0; i < BINS_A_THREAD; i++) sum += own[i] = bins[threadIdx.x * BINS_A_THREAD + i];
  u64 before = sum;
  for (int d = 1; d < 32; d *= 2) {
    const u64 other = __shfl_up_sync(~0u, before, d);
    if (threadIdx.x % 32 >= d) before += other;
  }
  if (threadIdx.x % 32 == 31) found->parts[threadIdx.x / 32] = before;
  __syncthreads();
  before -= sum;
  u64 total = 0;
  for (int i = 0; i < THREADS / 32; i++) {
    if (i < threadIdx.x / 32) before += found->parts[i];
    total += found->parts[i];
  }
  u64 wanted = words[TOP_K];
  if (is_mass) wanted = max(1ull, min(total, static_cast<u64>(ceil(word_double(words, TOP_P) * total))));
  if (threadIdx.x == 0) found->bin = NUM_BINS - 1, found->held = total;
  __syncthreads();
  for (int i = 0; i < BINS_A_THREAD; i++) {
    if (before < wanted && wanted <= before + own[i]) found->bin = threadIdx.x * BINS_A_THREAD + i, found->held = before;
    before += own[i];
  }
  __syncthreads();
  return wanted;
}

// Where the keys of the chosen bin reach what is wanted, bit by bit: from the list, or from the row if it is too long.
DEV u64 find_threshold(const Scoring& s, const Search& search, const u64* members, int num_members, u64 wanted, Found* found) {
  const bool is_listed = num_members <= MEMBERS;
  const int total = is_listed ? num_members : s.vocab, bin = found->bin;
  const u64 held = found->held;
  u64 threshold = 0;
  for (int bit = 63; bit >= 0; bit--) {
    const u64 tried = threshold | 1ull << bit;
    u64 sum = 0;
    for (int i = threadIdx.x; i < total; i += THREADS) {
      const u64 key = is_listed ? members[i] : key_of(scaled(s.logits[i], s.temperature), i);
      const float value = score_of(key);
      if (key >= tried && key >= search.inside && bin_of(value, search.top) == bin) sum += weight_of(value, search);
    }
    if (held + block_sum(sum, found->parts) >= wanted) threshold = tried;
  }
  return threshold;
}

// Lists the keys of the chosen bin; the row's last block finds the threshold among them, min_p's too when is_mass, and
// clears the bins.
KERNEL void LAUNCH_BOUNDS(THREADS)
    threshold_kernel(const float* logits, const int* control, const int* words, const float* peaks, u64* thresholds, u64* bins,
                  u64* members, int* num_members, int* arrived, int stride, int vocab, int is_mass) {
  __shared__ Found found;
  DYNAMIC_SHARED(memory);
  SliceWorkspace& workspace = *reinterpret_cast<SliceWorkspace*>(memory);
  Best& best = workspace.best;
  float* v = workspace.v;  // then the members
  let_later_grids_start();
  wait_for_earlier_grids();
  const int row = blockIdx.y;
  if (row >= control[NUM_ROWS]) return;
  const Scoring s = {logits + static_cast<u64>(row) * stride, 0, 0, temperature_of(words), vocab, false};
  const Search search = {row_top(peaks), is_mass ? __ldcg(thresholds + row) : 0, is_mass != 0};
  const bool is_active = is_searched(words, vocab, is_mass);
  u64 wanted = 0;
  bins += row * NUM_BINS, members += static_cast<u64>(row) * MEMBERS;
  if (is_active) {
    wanted = find_bin(bins, words, is_mass, &found);
    load_values(s, blockIdx.x * SLICE, v);
    for (int i = 0; i < VALUES; i++) {
      const int token = blockIdx.x * SLICE + place(i);
      const u64 key = key_of(v[slot(i)], token);
      if (token >= vocab || key < search.inside || bin_of(v[slot(i)], search.top) != found.bin) continue;
      const int at = atomicAdd(num_members + row, 1);
      if (at < MEMBERS) members[at] = key;
    }
  }
  if (!is_last_block(arrived + row, gridDim.x, &best)) return;
  u64 threshold = search.inside;
  if (is_active) {
    const int count = __ldcg(num_members + row);
    u64* listed = reinterpret_cast<u64*>(v);
    for (int i = threadIdx.x; i < min(count, MEMBERS); i += THREADS) listed[i] = __ldcg(members + i);
    __syncthreads();
    threshold = find_threshold(s, search, listed, count, wanted, &found);
    for (int i = threadIdx.x; i < NUM_BINS; i += THREADS) bins[i] = 0;
  }
  if (threadIdx.x) return;
  const float lowest = static_cast<float>(search.top + word_double(words, LOG_MIN_P));
  if (is_mass && lowest > minus_infinity()) threshold = max(threshold, lowest_key(lowest));
  thresholds[row] = threshold;
  num_members[row] = 0;
}
