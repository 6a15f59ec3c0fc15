// Second half of the gated delta rule for long chains: the state goes from chunk to chunk (see gated_delta_chunk.cu).
// With S before a chunk: d = u - w S, out = e^g q S + products d, S = e^(g_last) S + sum_i e^(g_last - g_i) k_i d_i.
// A block has COLS columns of a head; S stays in registers as sums of the matrix instruction, in float32. Operands have
// 11 bits but float32's range. Eight warps: four strips of rows (or keys) by two halves of the columns.
constexpr int CHUNK = 64;
constexpr int THREADS = 256;
constexpr int KEY_STRIDE = HEAD_DIM + 8;    // halves, or floats of the state
constexpr int CHUNK_STRIDE = CHUNK + 8;     // the same
constexpr int TILES = COLS / 16;            // of 8 columns, a warp
constexpr int STRIPS = HEAD_DIM < 64 ? 1 : HEAD_DIM / 64;  // of 16 keys, a warp
constexpr int W = 0, QUERIES = W + CHUNK * KEY_STRIDE, KEYS = QUERIES + CHUNK * KEY_STRIDE;
constexpr int PRODUCTS = KEYS + HEAD_DIM * CHUNK_STRIDE, GROWTH = PRODUCTS + CHUNK * CHUNK_STRIDE;
constexpr int STAGE = GROWTH + 2 * CHUNK;  // halves

struct Chunks {
  const u16 *queries, *keys;
  const float* u;
  const u16 *w, *products;
  const float* growth;
  float* out;  // [rows][out_stride]
  int num_rows, key_heads, value_heads, out_stride;
};

// Rows of LEN halves, 8 more apart in shared memory.
template <int ROWS, int LEN>
DEV void copy_rows(u16* to, const u16* from) {
  for (int i = threadIdx.x; i < ROWS * LEN / 8; i += THREADS)
    copy16_async(to + i / (LEN / 8) * (LEN + 8) + i % (LEN / 8) * 8, from + i * 8);
}

DEV void fill_stage(const Chunks& p, u16* stage, int chunk, int head) {
  const u64 by_key = static_cast<u64>(chunk) * p.key_heads + head % p.key_heads, by_value = static_cast<u64>(chunk) * p.value_heads + head;
  copy_rows<CHUNK, HEAD_DIM>(stage + W, p.w + by_value * CHUNK * HEAD_DIM);
  copy_rows<CHUNK, HEAD_DIM>(stage + QUERIES, p.queries + by_key * CHUNK * HEAD_DIM);
  copy_rows<HEAD_DIM, CHUNK>(stage + KEYS, p.keys + by_key * CHUNK * HEAD_DIM);
  copy_rows<CHUNK, CHUNK>(stage + PRODUCTS, p.products + by_value * CHUNK * CHUNK);
  if (threadIdx.x < CHUNK / 4) copy16_async(stage + GROWTH + threadIdx.x * 8, p.growth + by_value * CHUNK + threadIdx.x * 4);
}

// 16 rows by 8 columns of halves. Columns 2t and 2t + 1 stand where the instruction has t and t + 4: a sum does not mind.
DEV void load_left(const u16* from, int stride, u32* a) {
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    const u32 v = *reinterpret_cast<const u32*>(from + (lane / 4 + i * 8) * stride + lane % 4 * 2);
    a[i] = __float_as_uint(lower_half(v)), a[i + 2] = __float_as_uint(upper_half(v));
  }
}

// 8 columns, each with its 8 rows side by side, in the same order.
DEV float2 load_right(const float* from, int stride) {
  const int lane = threadIdx.x % 32;
  return *reinterpret_cast<const float2*>(from + lane / 4 * stride + lane % 4 * 2);
}

struct Lane {
  int row, column, strip;  // of a lane's first sum: [row + 8 half][column + 8 tile + side]
};

// d for this chunk, and q S.
DEV void apply_state(const u16* stage, const float* state, const Lane& at, float (*ws)[4], float (*qs)[4]) {
#pragma unroll 4
  for (int key = 0; key < HEAD_DIM; key += 8) {
    u32 w[4], q[4];
    load_left(stage + W + at.strip * 16 * KEY_STRIDE + key, KEY_STRIDE, w);
    load_left(stage + QUERIES + at.strip * 16 * KEY_STRIDE + key, KEY_STRIDE, q);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const float2 s = load_right(state + n * 8 * KEY_STRIDE + key, KEY_STRIDE);
      mma_tf32(ws[n], w, __float_as_uint(s.x), __float_as_uint(s.y));
      mma_tf32(qs[n], q, __float_as_uint(s.x), __float_as_uint(s.y));
    }
  }
}

DEV void apply_products(const u16* stage, const float* d, const Lane& at, float (*out)[4]) {
  for (int i = 0; i < (at.strip + 1) * 16; i += 8) {
    u32 a[4];
    load_left(stage + PRODUCTS + at.strip * 16 * CHUNK_STRIDE + i, CHUNK_STRIDE, a);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const float2 b = load_right(d + n * 8 * CHUNK_STRIDE + i, CHUNK_STRIDE);
      mma_tf32(out[n], a, to_tf32(b.x), to_tf32(b.y));
    }
  }
}

