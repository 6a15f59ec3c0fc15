// First half of the gated delta rule for long chains: what chunks of 64 rows need of themselves, all at once.
// With g the running sum of log decay, the d of a chunk (gated_delta.cu) solve, from the state S before it,
//   d_t + beta_t sum_{i<t} e^(g_t - g_i) (k_t k_i) d_i = beta_t (v_t - e^(g_t) k_t S).
// So d = u - w S, where u and w solve the same with v and e^g k on the right. A block solves for the value heads of one
// key head, a thread a column, in float32. g falls, so no exponent is above 0. Rows behind the last are zero.
constexpr int CHUNK = 64;
constexpr int THREADS = 256;
constexpr int WARPS = THREADS / 32;
constexpr int KEY_STRIDE = HEAD_DIM + 8;  // halves
constexpr int LOWER_STRIDE = CHUNK + 4;   // floats
constexpr int COLUMNS = 2 * HEAD_DIM;     // of u and w
constexpr int TILES = 4;                  // of 8 columns, in a warp's share of a 64 x 64 product
constexpr int STEP = 16;                  // rows solved at once

struct Chunks {
  const float *qkv, *alpha, *beta, *decay, *decay_bias;
  u16* queries;   // [chunks][key heads][CHUNK][HEAD_DIM] unit vectors
  u16* keys;      // [chunks][key heads][HEAD_DIM][CHUNK]
  float* u;       // [chunks][value heads][CHUNK][HEAD_DIM]
  u16* w;         // the same
  u16* products;  // [chunks][value heads][CHUNK][CHUNK] of queries and keys, decayed, zero above the diagonal
  float* growth;  // [chunks][value heads][CHUNK] g
  int num_rows, key_heads, value_heads, qkv_stride, alpha_stride, beta_stride;
};

struct Shared {
  u16* keys;      // [CHUNK][KEY_STRIDE]
  u16* queries;   // the same, where `solved` comes later
  float* lower;   // [CHUNK][LOWER_STRIDE]: at [i][t] the factor of d_i in row t
  float* solved;  // [CHUNK][COLUMNS], values before
};

DEV void read_rows(const Chunks& p, const Shared& shared, int chunk, int head) {
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  u16* queries = p.queries + (static_cast<u64>(chunk) * p.key_heads + head) * CHUNK * HEAD_DIM;
#pragma unroll 4
  for (int i = 0; i < CHUNK / WARPS; i++) {
    const int r = i * WARPS + warp, row = chunk * CHUNK + r;
    const float* from = p.qkv + static_cast<u64>(row) * p.qkv_stride + head * HEAD_DIM;
    float4 q = load_lane(from, lane, row < p.num_rows), k = load_lane(from + p.key_heads * HEAD_DIM, lane, row < p.num_rows);
    float squares[2] = {dot4(q, q), dot4(k, k)};
    sum_lanes<32, 2>(squares);
    q = scaled(q, unit_factor(squares[0])), k = scaled(k, unit_factor(squares[1]));
    if (lane * LANE_KEYS >= HEAD_DIM) continue;
    const uint2 q_halves = make_uint2(two_halves(q.x, q.y), two_halves(q.z, q.w));
    reinterpret_cast<uint2*>(queries + r * HEAD_DIM)[lane] = q_halves;
    reinterpret_cast<uint2*>(shared.queries + r * KEY_STRIDE)[lane] = q_halves;
    reinterpret_cast<uint2*>(shared.keys + r * KEY_STRIDE)[lane] = make_uint2(two_halves(k.x, k.y), two_halves(k.z, k.w));
  }
  __syncthreads();
  u16* keys = p.keys + (static_cast<u64>(chunk) * p.key_heads + head) * CHUNK * HEAD_DIM;
  for (int i = threadIdx.x; i < HEAD_DIM * CHUNK / 8; i += THREADS) {
    const int key = i % HEAD_DIM, first = i / HEAD_DIM * 8;
    u32 v[4];
    for (int n = 0; n < 4; n++) {
      const u16* at = shared.keys + (first + 2 * n) * KEY_STRIDE + key;
      v[n] = at[0] | static_cast<u32>(at[KEY_STRIDE]) << 16;
    }
    *reinterpret_cast<uint4*>(keys + key * CHUNK + first) = make_uint4(v[0], v[1], v[2], v[3]);
  }
}

