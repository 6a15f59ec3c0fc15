// Attention of up to 64 rows over the committed keys and their own ancestors: partial results of segments.
//
// A block works through items, tile by tile. Four warps score: keys times queries, by the matrix instruction, become
// weights. The other four add weights times values, of the tile before where that is what they have got to; what the
// ones tell the others goes through two slots. A tile of the matrix instruction has 16 keys by 8 columns, then 16
// dimensions by 8 columns. Every column goes through the same instructions with the same neighbours along the sums,
// whoever computes it.
typedef float Sums[OUT_TILES][COL_TILES][4];

DEV void clear(Sums v) {
#pragma unroll
  for (int m = 0; m < OUT_TILES; m++)
#pragma unroll
    for (int n = 0; n < COL_TILES; n++) v[m][n][0] = v[m][n][1] = v[m][n][2] = v[m][n][3] = 0.0f;
}

// Sums of an item: in registers, or, where those are too few, in shared memory, which each thread has its own part of.
constexpr int STATE_BYTES = OUT_TILES * COL_TILES > 24 ? OUT_TILES * COL_TILES * ROLE_THREADS * 16 : 0;

struct State {
  float4 held[STATE_BYTES ? 1 : OUT_TILES][STATE_BYTES ? 1 : COL_TILES];
  float4* kept;

  DEV_MEMBER float4& at(int m, int n) { return STATE_BYTES ? kept[(m * COL_TILES + n) * ROLE_THREADS] : held[m][n]; }
};

// What a warp that adds has: sums of its dimensions for all columns, of the segment and of the item.
struct Adder {
  const Pass& pass;
  const Plan& plan;
  const Shape& shape;
  Board& board;
  u8* weights;
  Feeder<true>& feeder;
  int slot;
  State state;
  Sums acc;

  DEV_MEMBER static int first_tile() { return threadIdx.x / 32 % 4 * OUT_TILES; }

  DEV_MEMBER void begin() { arrive_some(EMPTY, THREADS), arrive_some(EMPTY + 1, THREADS); }
  DEV_MEMBER void begin_item(const Item& item) {
#pragma unroll
    for (int m = 0; m < OUT_TILES; m++)
#pragma unroll
      for (int n = 0; n < COL_TILES; n++) state.at(m, n) = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
  }
  DEV_MEMBER void begin_segment() { clear(acc); }

  DEV_MEMBER void attend(int base, int limit, u32 mask) {
    const int lane = threadIdx.x & 31;
    const u8* values = feeder.next();
    meet_some(FULL + slot, THREADS);
#pragma unroll
    for (int n = 0; n < COL_TILES; n++) {
      const float2 by = *reinterpret_cast<const float2*>(board.slots[slot].shrink + n * 8 + (lane & 3) * 2);
#pragma unroll
      for (int m = 0; m < OUT_TILES; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[m][n][i] = __fmul_rn(acc[m][n][i], i & 1 ? by.y : by.x);
    }
#pragma unroll
    for (int k = 0; k < ALL_STRIPS; k++) add_strip(values, weights + slot * WEIGHT_BYTES, k);
    arrive_some(EMPTY + slot, THREADS);
    slot ^= 1;
  }

  // Adds weights times values of 16 keys.
  DEV_MEMBER void add_strip(const u8* values, const u8* from, int k) {
    constexpr int PAIRS = (COL_TILES + 1) / 2;
    const int lane = threadIdx.x & 31;
    const int value_place = swizzled((lane & 7) + (lane >> 4) * 8, first_tile() * 2 + (lane >> 3 & 1)) + k * 16 * CHUNKS * 16;
    from += weight_place((COL_TILES > 1 ? lane >> 4 : 0) * 8 + (lane & 7), lane >> 3 & 1) ^ k * 32;
    u32 b[PAIRS][4];
#pragma unroll
    for (int n = 0; n < PAIRS; n++) load_matrix_x4(b[n], from + n * 16 * TILE * 2);
#pragma unroll
    for (int m = 0; m < OUT_TILES; m++) {
      u32 a[4];
      load_matrix_x4_trans(a, values + (value_place ^ m * 32));
#pragma unroll
      for (int n = 0; n < COL_TILES; n++) mma(acc[m][n], a, b[n / 2][n % 2 * 2], b[n / 2][n % 2 * 2 + 1]);
    }
  }

  DEV_MEMBER void end_segment(u32 mask) {
    meet_some(FULL + slot, THREADS);
#pragma unroll
    for (int n = 0; n < COL_TILES; n++)
      if (mask >> n & 1) {
        const float4 by = *reinterpret_cast<const float4*>(board.slots[slot].factors + n * 8 + threadIdx.x % 4 * 2);
#pragma unroll
        for (int m = 0; m < OUT_TILES; m++) {
          const float4 old = state.at(m, n);
          const float* more = acc[m][n];
          state.at(m, n) = make_float4(
              __fmaf_rn(more[0], by.y, __fmul_rn(old.x, by.x)), __fmaf_rn(more[1], by.w, __fmul_rn(old.y, by.z)),
              __fmaf_rn(more[2], by.y, __fmul_rn(old.z, by.x)), __fmaf_rn(more[3], by.w, __fmul_rn(old.w, by.z)));
        }
      }
    arrive_some(EMPTY + slot, THREADS);
    slot ^= 1;
  }

  DEV_MEMBER void end_item(const Item& item) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < COL_TILES; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int entry = entry_of(plan, shape, item, n * 8 + lane % 4 * 2 + j);
        if (entry < 0) continue;
        float* to = pass.partial + static_cast<u64>(entry) * DIM + first_tile() * 16 + lane / 4;
#pragma unroll
        for (int m = 0; m < OUT_TILES; m++) {
          const float4 found = state.at(m, n);
          to[m * 16] = j ? found.y : found.x, to[m * 16 + 8] = j ? found.w : found.z;
        }
      }
  }

  DEV_MEMBER void end() {}
};

