// Columns of a state of the gated delta rule in registers. A block has COLS columns of HEAD_DIM keys, a lane KEYS keys of
// two columns.
constexpr int KEY_LANES = HEAD_DIM < 32 ? HEAD_DIM / LANE_KEYS : 8;  // lanes that share a column
constexpr int PIECES = HEAD_DIM / (LANE_KEYS * KEY_LANES);           // vectors of 4 keys that a lane has
constexpr int KEYS = PIECES * LANE_KEYS;
constexpr int WARP_COLS = 2 * 32 / KEY_LANES;
constexpr int WARPS = COLS / WARP_COLS;
constexpr int THREADS = WARPS * 32;
constexpr int NUM_TOKENS = 0, COMMITTED = 1, IS_TREE = 2, PATH_LEN = 3;  // words of control

struct Columns {
  float s[2][KEYS];
};

// Where a thread's keys of its two columns are: piece p of column c at + c HEAD_DIM + p LANE_KEYS KEY_LANES.
DEV int first_column() { return threadIdx.x / 32 * WARP_COLS + threadIdx.x % 32 / KEY_LANES * 2; }
DEV int first_key() { return threadIdx.x % KEY_LANES * LANE_KEYS; }

DEV void load_pieces(const float* from, float* to) {
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const float4 v = *reinterpret_cast<const float4*>(from + p * LANE_KEYS * KEY_LANES);
    to[4 * p] = v.x, to[4 * p + 1] = v.y, to[4 * p + 2] = v.z, to[4 * p + 3] = v.w;
  }
}

DEV void load_state(const float* from, Columns& columns) {
  load_pieces(from, columns.s[0]);
  load_pieces(from + HEAD_DIM, columns.s[1]);
}

DEV void store_state(const Columns& columns, float* to) {
#pragma unroll
  for (int c = 0; c < 2; c++)
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const float* s = columns.s[c] + 4 * p;
      *reinterpret_cast<float4*>(to + c * HEAD_DIM + p * LANE_KEYS * KEY_LANES) = make_float4(s[0], s[1], s[2], s[3]);
    }
}

// Slots in shared memory: [slot][vector][thread].
DEV void save_slot(const Columns& columns, float4* slots, int slot) {
#pragma unroll
  for (int i = 0; i < 2 * PIECES; i++) {
    const float* s = columns.s[i / PIECES] + i % PIECES * 4;
    slots[(slot * 2 * PIECES + i) * THREADS + threadIdx.x] = make_float4(s[0], s[1], s[2], s[3]);
  }
}

DEV void load_slot(const float4* slots, int slot, Columns& columns) {
#pragma unroll
  for (int i = 0; i < 2 * PIECES; i++) {
    const float4 v = slots[(slot * 2 * PIECES + i) * THREADS + threadIdx.x];
    float* s = columns.s[i / PIECES] + i % PIECES * 4;
    s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
  }
}

DEV float dot_keys(const float* s, const float* k) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < KEYS; i++) sum = __fmaf_rn(k[i], s[i], sum);
  return sum;
}

DEV void advance(Columns& columns, const float* k, float decay, float2 d) {
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    columns.s[0][i] = __fmaf_rn(k[i], d.x, __fmul_rn(decay, columns.s[0][i]));
    columns.s[1][i] = __fmaf_rn(k[i], d.y, __fmul_rn(decay, columns.s[1][i]));
  }
}
