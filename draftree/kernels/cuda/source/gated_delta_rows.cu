// What a block of the gated delta rule needs of every row: a key and a query, its columns of the value, all convolved
// here over TAPS tokens (then SiLU, the arithmetic of conv.cu), and gates.
// In shared memory the block's channels of a token stand side by side: query, key, values. Before the rows lie both of
// the layer's windows (see conv.cu), so that a token's inputs are found by one number: negative ones are committed.
// Rows are convolved in place, the last ones first: a row's inputs lie before it, in a tree, too.
constexpr int HISTORY = TAPS - 1;
constexpr int WIDTH = 2 * HEAD_DIM + COLS, VECTORS = WIDTH / 4;  // channels of a block
constexpr int KEY_VECTORS = HEAD_DIM / 4, VALUE_VECTORS = COLS / 4;
constexpr int READERS = WARPS > 1 ? WARPS - 1 : 1;  // warps that read rows, while the last one does the rest
constexpr int READER_THREADS = READERS * 32;
constexpr int BATCH = 2;                // rows that a warp convolves at once
constexpr int GROUP = READERS * BATCH;  // rows that are read before one of them is written
constexpr int VALUE_BATCH = (GROUP * VALUE_VECTORS + READER_THREADS - 1) / READER_THREADS;
constexpr int MAX_ROWS = 64;
static_assert(MAX_ROWS + 2 * HISTORY <= 256 && HISTORY <= 4, "a byte names an input, a word a row's inputs");

struct Layer {
  const float* qkv;                 // [rows][qkv_stride]: queries, keys, values before convolution
  const float* weight;              // [channels][TAPS]
  float* windows;                   // [2][HISTORY][channels]
  int* second_at;
  float* stash;                     // [max nodes][channels]
  const float *alpha, *beta;        // [rows][value heads], own strides
  const float *decay, *decay_bias;  // [value heads]
  float* state;                     // [value heads][column][key]
  float* node_keys;                 // [max nodes][key heads][HEAD_DIM]
  float* node_corrections;          // [max nodes][value heads][HEAD_DIM]
  float* node_decays;               // [max nodes][value heads]
  float* out;                       // [rows][out_stride]
  int key_heads, value_heads, qkv_stride, alpha_stride, beta_stride, out_stride;

  DEV_MEMBER int channels() const { return (2 * key_heads + value_heads) * HEAD_DIM; }
};

struct Rows {
  float* taps;    // [TAPS][WIDTH]
  float* inputs;  // [rows][WIDTH], the windows before them
  float4* gates;  // [rows] decay, beta, q k
  float4* slots;
  u32* origins;  // [rows] a byte for each of the HISTORY inputs before a row, oldest first
};

// What a block works on and what it leaves for others.
struct Place {
  int head, key_head, column;
  int key_channel, value_channel;  // where its queries and its values start
  bool keeps_keys;                 // the first slice of a head keeps its keys, where no head before it has the same
};

struct Pass {
  int live, committed;
  bool is_tree, is_second;  // is_second: the second window counts
};

DEV int before_rows(int row, bool is_second) { return row >= 0 || is_second ? row : row - HISTORY; }

DEV Place find_place(const Layer& p) {
  const int head = blockIdx.x / (HEAD_DIM / COLS), column = blockIdx.x % (HEAD_DIM / COLS) * COLS, key_head = head % p.key_heads;
  return {head, key_head, column, key_head * HEAD_DIM, (2 * p.key_heads + head) * HEAD_DIM + column, column == 0 && head < p.key_heads};
}

// Calls f(vector, channel) for the vectors of a token that a lane has: four numbers of query, key and values.
template <class F>
DEV void each_vector(const Layer& p, const Place& place, F f) {
  const int lane = threadIdx.x % 32, channel = place.key_channel + lane * 4;
  if (lane < KEY_VECTORS) f(lane, channel), f(KEY_VECTORS + lane, channel + p.key_heads * HEAD_DIM);
  if (lane < VALUE_VECTORS) f(2 * KEY_VECTORS + lane, place.value_channel + lane * 4);
}

// Weights do not change: they can be read while earlier grids run. Windows can only be brought closer.
DEV void read_taps(const Layer& p, const Rows& rows, const Place& place) {
  each_vector(p, place, [&](int vector, int channel) {
    for (int line = threadIdx.x / 32; line < 2 * HISTORY; line += READERS) prefetch_line(p.windows + line * p.channels() + channel);
#pragma unroll
    for (int i = threadIdx.x / 32; i < 4; i += READERS)
#pragma unroll
      for (int t = 0; t < TAPS; t++) rows.taps[t * WIDTH + vector * 4 + i] = p.weight[(channel + i) * TAPS + t];
  });
}