// A role's part in the work on the block's items.
template <class Role>
DEV void work(const Plan& plan, const Shape& shape, const int* positions, Item& item, Role& role) {
#pragma unroll 1
  for (int index = blockIdx.x; index < plan.num_items; index += gridDim.x) {
    role.feeder.meet();  // all are done with the item before
    if (role.feeder.thread() == 0 && index != blockIdx.x) item = item_at(plan, shape, index);
    role.feeder.meet();
    const u32 mask = (1u << item.num_cols / 8) - 1;
    role.begin_item(item);
#pragma unroll 1
    for (int segment = item.segment; segment < item.segment + item.num_segments; segment++) {
      role.begin_segment();
#pragma unroll 1
      for (int row = item.first_row - 1; row < item.end_row; row++) {
        const Run run = run_of(plan, item, segment, row, positions);
        const int row_tiles = item.width / 8;
        const u32 seen_by = row < item.first_row ? mask : ((1u << row_tiles) - 1) << (row - item.first_row) * row_tiles;
#pragma unroll 1
        for (int base = run.begin; base < run.end; base += TILE) role.attend(base, run.limit, seen_by);
      }
      role.end_segment(mask);
    }
    role.end_item(item);
  }
  role.end();
}

KERNEL void LAUNCH_BOUNDS(THREADS, BLOCKS_AN_SM)
    attention_kernel(const int* control, const int* positions, const int* ancestors, const float* q, u8* pool,
                     const int* pages, float* partial, float2* stats, float scale, int ancestor_stride, int q_row,
                     int q_head, int page_bytes, int key_bytes, int value_bytes, int first_row, int num_rows,
                     int kv_heads, int group, int head_dim, int window, int is_bidirectional, const u8* angles,
                     const float* folded_queries, int folded_row) {
  DYNAMIC_SHARED(shared);
  __shared__ __align__(16) Board board;
  __shared__ Plan plan;
  let_later_grids_start();
  wait_for_earlier_grids();
  const Shape shape = {kv_heads, group, head_dim, window, is_bidirectional};
  const Cache cache = {pool, pages, page_bytes, kv_heads, key_bytes, value_bytes};
  const Pass pass = {control, positions, ancestors, ancestor_stride, q,          q_row,  q_head,
                     scale,   cache,     partial,   stats,           angles, folded_queries, folded_row};
  if (threadIdx.x == 0) plan = make_plan(control, first_row, num_rows, shape, gridDim.x);
  __syncthreads();
  const int first = blockIdx.x;
  if (first >= plan.num_items) return;
  u8 *values = shared + STAGES * KEY_STAGE, *weights = values + STAGES * VALUE_STAGE;
  u8 *key_halves = weights + 2 * WEIGHT_BYTES, *value_halves = key_halves + (KEY_CODE == HALF ? 0 : TILE * DIM * 2);
  if (threadIdx.x < ROLE_THREADS) {
    Feeder<false> feeder = {pass, plan, shape, shared, key_halves, first};
    feeder.begin(board.items[0]);
    Scorer scorer = {pass, plan, shape, board, weights, feeder};
    work(plan, shape, positions, board.items[0], scorer);
  } else {
    Feeder<true> feeder = {pass, plan, shape, values, value_halves, first};
    feeder.begin(board.items[1]);
    Adder adder = {pass, plan, shape, board, weights, feeder};
    adder.state.kept = reinterpret_cast<float4*>(value_halves + (VALUE_CODE == HALF ? 0 : TILE * DIM * 2)) + feeder.thread();
    adder.begin();
    work(plan, shape, positions, board.items[1], adder);
  }
}
