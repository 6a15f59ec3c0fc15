// Attention of up to 64 rows over the committed keys and their own ancestors: partial results of segments.
//
// A block works through items, tile by tile; keys and values come through a ring of half tiles, which runs ahead over
// the ends of items. Scores are keys times queries and results are values times weights, both by the matrix
// instruction: a tile has 16 keys by 8 columns for a warp, then 16 dimensions by 8 columns. Every column goes through
// the same instructions with the same neighbours along the sums, whoever computes it.
constexpr int SCORE_COLS = (COL_TILES + 1) / 2;      // groups of 8 columns whose scores a warp computes
constexpr int DIM_TILES = DIM / 16;
static_assert(COL_TILES == 1 || COL_TILES % 2 == 0, "two halves of the groups");
constexpr u32 ALL = (1u << COL_TILES) - 1;           // groups of 8 columns
constexpr bool SHARES_COLS = DIM_TILES < WARPS;      // few dimensions: two warps share them, half the columns each
constexpr int OUT_TILES = SHARES_COLS ? 1 : DIM_TILES / WARPS;
constexpr int OUT_COLS = SHARES_COLS ? SCORE_COLS : COL_TILES;

// Half of the warps have none where there is one group alone.
DEV bool has_cols(int first) { return COL_TILES > 1 || first == 0; }

struct Board {  // what the warps tell each other
  float top[4][COLS];          // of 16 keys each
  float2 state[COLS];          // of the item so far
  float shrink[COLS];          // what older sums of the segment are multiplied with
  float2 factors[COLS];        // of the item's state and of the segment
  int entry[COLS], low[COLS];  // where the column's result goes, -1: nowhere; the first position that it sees
};

DEV int weight_place(int col, int chunk) { return (col * 8 + (chunk ^ (col & 7))) * 16; }
// Queries of an item's columns, what they make of angles, and what is known of the columns.
DEV void load_queries(const Pass& pass, const Plan& plan, const Shape& shape, const Item& item, u8* queries, u8* folded,
                      Board& board) {
  const int heads = shape.kv_heads * shape.group;
  for (int at = threadIdx.x; at < item.num_cols * CHUNKS; at += THREADS) {
    const int col = at / CHUNKS, chunk = at % CHUNKS, column = item.first_col + col;
    const int row = divide(column, item.width), part = column - row * item.width, head = item.kv_head * shape.group + part;
    const bool is_live = row < plan.live && part < shape.group;
    const bool is_there = is_live && chunk * 8 < shape.head_dim;
    load_query(pass.q + static_cast<u64>(row) * pass.q_row + head * pass.q_head + chunk * 8, is_there, pass.scale,
               queries + swizzled(col, chunk));
    if constexpr (CENTRED)
      load_query(pass.folded + static_cast<u64>(row) * pass.folded_row + head * DIM + chunk * 8, is_there, pass.scale,
                 folded + swizzled(col, chunk));
    if (chunk == 0) {
      board.entry[col] = is_live ? (item.slot * plan.live + row) * heads + head : -1;
      board.low[col] = is_live && shape.window ? max(plan.first, pass.positions[row] - shape.window + 1) : plan.first;
      board.state[col] = make_float2(LOWEST, 0.0f);
    }
  }
}

// Operands of 32 dimensions: 16 keys, and 8 columns of each group. Steps are apart by 64 bytes, which the swizzle turns
// around within 128. Nothing here depends on which columns count: branches would keep loads from running ahead.
struct ScoreOperands {
  u32 a[2][4], b[SCORE_COLS][4];

  DEV_MEMBER void load(const u8* keys, const u8* queries, int key_place, int query_place, int step) {
#pragma unroll
    for (int k = 0; k < 2; k++) load_matrix_x4(a[k], keys + (key_place ^ ((step & 1) * 64 + k * 32)) + (step >> 1) * 128);
#pragma unroll
    for (int n = 0; n < SCORE_COLS; n++)
      load_matrix_x4(b[n], queries + (query_place ^ (step & 1) * 64) + (step >> 1) * 128 + n * 8 * CHUNKS * 16);
  }
};