// Rows that are not live are read, too: how many are, is not known yet. Nor is, which window counts.
DEV void ask_for_inputs(const Layer& p, const Rows& rows, const Place& place, int max_rows) {
#pragma unroll 2
  for (int row = static_cast<int>(threadIdx.x / 32) - 2 * HISTORY; row < max_rows; row += READERS) {
    const float* from = row < 0 ? p.windows + (row + 2 * HISTORY) * p.channels() : p.qkv + static_cast<u64>(row) * p.qkv_stride;
    each_vector(p, place, [&](int vector, int channel) { copy16_async(rows.inputs + row * WIDTH + vector * 4, from + channel); });
  }
  commit_copies();
}

// By one warp. A chain's rows follow each other, and all follow the window.
DEV void find_origins(const Rows& rows, Pass pass, const int* parents, int max_nodes) {
  const int lane = threadIdx.x % 32, own[2] = {parents[min(lane, max_nodes - 1)], parents[min(lane + 32, max_nodes - 1)]};
#pragma unroll
  for (int j = 0; j < MAX_ROWS / 32; j++) {
    int row = lane + j * 32;
    u32 origin = 0;
#pragma unroll
    for (int t = HISTORY - 1; t >= 0; t--) {
      const int low = __shfl_sync(~0u, own[0], row & 31), high = __shfl_sync(~0u, own[1], row & 31);
      row = pass.is_tree && row >= 0 ? (row < 32 ? low : high) : row - 1;
      origin |= static_cast<u32>(before_rows(row, pass.is_second) + 2 * HISTORY) << 8 * t;
    }
    rows.origins[lane + j * 32] = origin;
  }
}

// A committed pass leaves its last inputs in the window that does not count; from then on that one does.
DEV void move_window(const Layer& p, const Rows& rows, const Place& place, Pass pass) {
#pragma unroll 1
  for (int line = threadIdx.x / 32; line < HISTORY; line += READERS) {
    const int row = before_rows(pass.live - HISTORY + line, pass.is_second);
    float* to = p.windows + (line + (pass.is_second ? 0 : HISTORY)) * p.channels();
    each_vector(p, place, [&](int vector, int channel) {
      if (vector >= 2 * KEY_VECTORS || place.keeps_keys)
        *reinterpret_cast<float4*>(to + channel) = reinterpret_cast<const float4*>(rows.inputs)[row * VECTORS + vector];
    });
  }
  if (blockIdx.x == 0 && threadIdx.x == 0 && !pass.is_second) *p.second_at = pass.committed + pass.live;
}

DEV float4 fma4(float4 a, float4 b, float4 c) {
  return make_float4(__fmaf_rn(a.x, b.x, c.x), __fmaf_rn(a.y, b.y, c.y), __fmaf_rn(a.z, b.z, c.z), __fmaf_rn(a.w, b.w, c.w));
}

// A vector of COUNT rows, those below 0 left out; stash: where their own inputs are kept, or null.
template <int COUNT>
DEV void convolve(const Rows& rows, const int* row, int vector, float* stash, int channels, float4* sums) {
  const float4 *taps = reinterpret_cast<const float4*>(rows.taps) + vector, *inputs = reinterpret_cast<const float4*>(rows.inputs) + vector;
  u32 origins[COUNT];
#pragma unroll
  for (int b = 0; b < COUNT; b++) origins[b] = rows.origins[max(row[b], 0)], sums[b] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int t = 0; t < TAPS; t++)
#pragma unroll
    for (int b = 0; b < COUNT; b++) {
      const int from = t == HISTORY ? max(row[b], 0) : static_cast<int>(origins[b] >> 8 * t & 255) - 2 * HISTORY;
      const float4 input = inputs[from * VECTORS];
      sums[b] = fma4(taps[t * VECTORS], input, sums[b]);
      if (t == HISTORY && stash && row[b] >= 0) *reinterpret_cast<float4*>(stash + row[b] * channels) = input;
    }
#pragma unroll
  for (int b = 0; b < COUNT; b++)
    if (row[b] >= 0) sums[b] = make_float4(silu(sums[b].x), silu(sums[b].y), silu(sums[b].z), silu(sums[b].w));
}