DEV void advance_state(const u16* stage, const float* d, const float* weights, const Lane& at, float (*s)[TILES][4]) {
#pragma unroll 2
  for (int i = 0; i < CHUNK; i += 8) {
    const float2 weight = *reinterpret_cast<const float2*>(weights + i + threadIdx.x % 4 * 2);
    u32 a[STRIPS][4];
#pragma unroll
    for (int m = 0; m < STRIPS; m++) load_left(stage + KEYS + (at.strip * STRIPS + m) * 16 * CHUNK_STRIDE + i, CHUNK_STRIDE, a[m]);
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const float2 b = load_right(d + n * 8 * CHUNK_STRIDE + i, CHUNK_STRIDE);
#pragma unroll
      for (int m = 0; m < STRIPS; m++) mma_tf32(s[m][n], a[m], to_tf32(b.x * weight.x), to_tf32(b.y * weight.y));
    }
  }
}

// Calls f(m, n, i, key, column) for each of a lane's sums of the state, columns within the block.
template <class F>
DEV void each_sum(const Lane& at, F f) {
#pragma unroll
  for (int m = 0; m < STRIPS; m++)
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        f(m, n, i, (at.strip * STRIPS + m) * 16 + threadIdx.x % 32 / 4 + i / 2 * 8, at.column + n * 8 + i % 2);
}

DEV void store_out(const Chunks& p, const Lane& at, int chunk, int column, const float (*out)[4]) {
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int row = chunk * CHUNK + at.row + half * 8;
      if (row < p.num_rows)
        *reinterpret_cast<float2*>(p.out + static_cast<u64>(row) * p.out_stride + column + n * 8) =
            make_float2(out[n][half * 2], out[n][half * 2 + 1]);
    }
}

KERNEL void LAUNCH_BOUNDS(THREADS)
    delta_pass_kernel(const int* control, int first, const u16* queries, const u16* keys, const float* u, const u16* w, const u16* products,
                      const float* growth, float* state, float* out, int num_rows, int key_heads, int value_heads,
                      int out_stride) {
  Chunks p = {queries, keys, u, w, products, growth, out, num_rows, key_heads, value_heads, out_stride};
  DYNAMIC_SHARED(memory);
  __shared__ __align__(16) float weights[CHUNK];
  float* shared_state = reinterpret_cast<float*>(memory);       // [COLS][KEY_STRIDE]
  float* shared_d = shared_state + COLS * KEY_STRIDE;           // [COLS][CHUNK_STRIDE]
  u16* stages = reinterpret_cast<u16*>(shared_d + COLS * CHUNK_STRIDE);
  const int head = blockIdx.x, first_column = blockIdx.y * COLS, warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const Lane at = {warp % 4 * 16 + lane / 4, warp / 4 * TILES * 8 + lane % 4 * 2, warp % 4};
  const int warp_column = warp / 4 * TILES * 8, column = head * HEAD_DIM + first_column + at.column;
  const bool has_keys = at.strip * STRIPS * 16 < HEAD_DIM;
  float* head_state = state + (static_cast<u64>(head) * HEAD_DIM + first_column) * HEAD_DIM;
  let_later_grids_start();
  wait_for_earlier_grids();
  p.num_rows = live_rows(control, first, num_rows);
  const int num_chunks = (p.num_rows + CHUNK - 1) / CHUNK;
  if (!num_chunks) return;
  for (int i = 0; i < STAGES; i++) {
    if (i < num_chunks) fill_stage(p, stages + i * STAGE, i, head);
    commit_copies();
  }
  float s[STRIPS][TILES][4];
  if (has_keys) each_sum(at, [&](int m, int n, int i, int key, int c) { s[m][n][i] = head_state[c * HEAD_DIM + key]; });
  for (int chunk = 0; chunk < num_chunks; chunk++) {
    const u16* stage = stages + chunk % STAGES * STAGE;
    const float* g = reinterpret_cast<const float*>(stage + GROWTH);
    if (has_keys)
      each_sum(at, [&](int m, int n, int i, int key, int c) { shared_state[c * KEY_STRIDE + key] = __uint_as_float(to_tf32(s[m][n][i])); });
    float2 right[TILES][2];
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int half = 0; half < 2; half++)
        right[n][half] = *reinterpret_cast<const float2*>(
            u + ((static_cast<u64>(chunk) * value_heads + head) * CHUNK + at.row + half * 8) * HEAD_DIM + first_column + at.column + n * 8);
    wait_copies<STAGES - 1>();
    __syncthreads();
    float ws[TILES][4] = {}, qs[TILES][4] = {};
    apply_state(stage, shared_state + warp_column * KEY_STRIDE, at, ws, qs);
    if (threadIdx.x < CHUNK) weights[threadIdx.x] = expf(__fsub_rn(g[CHUNK - 1], g[threadIdx.x]));
    const float row_factor[2] = {query_scale() * expf(g[at.row]), query_scale() * expf(g[at.row + 8])};
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const float2 v = right[n][i / 2];
        shared_d[(at.column + n * 8 + i % 2) * CHUNK_STRIDE + at.row + i / 2 * 8] = __fsub_rn(i % 2 ? v.y : v.x, ws[n][i]);
        qs[n][i] *= row_factor[i / 2];
      }
    __syncthreads();
    apply_products(stage, shared_d + warp_column * CHUNK_STRIDE, at, qs);
    store_out(p, at, chunk, column, qs);
    if (has_keys) {
      const float total = expf(g[CHUNK - 1]);
      each_sum(at, [&](int m, int n, int i, int, int) { s[m][n][i] *= total; });
      advance_state(stage, shared_d + warp_column * CHUNK_STRIDE, weights, at, s);
    }
    __syncthreads();
    if (chunk + STAGES < num_chunks) fill_stage(p, stages + chunk % STAGES * STAGE, chunk + STAGES, head);
    commit_copies();
  }
  if (has_keys) each_sum(at, [&](int m, int n, int i, int key, int c) { head_state[c * HEAD_DIM + key] = s[m][n][i]; });
}
