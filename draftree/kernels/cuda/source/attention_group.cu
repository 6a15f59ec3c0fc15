// The same attention (attention.cu) for chips whose matrix instruction belongs to four warps. The first warpgroups of a
// block bring keys and values; each of the others has columns of its own, for their scores and for their sums, and
// meets the rest only where a stage is full or empty. A stage holds 64 keys or their values as halves.
constexpr int GROUP_COLS = 8 * GROUP_TILES;
constexpr int DIM_BLOCKS = DIM / 64;
constexpr int STEP = 2, BLOCK = TILE * 8, QUERY_BLOCK = GROUP_COLS * 8;  // as matrices count: 16 dimensions, 64 of them
constexpr int TURNED_STEP = 16 * 8;                                      // 16 keys
// Registers that producers give, and the others then have: together no more than all begin with.
constexpr int GIVEN = GROUPS > 1 ? (PRODUCERS == 1 ? 40 : 48) : (PRODUCERS == 1 ? 0 : 56);
constexpr int TAKEN = GROUPS > 1 && PRODUCERS == 1 ? 152 : 128;

struct Board {  // what the warps of a group tell each other
  float4 top[GROUP_COLS];                  // of 16 keys each
  float2 state[GROUP_COLS];                // of the item so far
  float2 factors[GROUP_COLS];              // of the item's state and of the segment
  int entry[GROUP_COLS], low[GROUP_COLS];  // where the column's result goes, -1: nowhere; the first position that it sees
  Item item;
};

struct Ring {
  u64 full[STAGES], empty[STAGES];
};

// A stage of the ring, and the parity of its barriers.
struct Place {
  int slot, parity;
  DEV_MEMBER void next() {
    if (++slot == STAGES) slot = 0, parity ^= 1;
  }
};

// The first warpgroups: bring stage after stage until all items are done.
struct Producer {
  Feeder& feeder;
  Ring& ring;
  u8 *stages, *raw;
  Place place;

  // Copies go straight to the stages, which are full when they arrive.
  DEV_MEMBER void run_straight() {
#pragma unroll 1
    for (int count = 0; feeder.has_more(); count++) {
      wait_barrier(ring.empty + place.slot, place.parity ^ 1);
      feeder.feed(count & 1);
      if (feeder.wrote) {
        wait_copies<0>();
        arrive(ring.full + place.slot);
      } else {
        arrive_after_copies(ring.full + place.slot);
      }
      place.next();
    }
    wait_copies<0>();
  }

  // Rows as the cache has them come through a ring of their own, and are decoded into the stages.
  DEV_MEMBER void run_decoding() {
    int asked = 0;
#pragma unroll 1
    for (int i = 0; i < FEED_STAGES - 1; i++) asked += feeder.feed(i & 1);
#pragma unroll 1
    for (int done = 0, at = 0; done < asked; done++) {
      wait_copies<FEED_STAGES - 2>();
      meet_some(1, THREADS);  // all rows are there, and nobody reads those before
      asked += feeder.feed(done + FEED_STAGES - 1 & 1);
      wait_barrier(ring.empty + place.slot, place.parity ^ 1);
      u8* stage = stages + place.slot * HALF_TILE_BYTES;
      if (done & 1)
        decode_tile<VALUE_CODE>(raw + at * STAGE_BYTES, stage);
      else
        decode_tile<KEY_CODE>(raw + at * STAGE_BYTES, stage);
      arrive(ring.full + place.slot);
      place.next();
      at = at + 1 == FEED_STAGES ? 0 : at + 1;
    }
  }
};

// One of the other warpgroups: the sums of its columns over the segment and over the item, and what they need.
struct Consumer {
  const Plan& plan;
  const Shape& shape;
  Ring& ring;
  Board& board;
  u8* weights;  // [column] of 64 keys
  Matrix stages, queries, weight_matrix;
  int number;  // of the group
  int first;   // nobody sees anything before it
  Place place;
  u32 own;     // tiles of columns that count
  float top[GROUP_TILES][2], sum[GROUP_TILES][2];  // of the segment: [tile][even or odd column]
  float acc[DIM_BLOCKS][GROUP_TILES][4], state[DIM_BLOCKS][GROUP_TILES][4];

