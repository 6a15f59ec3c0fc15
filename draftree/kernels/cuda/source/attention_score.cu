// How keys become weights: four warps of a block multiply keys with queries, by the matrix instruction, keep the maximum
// and the sum of the weights of each column, and tell the other four what to add.
constexpr int ALL_STRIPS = TILE / 16;                            // strips of 16 keys
constexpr int COL_WARPS = COL_TILES == 1 && ALL_STRIPS == 4 ? 1 : 2, KEY_WARPS = 4 / COL_WARPS;
constexpr int SCORE_COLS = (COL_TILES + COL_WARPS - 1) / COL_WARPS;  // groups of 8 columns of a warp that scores
constexpr int STRIPS = ALL_STRIPS / KEY_WARPS;
constexpr int MOST_COLS = COL_WARPS * SCORE_COLS * 8;            // with those that nobody asked for
constexpr int STEPS = DIM / 32;
constexpr int OUT_TILES = DIM / 64;                              // tiles of 16 dimensions of a warp that adds
constexpr u32 ALL = (1u << COL_TILES) - 1;                       // groups of 8 columns
constexpr int FULL = 3, EMPTY = 5, SAME_COLS = 7;                // barriers: of two slots, of two groups of warps
constexpr int WEIGHT_BYTES = MOST_COLS * TILE * 2;
static_assert(OUT_TILES > 0 && COL_TILES <= 16, "four warps share the dimensions");

struct Slot {  // what those that score tell those that add, beside the weights
  float shrink[MOST_COLS];    // what older sums of the segment are multiplied with
  float2 factors[MOST_COLS];  // of the item's state and of the segment
};

struct Board {
  Slot slots[2];
  float top[2][KEY_WARPS][MOST_COLS];
  float sum[ALL_STRIPS][MOST_COLS];
  float2 state[MOST_COLS];  // of the item so far
  int low[MOST_COLS];       // the first position that the column sees
  Item items[2];            // that the roles are at
};

// [column][TILE halves]; rows of 64 bytes lie in pairs.
DEV int weight_place(int col, int chunk) {
  return TILE == 64 ? (col * 8 + (chunk ^ (col & 7))) * 16 : (col * 4 + (chunk ^ (col >> 1 & 3))) * 16;
}
DEV float clamp_half(float v) { return fminf(fmaxf(v, -65504.0f), 65504.0f); }

// The row and head of an item's column. A column may have none.
struct Column {
  int row, head;
  bool is_live;
};

DEV Column column_of(const Plan& plan, const Shape& shape, const Item& item, int col) {
  const int column = item.first_col + col, row = divide(column, item.width), part = column - row * item.width;
  return {row, item.kv_head * shape.group + part, col < item.num_cols && row < plan.live && part < shape.group};
}

// Where a column's result goes, -1: nowhere.
DEV int entry_of(const Plan& plan, const Shape& shape, const Item& item, int col) {
  const Column column = column_of(plan, shape, item, col);
  return column.is_live ? (item.slot * plan.live + column.row) * shape.kv_heads * shape.group + column.head : -1;
}

// Queries of a warp's columns, scaled, as the matrix instruction takes them.
struct Queries {
  u32 b[STEPS][SCORE_COLS][4];

  DEV_MEMBER void load(int group, const float* source, bool is_live, int head_dim, float scale) {
#pragma unroll
    for (int at = 0; at < STEPS * 4; at++) {
      const int dim = at * 8 + threadIdx.x % 4 * 2;
      float2 v = make_float2(0.0f, 0.0f);
      if (is_live && at * 8 < head_dim) v = *reinterpret_cast<const float2*>(source + dim);
      const u32 odd = to_half(clamp_half(__fmul_rn(v.y, scale)));
      b[at / 4][group][at % 4] = to_half(clamp_half(__fmul_rn(v.x, scale))) | odd << 16;
    }
  }
};

// Values over the lanes that hold other keys of the same column, in the same order in each of them.
template <class Operation>
DEV float over_keys(float v, Operation operation) {
#pragma unroll
  for (int d = 4; d < 32; d *= 2) v = operation(v, __shfl_xor_sync(~0u, v, d));
  return v;
}

struct Larger {
  DEV_MEMBER float operator()(float a, float b) const { return fmaxf(a, b); }
};
struct Sum {
  DEV_MEMBER float operator()(float a, float b) const { return __fadd_rn(a, b); }
};