// Queries and keys of a warp's rows, made unit vectors; a lane has four numbers of each.
DEV void convolve_keys(const Layer& p, const Rows& rows, const Place& place, const int* row, bool has_stash, float4* q, float4* k) {
  const int lane = threadIdx.x % 32, vector = min(lane, KEY_VECTORS - 1);
  const bool has_keys = lane < KEY_VECTORS;
  float* stash = has_stash && has_keys ? p.stash + place.key_channel + vector * 4 : nullptr;
  convolve<BATCH>(rows, row, vector, stash, p.channels(), q);
  convolve<BATCH>(rows, row, KEY_VECTORS + vector, stash ? stash + p.key_heads * HEAD_DIM : nullptr, p.channels(), k);
  float sums[3 * BATCH];
#pragma unroll
  for (int b = 0; b < BATCH; b++) {
    sums[3 * b] = has_keys ? dot4(q[b], q[b]) : 0.0f, sums[3 * b + 1] = has_keys ? dot4(k[b], k[b]) : 0.0f;
    sums[3 * b + 2] = has_keys ? dot4(q[b], k[b]) : 0.0f;
  }
  sum_lanes<32, 3 * BATCH>(sums);
#pragma unroll
  for (int b = 0; b < BATCH; b++) {
    const float q_factor = __fmul_rn(query_scale(), unit_factor(sums[3 * b])), k_factor = unit_factor(sums[3 * b + 1]);
    if (lane == 0 && row[b] >= 0) rows.gates[row[b]].z = __fmul_rn(__fmul_rn(sums[3 * b + 2], q_factor), k_factor);
    q[b] = scaled(q[b], q_factor), k[b] = scaled(k[b], k_factor);
  }
}

// Called by the readers, when the inputs are there.
DEV void convolve_rows(const Layer& p, const Rows& rows, const Place& place, Pass pass) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  // Other warps begin with values than with keys: a single row is shared out.
  const int item = READER_THREADS - 1 - threadIdx.x, value = 2 * KEY_VECTORS + item % VALUE_VECTORS;
  float* stash = pass.is_tree ? p.stash + place.value_channel + item % VALUE_VECTORS * 4 : nullptr;
  float4* inputs = reinterpret_cast<float4*>(rows.inputs);
#pragma unroll 1
  for (int end = pass.live; end > 0; end -= GROUP) {
    int row[BATCH], value_row[VALUE_BATCH];
    float4 q[BATCH], k[BATCH], v[VALUE_BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) row[b] = end - 1 - warp - b * READERS;
#pragma unroll
    for (int b = 0; b < VALUE_BATCH; b++) {
      const int back = (item + b * READER_THREADS) / VALUE_VECTORS;
      value_row[b] = back < GROUP ? end - 1 - back : -1;
    }
    if (row[0] >= 0) convolve_keys(p, rows, place, row, pass.is_tree && place.keeps_keys, q, k);
    if (value_row[0] >= 0) convolve<VALUE_BATCH>(rows, value_row, value, stash, p.channels(), v);
    meet_some(1, READER_THREADS);
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      if (row[b] < 0 || lane >= KEY_VECTORS) continue;
      inputs[row[b] * VECTORS + lane] = q[b], inputs[row[b] * VECTORS + KEY_VECTORS + lane] = k[b];
      if (pass.is_tree && place.keeps_keys)
        reinterpret_cast<float4*>(p.node_keys + (row[b] * p.key_heads + place.key_head) * HEAD_DIM)[lane] = k[b];
    }
#pragma unroll
    for (int b = 0; b < VALUE_BATCH; b++)
      if (value_row[b] >= 0) inputs[value_row[b] * VECTORS + value] = v[b];
  }
}

// By one warp.
DEV void compute_gates(const Layer& p, const Rows& rows, const Place& place, Pass pass, int max_rows) {
  float alpha[MAX_ROWS / 32], beta[MAX_ROWS / 32];
#pragma unroll
  for (int j = 0; j < MAX_ROWS / 32; j++) {
    const int row = min(static_cast<int>(threadIdx.x % 32) + j * 32, max_rows - 1);
    alpha[j] = p.alpha[static_cast<u64>(row) * p.alpha_stride + place.head];
    beta[j] = p.beta[static_cast<u64>(row) * p.beta_stride + place.head];
  }
  const float rate = p.decay[place.head], bias = p.decay_bias[place.head];
#pragma unroll 1
  for (int j = 0; j < MAX_ROWS / 32; j++) {
    const int row = threadIdx.x % 32 + j * 32;
    if (row >= pass.live) return;
    const float decay = expf(log_decay(j ? alpha[1] : alpha[0], rate, bias));
    rows.gates[row].x = decay, rows.gates[row].y = open_gate(j ? beta[1] : beta[0]);
    if (pass.is_tree && place.column == 0) p.node_decays[row * p.value_heads + place.head] = decay;
  }
}