// One warp: scores of 16 keys of a tile for its groups of columns.
DEV void score(const u8* keys, const u8* queries, int strip, int first, float (*s)[4]) {
  constexpr int STEPS = DIM / 32;
  const int lane = threadIdx.x & 31;
  const int key_place = swizzled(strip * 16 + (lane & 15), lane >> 4);
  const int query_place = swizzled(first * 8 + (lane & 7), lane >> 3);
  float odd[SCORE_COLS][4] = {};  // two sums, so that fewer steps wait for each other
#pragma unroll
  for (int n = 0; n < SCORE_COLS; n++) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0.0f;
  ScoreOperands operands[2];
  operands[0].load(keys, queries, key_place, query_place, 0);
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    if (step + 1 < STEPS) operands[(step + 1) & 1].load(keys, queries, key_place, query_place, step + 1);
    const ScoreOperands& now = operands[step & 1];
#pragma unroll
    for (int n = 0; n < SCORE_COLS; n++)
      mma(s[n], now.a[0], now.b[n][0], now.b[n][1]), mma(odd[n], now.a[1], now.b[n][2], now.b[n][3]);
  }
#pragma unroll
  for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) s[n][i] = __fadd_rn(s[n][i], odd[n][i]);
}

// What a warp knows of the columns whose scores it computes: [group][even or odd column].
struct Running {
  float top[SCORE_COLS][2], sum[SCORE_COLS][2];
};

// Scores become weights, which go to shared memory; the maximum and the sum of weights move on.
DEV void weigh(float (*s)[4], u8* weights, int strip, int first, Running& now, Board& board) {
  const int lane = threadIdx.x & 31, key = lane >> 2;
  if (has_cols(first))
#pragma unroll
    for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float top = over_keys(fmaxf(s[n][j], s[n][j + 2]), Larger());
        if (lane < 4) board.top[strip][(first + n) * 8 + lane * 2 + j] = top;
      }
  __syncthreads();
  if (!has_cols(first)) return;
#pragma unroll
  for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
    for (int j = 0; j < 2; j++) {
      const int col = (first + n) * 8 + (lane & 3) * 2 + j;
      float top = now.top[n][j];
#pragma unroll
      for (int i = 0; i < 4; i++) top = fmaxf(top, board.top[i][col]);
      const float shrink = exp2f(__fsub_rn(now.top[n][j], top));
      if (strip == 0 && lane < 4) board.shrink[col] = shrink;
      const u16 near = to_half(exp2f(__fsub_rn(s[n][j], top))), far = to_half(exp2f(__fsub_rn(s[n][j + 2], top)));
      now.top[n][j] = top;
      now.sum[n][j] = __fmaf_rn(now.sum[n][j], shrink, __fadd_rn(from_half(near), from_half(far)));
      u16* to = reinterpret_cast<u16*>(weights);
      to[weight_place(col, strip * 2) / 2 + key] = near;
      to[weight_place(col, strip * 2 + 1) / 2 + key] = far;
    }
}

// One warp: adds weights times values to the sums of its dimensions.
DEV void add_values(const u8* values, const u8* weights, const Board& board, float (*acc)[OUT_COLS][4]) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
  const int first_dim = SHARES_COLS ? warp % DIM_TILES : warp * OUT_TILES;
  const int first_col = SHARES_COLS ? warp / DIM_TILES * OUT_COLS : 0;
  if (!has_cols(first_col)) return;
#pragma unroll
  for (int n = 0; n < OUT_COLS; n++) {
    const float2 by = *reinterpret_cast<const float2*>(board.shrink + (first_col + n) * 8 + (lane & 3) * 2);
#pragma unroll
    for (int m = 0; m < OUT_TILES; m++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m][n][i] = __fmul_rn(acc[m][n][i], i & 1 ? by.y : by.x);
  }
  const int weight_row = weight_place(first_col * 8 + (lane & 7), lane >> 3);
  const int value_row = swizzled((lane & 7) + (lane >> 4) * 8, first_dim * 2 + (lane >> 3 & 1));
#pragma unroll
  for (int half = 0; half < 2; half++) {  // 32 keys
    u32 a[2][OUT_TILES][4], b[OUT_COLS][4];
#pragma unroll
    for (int n = 0; n < OUT_COLS; n++) load_matrix_x4(b[n], weights + (weight_row ^ half * 64) + n * 1024);
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int m = 0; m < OUT_TILES; m++)
        load_matrix_x4_trans(a[k][m], values + (value_row ^ m * 32) + (half * 2 + k) * 16 * CHUNKS * 16);