  DEV_MEMBER void meet() { meet_some(2 + number, GROUP_THREADS); }
  DEV_MEMBER int lane() const { return threadIdx.x & 31; }
  DEV_MEMBER int strip() const { return threadIdx.x / 32 & 3; }
  DEV_MEMBER int column(int n, int j) const { return n * 8 + (lane() & 3) * 2 + j; }

  // The next stage, when it is full; shown to matrices here, since those who copy do not wait for their copies.
  DEV_MEMBER Matrix next_stage() {
    wait_barrier(ring.full + place.slot, place.parity);
    show_to_matrices();
    const Matrix found = __shfl_sync(~0u, stages + place.slot * (HALF_TILE_BYTES / 16), 0);
    place.next();
    return found;
  }
  DEV_MEMBER void end_stage(int slot) {
    if (lane() == 0) arrive(ring.empty + slot);
  }
  DEV_MEMBER void skip_stage() {
    const int slot = place.slot;
    next_stage(), end_stage(slot);
  }

  template <class Use>
  DEV_MEMBER void each_sum(Use use) {  // block of dimensions, tile, place in it
#pragma unroll
    for (int m = 0; m < DIM_BLOCKS; m++)
#pragma unroll
      for (int n = 0; n < GROUP_TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) use(m, n, i);
  }

  DEV_MEMBER void begin_segment() {
#pragma unroll
    for (int n = 0; n < GROUP_TILES; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) top[n][j] = LOWEST, sum[n][j] = 0.0f;
    each_sum([&](int m, int n, int i) { acc[m][n][i] = 0.0f; });
  }

  DEV_MEMBER void score(float (*s)[4]) {
    const int slot = place.slot;
    const Matrix keys = next_stage();
    hold<GROUP_TILES>(s);
    begin_products();
#pragma unroll
    for (int k = 0; k < DIM / 16; k++)
      multiply<GROUP_TILES, 0>(s, keys + k / 4 * BLOCK + k % 4 * STEP, queries + k / 4 * QUERY_BLOCK + k % 4 * STEP, k > 0);
    wait_for_products();
    hold<GROUP_TILES>(s);
    end_stage(slot);
  }

  // Hides what columns do not see: keys from limit on, keys before their window, all keys of other rows.
  DEV_MEMBER void hide(float (*s)[4], int base, int limit, u32 mask) {
#pragma unroll
    for (int n = 0; n < GROUP_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int position = base + strip() * 16 + (lane() >> 2) + (i >> 1) * 8;
        const bool is_early = position < board.low[column(n, i & 1)] && position >= plan.sinks;
        if (position >= limit || is_early || !(mask >> n & 1)) s[n][i] = __int_as_float(0xff800000);
      }
  }