typedef float Scores[STRIPS][SCORE_COLS][4];

template <class Use>
DEV void each_score(Use use) {
#pragma unroll
  for (int m = 0; m < STRIPS; m++)
#pragma unroll
    for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) use(m, n, i);
}

// One warp: scores of its keys of a tile for its columns.
DEV void score(const u8* keys, const Queries& queries, int first_strip, Scores s) {
  const int lane = threadIdx.x & 31, place = swizzled(first_strip * 16 + (lane & 15), lane >> 4);
  Scores odd = {};  // two sums, so that fewer steps wait for each other
  each_score([&](int m, int n, int i) { s[m][n][i] = 0.0f; });
#pragma unroll
  for (int step = 0; step < STEPS; step++) {
    u32 a[STRIPS][2][4];
#pragma unroll
    for (int m = 0; m < STRIPS; m++)
#pragma unroll
      for (int k = 0; k < 2; k++)
        load_matrix_x4(a[m][k], keys + (place ^ ((step & 1) * 64 + k * 32)) + (step >> 1) * 128 + m * 16 * CHUNKS * 16);
#pragma unroll
    for (int m = 0; m < STRIPS; m++)
#pragma unroll
      for (int n = 0; n < SCORE_COLS; n++) {
        const u32* b = queries.b[step][n];
        mma(s[m][n], a[m][0], b[0], b[1]), mma(odd[m][n], a[m][1], b[2], b[3]);
      }
  }
  each_score([&](int m, int n, int i) { s[m][n][i] = __fadd_rn(s[m][n][i], odd[m][n][i]); });
}

// What a warp that scores has to do with its columns, and what it knows of them: [group][even or odd column].
struct Scorer {
  const Pass& pass;
  const Plan& plan;
  const Shape& shape;
  Board& board;
  u8* weights;
  Feeder<false>& feeder;
  int slot;
  float top[SCORE_COLS][2], sum[STRIPS][SCORE_COLS][2];
  Queries queries, folded;

  DEV_MEMBER static int key_warp() { return threadIdx.x / 32 % KEY_WARPS; }
  DEV_MEMBER static int first_group() { return threadIdx.x / 32 / KEY_WARPS * SCORE_COLS; }
  DEV_MEMBER static int column(int group, int parity) { return (first_group() + group) * 8 + threadIdx.x % 4 * 2 + parity; }
  DEV_MEMBER static void meet_same_cols() { meet_some(SAME_COLS + threadIdx.x / 32 / KEY_WARPS, KEY_WARPS * 32); }

  DEV_MEMBER void begin_item(const Item& item) {
#pragma unroll
    for (int n = 0; n < SCORE_COLS; n++) {
      const Column of = column_of(plan, shape, item, (first_group() + n) * 8 + threadIdx.x % 32 / 4);
      queries.load(n, pass.q + static_cast<u64>(of.row) * pass.q_row + of.head * pass.q_head, of.is_live, shape.head_dim, pass.scale);
      if constexpr (CENTRED)
        folded.load(n, pass.folded + static_cast<u64>(of.row) * pass.folded_row + of.head * DIM, of.is_live, shape.head_dim,
                    pass.scale);
    }
    for (int col = threadIdx.x; col < MOST_COLS; col += ROLE_THREADS) {
      const Column of = column_of(plan, shape, item, col);
      board.low[col] = of.is_live && shape.window ? max(plan.first, pass.positions[of.row] - shape.window + 1) : plan.first;
      board.state[col] = make_float2(LOWEST, 0.0f);
    }
    feeder.meet();
  }