// Where a warp's share of a 64 x 64 product is: rows of strip, TILES tiles of columns.
DEV int first_row() { return threadIdx.x / 32 % 4 * 16 + threadIdx.x % 32 / 4; }
DEV int first_tile() { return threadIdx.x / 128 * TILES; }
DEV bool is_above_diagonal(int tile) { return tile * 8 > threadIdx.x / 32 % 4 * 16 + 15; }

DEV u32 word(const u16* at) { return *reinterpret_cast<const u32*>(at); }

DEV void multiply_keys(const Shared& shared, float (*kk)[4], float (*qk)[4]) {
  const int lane = threadIdx.x % 32, offset = first_row() * KEY_STRIDE + lane % 4 * 2;
#pragma unroll
  for (int step = 0; step < HEAD_DIM; step += 16) {
    u32 k[4], q[4];
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int at = offset + i % 2 * 8 * KEY_STRIDE + step + i / 2 * 8;
      k[i] = word(shared.keys + at), q[i] = word(shared.queries + at);
    }
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      if (is_above_diagonal(first_tile() + n)) continue;
      const u16* at = shared.keys + ((first_tile() + n) * 8 + lane / 4) * KEY_STRIDE + step + lane % 4 * 2;
      mma(kk[n], k, word(at), word(at + 8));
      mma(qk[n], q, word(at), word(at + 8));
    }
  }
}

// g and beta of a value head; e^g too.
struct Gates {
  float growth[CHUNK], beta[CHUNK], factor[CHUNK], log_decay[CHUNK];
};

DEV void read_gates(const Chunks& p, Gates& gates, int chunk, int head) {
  const int t = threadIdx.x, row = chunk * CHUNK + t;
  if (t < CHUNK) {
    const bool is_there = row < p.num_rows;
    gates.log_decay[t] =
        is_there ? log_decay(p.alpha[static_cast<u64>(row) * p.alpha_stride + head], p.decay[head], p.decay_bias[head]) : 0.0f;
    gates.beta[t] = is_there ? open_gate(p.beta[static_cast<u64>(row) * p.beta_stride + head]) : 0.0f;
  }
  __syncthreads();
  if (t < CHUNK) {
    float sum = 0.0f;
    for (int i = 0; i <= t; i++) sum = __fadd_rn(sum, gates.log_decay[i]);
    gates.growth[t] = sum, gates.factor[t] = expf(sum);
    p.growth[(static_cast<u64>(chunk) * p.value_heads + head) * CHUNK + t] = sum;
  }
  __syncthreads();
}

DEV void decay_products(const Shared& shared, const Gates& gates, const float (*kk)[4], const float (*qk)[4], u16* products) {
#pragma unroll
  for (int n = 0; n < TILES; n++)
#pragma unroll
    for (int half = 0; half < 2; half++) {
      const int t = first_row() + half * 8, column = (first_tile() + n) * 8 + threadIdx.x % 4 * 2;
      float product[2];
#pragma unroll
      for (int side = 0; side < 2; side++) {
        const int i = column + side;
        const float decay = i <= t ? expf(__fsub_rn(gates.growth[t], gates.growth[i])) : 0.0f;
        product[side] = query_scale() * decay * qk[n][half * 2 + side];
        shared.lower[i * LOWER_STRIDE + t] = gates.beta[t] * decay * kk[n][half * 2 + side];
      }
      *reinterpret_cast<u32*>(products + t * CHUNK + column) = two_halves(product[0], product[1]);
    }
}