#pragma unroll
    for (int k = 0; k < 2; k++)
#pragma unroll
      for (int n = 0; n < OUT_COLS; n++)
#pragma unroll
        for (int m = 0; m < OUT_TILES; m++) mma(acc[m][n], a[k][m], b[n][2 * k], b[n][2 * k + 1]);
  }
}

DEV void clear(float (*v)[OUT_COLS][4]) {
#pragma unroll
  for (int m = 0; m < OUT_TILES; m++)
#pragma unroll
    for (int n = 0; n < OUT_COLS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) v[m][n][i] = 0.0f;
}

// A block's part in the work on its items: sums of the segment and of the item, and what they need.
struct Worker {
  const Plan& plan;
  const Shape& shape;
  Feeder& feeder;
  u8 *ring, *queries, *folded, *weights, *halves;
  Board& board;
  int stage;
  Running now;
  float acc[OUT_TILES][OUT_COLS][4], state[OUT_TILES][OUT_COLS][4];

  // The next half tile, for all threads, as half floats; the stage before it is filled again.
  template <int CODE>
  DEV_MEMBER const u8* next_stage(bool is_value) {
    wait_copies<STAGES - 2>();
    __syncthreads();
    feeder.feed(is_value ^ (STAGES & 1 ^ 1));
    const u8* found = ring + stage * STAGE_BYTES;
    stage = stage + 1 == STAGES ? 0 : stage + 1;
    if constexpr (CODE == HALF) return found;
    decode_tile<CODE>(found, halves);
    __syncthreads();
    return halves;
  }

  DEV_MEMBER void begin_segment() {
#pragma unroll
    for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) now.top[n][j] = LOWEST, now.sum[n][j] = 0.0f;
    clear(acc);
  }

  // One tile of keys at `base` for the groups of columns in mask, which see nothing from `limit` on.
  DEV_MEMBER void attend(int base, int limit, u32 mask) {
    const int lane = threadIdx.x & 31, strip = threadIdx.x / 32 % 4, first = threadIdx.x / 128 * SCORE_COLS;
    float s[SCORE_COLS][4];
    const u8* angles = ring + stage * STAGE_BYTES + ANGLES_AT;
    const u8* keys = next_stage<KEY_CODE>(false);
    if (has_cols(first)) score(keys, queries, strip, first, s);
    if constexpr (CENTRED)
      if (has_cols(first)) {
        float more[SCORE_COLS][4];
        score(angles, folded, strip, first, more);
#pragma unroll
        for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
          for (int i = 0; i < 4; i++) s[n][i] = __fadd_rn(s[n][i], more[n][i]);
      }
    if ((shape.window || plan.first > base || base + TILE > limit || mask != ALL) && has_cols(first))
#pragma unroll
      for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
          const int position = base + strip * 16 + (lane >> 2) + (i >> 1) * 8;
          const int col = (first + n) * 8 + (lane & 3) * 2 + (i & 1);
          const bool is_early = position < board.low[col] && position >= plan.sinks;
          if (position >= limit || is_early || !(mask >> (first + n) & 1)) s[n][i] = __int_as_float(0xff800000);
        }
    weigh(s, weights, strip, first, now, board);
    add_values(next_stage<VALUE_CODE>(true), weights, board, acc);
  }

  // Merges the segment into the item's state.
  DEV_MEMBER void end_segment(u32 mask) {
    const int lane = threadIdx.x & 31, strip = threadIdx.x / 32 % 4, first = threadIdx.x / 128 * SCORE_COLS;
    if (has_cols(first))
#pragma unroll
      for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float sum = over_keys(now.sum[n][j], Sum());
          if (lane < 4) board.top[strip][(first + n) * 8 + lane * 2 + j] = sum;
        }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int col = (first + n) * 8 + lane * 2 + j;
        if (strip || lane >= 4 || !(mask >> (first + n) & 1)) continue;
        float sum = board.top[0][col];