  DEV_MEMBER void begin_segment() {
#pragma unroll
    for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        top[n][j] = LOWEST;
#pragma unroll
        for (int m = 0; m < STRIPS; m++) sum[m][n][j] = 0.0f;
      }
  }

  // One tile of keys at `base` for the groups of columns in mask, which see nothing from `limit` on.
  DEV_MEMBER void attend(int base, int limit, u32 mask) {
    Scores s;
    score(feeder.next(), queries, key_warp() * STRIPS, s);
    if constexpr (CENTRED) {
      Scores more;
      score(feeder.angles(), folded, key_warp() * STRIPS, more);
      each_score([&](int m, int n, int i) { s[m][n][i] = __fadd_rn(s[m][n][i], more[m][n][i]); });
    }
    if (shape.window || plan.first > base || base + TILE > limit || mask != ALL) hide(base, limit, mask, s);
    weigh(s);
  }

  DEV_MEMBER void hide(int base, int limit, u32 mask, Scores s) {
    const int first_key = base + key_warp() * STRIPS * 16 + threadIdx.x % 32 / 4;
    each_score([&](int m, int n, int i) {
      const int position = first_key + m * 16 + i / 2 * 8;
      const bool is_early = position < board.low[column(n, i & 1)] && position >= plan.sinks;
      if (position >= limit || is_early || !(mask >> (first_group() + n) & 1)) s[m][n][i] = __int_as_float(0xff800000);
    });
  }

  // Scores become weights; the maximum and the sum of weights move on.
  DEV_MEMBER void weigh(Scores s) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        float found = fmaxf(s[0][n][j], s[0][n][j + 2]);
#pragma unroll
        for (int m = 1; m < STRIPS; m++) found = fmaxf(found, fmaxf(s[m][n][j], s[m][n][j + 2]));
        found = over_keys(found, Larger());
        if (lane < 4) board.top[slot][key_warp()][column(n, j)] = found;
      }
    meet_same_cols();
    meet_some(EMPTY + slot, THREADS);
    u16* to = reinterpret_cast<u16*>(weights + slot * WEIGHT_BYTES) + (lane >> 2);
#pragma unroll
    for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int col = column(n, j);
        float now = top[n][j];
#pragma unroll
        for (int i = 0; i < KEY_WARPS; i++) now = fmaxf(now, board.top[slot][i][col]);
        const float shrink = exp2_flushed(__fsub_rn(top[n][j], now));
        if (key_warp() == 0 && lane < 4) board.slots[slot].shrink[col] = shrink;
        top[n][j] = now;
#pragma unroll
        for (int m = 0; m < STRIPS; m++) {
          const u16 near = to_half(exp2_flushed(__fsub_rn(s[m][n][j], now))), far = to_half(exp2_flushed(__fsub_rn(s[m][n][j + 2], now)));
          sum[m][n][j] = __fmaf_rn(sum[m][n][j], shrink, __fadd_rn(from_half(near), from_half(far)));
          const int chunk = (key_warp() * STRIPS + m) * 2;
          to[weight_place(col, chunk) / 2] = near, to[weight_place(col, chunk + 1) / 2] = far;
        }
      }
    arrive_some(FULL + slot, THREADS);
    slot ^= 1;
  }

  // Merges the segment into the item's state.
  DEV_MEMBER void end_segment(u32 mask) {
    const int lane = threadIdx.x & 31;
#pragma unroll
    for (int m = 0; m < STRIPS; m++)
#pragma unroll
      for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const float found = over_keys(sum[m][n][j], Sum());
          if (lane < 4) board.sum[key_warp() * STRIPS + m][column(n, j)] = found;
        }
    meet_same_cols();
    meet_some(EMPTY + slot, THREADS);
    if (key_warp() == 0 && lane < 4)
#pragma unroll
      for (int n = 0; n < SCORE_COLS; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int col = column(n, j);
          if (!(mask >> (first_group() + n) & 1)) continue;
          float all = board.sum[0][col];
#pragma unroll
          for (int i = 1; i < ALL_STRIPS; i++) all = __fadd_rn(all, board.sum[i][col]);
          const Factors by = merge(board.state[col], make_float2(top[n][j], all));
          board.slots[slot].factors[col] = make_float2(by.state, by.part);
        }
    arrive_some(FULL + slot, THREADS);
    slot ^= 1;
  }

  DEV_MEMBER void end_item(const Item& item) {
    if (key_warp() || threadIdx.x % 32 >= 4) return;
#pragma unroll
    for (int i = 0; i < SCORE_COLS * 2; i++) {
      const int col = column(i / 2, i % 2), entry = entry_of(plan, shape, item, col);
      if (entry >= 0) pass.stats[entry] = board.state[col];
    }
  }

  // The slots are free, and their barriers as they were found.
  DEV_MEMBER void end() { meet_some(EMPTY, THREADS), meet_some(EMPTY + 1, THREADS); }
};