  // Scores become weights, which go to shared memory; maximum and sums move on.
  DEV_MEMBER void weigh(float (*s)[4]) {
#pragma unroll
    for (int n = 0; n < GROUP_TILES; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) tell(n, j, over_keys(fmaxf(s[n][j], s[n][j + 2]), Larger()));
    meet();
    const int row = lane() & 7, chunk = strip() * 2 + (lane() >> 3 & 1);
    u8* to = weights + row * 128 + ((chunk ^ row) & 7) * 16;
    float shrink[GROUP_TILES][2];
    bool shrinks = false;
#pragma unroll
    for (int n = 0; n < GROUP_TILES; n++) {
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const float4 of = board.top[column(n, j)];
        const float most = fmaxf(fmaxf(top[n][j], fmaxf(of.x, of.y)), fmaxf(of.z, of.w));
        shrink[n][j] = exp2_fast(__fsub_rn(top[n][j], most));
        shrinks |= most != top[n][j];
        s[n][j] = exp2_fast(__fsub_rn(s[n][j], most)), s[n][j + 2] = exp2_fast(__fsub_rn(s[n][j + 2], most));
        top[n][j] = most;
        sum[n][j] = __fmaf_rn(sum[n][j], shrink[n][j], __fadd_rn(s[n][j], s[n][j + 2]));
      }
      store_matrix_x2_trans(to + n * 1024, round_to_halves(s[n][0], s[n][1]), round_to_halves(s[n][2], s[n][3]));
    }
    if (__any_sync(~0u, shrinks)) each_sum([&](int m, int n, int i) { acc[m][n][i] = __fmul_rn(acc[m][n][i], shrink[n][i & 1]); });
    show_to_matrices();
    meet();
  }

  // To the warps of the group: what this one's keys give a column.
  DEV_MEMBER void tell(int n, int j, float v) {
    if (lane() < 4) reinterpret_cast<float*>(board.top + column(n, j))[strip()] = v;
  }

  DEV_MEMBER void add_values() {
    const int slot = place.slot;
    const Matrix values = next_stage();
    hold_sums();
    begin_products();
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
#pragma unroll
      for (int m = 0; m < DIM_BLOCKS; m++)
        multiply<GROUP_TILES, 1>(acc[m], values + m * BLOCK + k * TURNED_STEP, weight_matrix + k * STEP, 1);
    wait_for_products();
    hold_sums();
    end_stage(slot);
  }

  DEV_MEMBER void hold_sums() {
#pragma unroll
    for (int m = 0; m < DIM_BLOCKS; m++) hold<GROUP_TILES>(acc[m]);
  }

  // One tile of keys at `base` for the tiles of columns in mask, which see nothing from `limit` on.
  DEV_MEMBER void attend(int base, int limit, u32 mask) {
    if (!mask) {
      skip_stage(), skip_stage();
      return;
    }
    float s[GROUP_TILES][4] = {};
    score(s);
    if (shape.window || first > base || base + TILE > limit || mask != own) hide(s, base, limit, mask);
    weigh(s);
    add_values();
  }

  // Merges the segment into the item's state.
  DEV_MEMBER void end_segment() {
#pragma unroll
    for (int n = 0; n < GROUP_TILES; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) tell(n, j, over_keys(sum[n][j], Sum()));
    meet();
    if (strip() == 0 && lane() < 4)
#pragma unroll
      for (int n = 0; n < GROUP_TILES; n++)
#pragma unroll
        for (int j = 0; j < 2; j++) {
          const int col = column(n, j);
          const float4 of = board.top[col];
          const float all = __fadd_rn(__fadd_rn(of.x, of.y), __fadd_rn(of.z, of.w));
          const Factors by = merge(board.state[col], make_float2(top[n][j], all));
          board.factors[col] = make_float2(by.state, by.part);
        }
    meet();
    each_sum([&](int m, int n, int i) {
      const float2 by = board.factors[column(n, i & 1)];
      state[m][n][i] = __fmaf_rn(acc[m][n][i], by.y, __fmul_rn(state[m][n][i], by.x));
    });
  }

  // Queries of the group's columns of an item, and what is known of the columns; others are zeros.
  DEV_MEMBER void begin_item(const Pass& pass, const Item& item, int first_tile, int num_tiles, u8* to) {
    const int heads = shape.kv_heads * shape.group, thread = threadIdx.x & (GROUP_THREADS - 1);
#pragma unroll
    for (int at = thread; at < GROUP_COLS * CHUNKS; at += GROUP_THREADS) {
      const int col = at / CHUNKS, chunk = at % CHUNKS, column = item.first_col + first_tile * 8 + col;
      const int row = divide(column, item.width), part = column - row * item.width, head = item.kv_head * shape.group + part;
      const bool is_live = col < num_tiles * 8 && row < plan.live && part < shape.group;
      const float* from = pass.q + static_cast<u64>(row) * pass.q_row + head * pass.q_head + chunk * 8;
      load_query(from, is_live && chunk * 8 < shape.head_dim, pass.scale,
                 to + chunk / 8 * GROUP_COLS * 128 + col * 128 + ((chunk ^ col) & 7) * 16);
      if (chunk == 0) {
        board.entry[col] = is_live ? (item.slot * plan.live + row) * heads + head : -1;
        board.low[col] = is_live && shape.window ? max(plan.first, pass.positions[row] - shape.window + 1) : plan.first;
        board.state[col] = make_float2(LOWEST, 0.0f);
      }
    }
    own = (1u << num_tiles) - 1;
    each_sum([&](int m, int n, int i) { state[m][n][i] = 0.0f; });
    show_to_matrices();
    meet();
  }

  DEV_MEMBER void store_item(const Pass& pass) {
#pragma unroll
    for (int n = 0; n < GROUP_TILES; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) {
        const int col = column(n, j), entry = board.entry[col];
        if (entry < 0) continue;
        float* to = pass.partial + static_cast<u64>(entry) * DIM + strip() * 16 + (lane() >> 2);
#pragma unroll
        for (int m = 0; m < DIM_BLOCKS; m++) to[m * 64] = state[m][n][j], to[m * 64 + 8] = state[m][n][j + 2];
        if (strip() == 0 && lane() < 4) pass.stats[entry] = board.state[col];
      }
  }

  DEV_MEMBER void run(const Pass& pass, u8* query_place) {
#pragma unroll 1
    for (int index = blockIdx.x; index < plan.num_items; index += gridDim.x) {
      meet();  // the item before is done with what is overwritten now
      if ((threadIdx.x & (GROUP_THREADS - 1)) == 0) board.item = item_at(plan, shape, index);
      meet();
      const Item& item = board.item;
      const int all_tiles = item.num_cols / 8, share = (all_tiles + GROUPS - 1) / GROUPS, first_tile = number * share;
      begin_item(pass, item, first_tile, max(0, min(share, all_tiles - first_tile)), query_place);
#pragma unroll 1
      for (int segment = item.segment; segment < item.segment + item.num_segments; segment++) {
        begin_segment();
#pragma unroll 1
        for (int row = item.first_row - 1; row < item.end_row; row++) {
          const Run run = run_of(plan, item, segment, row, pass.positions);
          const int row_tiles = item.width / 8;
          const u32 seen_by = row < item.first_row ? ~0u : ((1u << row_tiles) - 1) << (row - item.first_row) * row_tiles;
#pragma unroll 1
          for (int base = run.begin; base < run.end; base += TILE) attend(base, run.limit, seen_by >> first_tile & own);
        }
        end_segment();
      }
      store_item(pass);
    }
  }
};