#pragma unroll
        for (int i = 1; i < 4; i++) sum = __fadd_rn(sum, board.top[i][col]);
        const Factors by = merge(board.state[col], make_float2(now.top[n][j], sum));
        board.factors[col] = make_float2(by.state, by.part);
      }
    __syncthreads();
    each_column(mask, [&](int n, int col, int j) {
      const float2 by = board.factors[col];
#pragma unroll
      for (int m = 0; m < OUT_TILES; m++)
#pragma unroll
        for (int i = j; i < 4; i += 2) state[m][n][i] = __fmaf_rn(acc[m][n][i], by.y, __fmul_rn(state[m][n][i], by.x));
    });
  }

  DEV_MEMBER void store_item(const Pass& pass, u32 mask) {
    const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5;
    const int first_dim = SHARES_COLS ? warp % DIM_TILES : warp * OUT_TILES;
    each_column(mask, [&](int n, int col, int j) {
      const int entry = board.entry[col];
      if (entry < 0) return;
      float* to = pass.partial + static_cast<u64>(entry) * PARTIALS + first_dim * 16 + (lane >> 2);
#pragma unroll
      for (int m = 0; m < OUT_TILES; m++) to[m * 16] = state[m][n][j], to[m * 16 + 8] = state[m][n][j + 2];
      if (warp == 0 || (SHARES_COLS && warp == DIM_TILES))
        if (lane < 4) pass.stats[entry] = board.state[col];
    });
  }

  // Calls with the group, the column of the item and its parity, for the columns whose sums this thread holds.
  template <class Use>
  DEV_MEMBER void each_column(u32 mask, Use use) {
    const int first = SHARES_COLS ? threadIdx.x / 32 / DIM_TILES * OUT_COLS : 0;
#pragma unroll
    for (int n = 0; n < OUT_COLS; n++)
      if (mask >> (first + n) & 1) {
#pragma unroll
        for (int j = 0; j < 2; j++) use(n, (first + n) * 8 + (threadIdx.x & 3) * 2 + j, j);
      }
  }
};

KERNEL void LAUNCH_BOUNDS(THREADS, BLOCKS_AN_SM)
    attention_kernel(ATTENTION_ARGS) {
  DYNAMIC_SHARED(shared);
  __shared__ Board board;
  __shared__ Plan plan;
  __shared__ Item item;
  let_later_grids_start();
  wait_for_earlier_grids();
  const Shape shape = ATTENTION_SHAPE;
  const Pass pass = ATTENTION_PASS;
  if (threadIdx.x == 0) plan = make_plan(control, first_row, num_rows, shape, gridDim.x);
  __syncthreads();
  if (blockIdx.x >= plan.num_items) return;
  u8 *queries = shared + STAGES * STAGE_BYTES, *folded = queries + COLS * DIM * 2;
  u8 *weights = folded + (CENTRED ? COLS * DIM * 2 : 0), *halves = weights + COLS * TILE * 2;
  Feeder feeder = {pass, plan, shape, shared, static_cast<int>(blockIdx.x)};
  feeder.begin();
  if (threadIdx.x == 0) item = feeder.item;
  feeder.seek();
  feeder.find_page();
#pragma unroll 1
  for (int i = 0; i < STAGES - 1; i++) feeder.feed(i & 1);
  Worker worker = {plan, shape, feeder, shared, queries, folded, weights, halves, board, 0};
#pragma unroll 1
  for (int index = blockIdx.x; index < plan.num_items; index += gridDim.x) {
    __syncthreads();  // the item before is done with what is overwritten now
    if (threadIdx.x == 0 && index != blockIdx.x) item = item_at(plan, shape, index);
    __syncthreads();
    const u32 mask = (1u << item.num_cols / 8) - 1;
    load_queries(pass, plan, shape, item, queries, folded, board);
    clear(worker.state);
#pragma unroll 1
    for (int segment = item.segment; segment < item.segment + item.num_segments; segment++) {
      worker.begin_segment();
#pragma unroll 1
      for (int row = item.first_row - 1; row < item.end_row; row++) {
        const Run run = run_of(plan, item, segment, row, positions);
        const int row_tiles = item.width / 8;
        const u32 seen_by = row < item.first_row ? mask : ((1u << row_tiles) - 1) << (row - item.first_row) * row_tiles;
#pragma unroll 1
        for (int base = run.begin; base < run.end; base += TILE) worker.attend(base, run.limit, seen_by);
      }
      worker.end_segment(mask);
    }
    worker.store_item(pass, mask);
  }
}