// The values of a head, on their way to where u is going to be solved.
DEV void copy_values(const Chunks& p, const Shared& shared, int chunk, int head) {
  const float* values = p.qkv + static_cast<u64>(chunk) * CHUNK * p.qkv_stride + (2 * p.key_heads + head) * HEAD_DIM;
  for (int i = threadIdx.x; i < CHUNK * HEAD_DIM / 4; i += THREADS) {
    const int t = i / (HEAD_DIM / 4), key = i % (HEAD_DIM / 4) * 4;
    float* to = shared.solved + t * COLUMNS + key;
    if (chunk * CHUNK + t < p.num_rows)
      copy16_async(to, values + static_cast<u64>(t) * p.qkv_stride + key);
    else
      *reinterpret_cast<float4*>(to) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  commit_copies();
}

DEV void solve(const Chunks& p, const Shared& shared, const Gates& gates, int chunk, int head) {
  const int column = threadIdx.x, key = column % HEAD_DIM;
  if (column >= COLUMNS) return;
  const u64 at = (static_cast<u64>(chunk) * p.value_heads + head) * CHUNK * HEAD_DIM + key;
  for (int first = 0; first < CHUNK; first += STEP) {
    float x[STEP];
#pragma unroll
    for (int r = 0; r < STEP; r++) {
      const int t = first + r;
      const float right =
          column >= HEAD_DIM ? gates.factor[t] * from_half(shared.keys[t * KEY_STRIDE + key]) : shared.solved[t * COLUMNS + column];
      x[r] = gates.beta[t] * right;
    }
#pragma unroll 4
    for (int i = 0; i < first; i++) {
      const float d = shared.solved[i * COLUMNS + column];
      const float4* lower = reinterpret_cast<const float4*>(shared.lower + i * LOWER_STRIDE + first);
#pragma unroll
      for (int r = 0; r < STEP; r += 4) {
        const float4 v = lower[r / 4];
        x[r] = __fmaf_rn(-v.x, d, x[r]), x[r + 1] = __fmaf_rn(-v.y, d, x[r + 1]);
        x[r + 2] = __fmaf_rn(-v.z, d, x[r + 2]), x[r + 3] = __fmaf_rn(-v.w, d, x[r + 3]);
      }
    }
#pragma unroll
    for (int i = 0; i < STEP; i++) {
      const float* lower = shared.lower + (first + i) * LOWER_STRIDE + first;
#pragma unroll
      for (int r = i + 1; r < STEP; r++) x[r] = __fmaf_rn(-lower[r], x[i], x[r]);
      shared.solved[(first + i) * COLUMNS + column] = x[i];
      if (column < HEAD_DIM)
        p.u[at + (first + i) * HEAD_DIM] = x[i];
      else
        p.w[at + (first + i) * HEAD_DIM] = to_half(x[i]);
    }
  }
}

// A block for each chunk and key head.
KERNEL void LAUNCH_BOUNDS(THREADS, 2)
    delta_chunk_kernel(const int* control, int first, const float* qkv, const float* alpha, const float* beta, const float* decay, const float* decay_bias,
                       u16* queries, u16* keys, float* u, u16* w, u16* products, float* growth, int num_rows, int key_heads,
                       int value_heads, int qkv_stride, int alpha_stride, int beta_stride) {
  Chunks p = {qkv, alpha, beta, decay, decay_bias, queries, keys, u, w, products, growth, num_rows,
              key_heads, value_heads, qkv_stride, alpha_stride, beta_stride};
  DYNAMIC_SHARED(memory);
  __shared__ Gates gates;
  const int chunk = blockIdx.x, key_head = blockIdx.y;
  Shared shared;
  shared.keys = reinterpret_cast<u16*>(memory);
  shared.lower = reinterpret_cast<float*>(shared.keys + CHUNK * KEY_STRIDE);
  shared.solved = shared.lower + CHUNK * LOWER_STRIDE;
  shared.queries = reinterpret_cast<u16*>(shared.solved);
  let_later_grids_start();
  wait_for_earlier_grids();
  p.num_rows = live_rows(control, first, num_rows);
  if (chunk * CHUNK >= p.num_rows) return;
  read_rows(p, shared, chunk, key_head);
  float kk[TILES][4] = {}, qk[TILES][4] = {};
  multiply_keys(shared, kk, qk);
  __syncthreads();
  for (int head = key_head; head < value_heads; head += key_heads) {
    copy_values(p, shared, chunk, head);
    read_gates(p, gates, chunk, head);
    decay_products(shared, gates, kk, qk, products + (static_cast<u64>(chunk) * value_heads + head) * CHUNK * CHUNK);
    wait_copies<0>();
    __syncthreads();
    solve(p, shared, gates, chunk, head);
    __syncthreads();
  }
}