KERNEL void LAUNCH_BOUNDS((PRODUCERS + GROUPS) * GROUP_THREADS, BLOCKS_AN_SM)
    attention_kernel(ATTENTION_ARGS) {
  DYNAMIC_SHARED(shared);
  __shared__ Board boards[GROUPS];
  __shared__ Plan plan;
  __shared__ Ring ring;
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) init_barrier(ring.full + i, THREADS), init_barrier(ring.empty + i, 4 * GROUPS);
    publish_barriers();
  }
  let_later_grids_start();
  wait_for_earlier_grids();
  const Shape shape = ATTENTION_SHAPE;
  const Pass pass = ATTENTION_PASS;
  if (threadIdx.x == 0) plan = make_plan(control, first_row, num_rows, shape, gridDim.x);
  __syncthreads();
  if (blockIdx.x >= plan.num_items) return;
  u8 *stages = aligned_for_matrices(shared), *queries = stages + STAGES * HALF_TILE_BYTES;
  u8 *weights = queries + COLS * DIM * 2, *raw = weights + COLS * 128;
  if (threadIdx.x < THREADS) {
    if constexpr (GIVEN) give_registers<GIVEN>();
    Feeder feeder = {pass, plan, shape, IS_STRAIGHT ? stages : raw, static_cast<int>(blockIdx.x)};
    feeder.begin();
    feeder.seek();
    feeder.find_page();
    Producer producer = {feeder, ring, stages, raw, {0, 0}};
    if constexpr (IS_STRAIGHT) producer.run_straight();
    else producer.run_decoding();
  } else {
    if constexpr (GIVEN) take_registers<TAKEN>();
    const int number = __shfl_sync(~0u, threadIdx.x / GROUP_THREADS, 0) - PRODUCERS;
    u8 *own_queries = queries + number * GROUP_COLS * DIM * 2, *own_weights = weights + number * GROUP_COLS * 128;
    Consumer consumer = {plan, shape, ring, boards[number], own_weights, matrix_at(stages), matrix_at(own_queries),
                         matrix_at(own_weights), number, plan.first, {0, 0}};
    consumer.run(pass, own_queries);
  }
}
