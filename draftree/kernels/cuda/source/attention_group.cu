// The same attention (attention.cu) for chips whose matrix instruction belongs to four warps. The first warpgroups of a
// block bring keys and values; each of the others has columns of its own, for their scores and for their sums, and
// meets the rest only where a stage is full or empty. A stage holds 64 keys or their values as halves.
constexpr int GROUP_COLS = 8 * GROUP_TILES;
constexpr int DIM_BLOCKS = DIM / 64;
constexpr int STEP = 2, BLOCK = TILE * 8, TURNED_STEP = 16 * 8;  // as matrices count: 16 dimensions, 64 of them, 16 keys
constexpr int FEW_TILES = 3;
constexpr int OF_PRODUCERS = 1, OF_GROUP = 2;  // barriers
constexpr float REACH = 14.0f;  // of a reference: halves hold weights of up to 2^14
// Registers that producers give, and the others then have: together no more than all begin with.
constexpr int GIVEN = GROUPS == 1 ? 0 : PRODUCERS == 2 ? 48 : IS_STRAIGHT ? 40 : 56;
constexpr int TAKEN = PRODUCERS == 2 ? 208 : IS_STRAIGHT ? 232 : 224;

struct Board {  // what the warps of a group tell each other
  float4 top[GROUP_COLS];                  // of 16 keys each
  float references[4][GROUP_COLS];         // a copy for each warp
  int entry[GROUP_COLS], low[GROUP_COLS];  // where the column's result goes, -1: nowhere; the first position that it sees
  int4 rises;
  Item item;
  int tiles;           // that its queries were loaded for
  bool keeps_queries;  // of the item before

  DEV_MEMBER void begin_item(const Item& next, int new_tiles) {
    const bool is_same = next.kv_head == item.kv_head && next.first_col == item.first_col && next.width == item.width;
    keeps_queries = is_same && tiles == new_tiles;
    item = next, tiles = new_tiles;
  }
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

// Rows as half floats; a thread has one key, or a part of it, and reads in large pieces.
template <int CODE>
DEV void decode_keys(const u8* rows, u8* halves) {
  constexpr int A_KEY = THREADS / FEED_KEYS, SHARE = DIM / 32 / A_KEY;
  if constexpr (CODE == HALF || SHARE * A_KEY * 32 != DIM) {  // halves of eight rows would lie in the same banks
    decode_tile<CODE>(rows, halves);
  } else {
    const u32 key = threadIdx.x % FEED_KEYS, first = threadIdx.x / FEED_KEYS * SHARE;
    const u8* row = rows + key * Row<CODE, DIM>::BYTES;
#pragma unroll
    for (int part = 0; part < SHARE; part++) {
      uint4 found[4];
      decode_four<CODE, DIM>(row, first + part, found);
#pragma unroll
      for (int i = 0; i < 4; i++)
        *reinterpret_cast<uint4*>(halves + swizzled(key, (first + part) * 4 + i)) = found[i];
    }
  }
}

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
      feeder.feed(count);
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
    for (int i = 0; i < FEED_STAGES - 1; i++) asked += feeder.feed(i);
#pragma unroll 1
    for (int done = 0, at = 0; done < asked; done++) {
      wait_copies<FEED_STAGES - 2>();
      meet_some(OF_PRODUCERS, THREADS);  // all rows are there, and nobody reads those before
      asked += feeder.feed(done + FEED_STAGES - 1);
      const int part = done % FEEDS;
      if (part == 0) wait_barrier(ring.empty + place.slot, place.parity ^ 1);
      u8* stage = stages + place.slot * HALF_TILE_BYTES + part * FEED_KEYS * PITCH;
      if (done / FEEDS & 1)
        decode_keys<VALUE_CODE>(raw + at * STAGE_BYTES, stage);
      else
        decode_keys<KEY_CODE>(raw + at * STAGE_BYTES, stage);
      at = at + 1 == FEED_STAGES ? 0 : at + 1;
      if (part < FEEDS - 1) continue;
      arrive(ring.full + place.slot);
      place.next();
    }
  }
};

// One of the other warpgroups, and what it keeps from item to item.
struct Group {
  const Pass& pass;
  const Plan& plan;
  const Shape& shape;
  Ring& ring;
  Board& board;
  u8 *query_place, *weights;  // weights: [column] of 64 keys
  Matrix stages, queries, weight_matrix;
  int number;
  int first;  // nobody sees anything before it
  Place place;

  DEV_MEMBER void meet() const { meet_some(OF_GROUP + number, GROUP_THREADS); }

  // The next stage, when it is full; shown to matrices here, since those who copy do not wait for their copies.
  DEV_MEMBER Matrix next_stage() {
    wait_barrier(ring.full + place.slot, place.parity);
    show_to_matrices();
    const Matrix found = __shfl_sync(~0u, stages + place.slot * (HALF_TILE_BYTES / 16), 0);
    place.next();
    return found;
  }
  DEV_MEMBER void end_stage(int slot) {
    if ((threadIdx.x & 31) == 0) arrive(ring.empty + slot);
  }
  DEV_MEMBER void skip_tile() {
#pragma unroll 1
    for (int i = 0; i < 2; i++) {
      wait_barrier(ring.full + place.slot, place.parity);
      end_stage(place.slot);
      place.next();
    }
  }
};

// The sums of a group's columns, and what they need. Weights are 2^(score - reference); a column's reference is the
// maximum of the first tile that has any, and of each that passes it by REACH. So most tiles take no maximum, and leave
// the sums as they are.
template <int TILES>
struct Consumer {
  static constexpr int COLUMNS = 8 * TILES, QUERY_BLOCK = COLUMNS * 8;  // the second as matrices count: 64 dimensions
  Group& group;
  Board& board;
  int first_tile, num_tiles;  // of the item's columns
  float sum[TILES][2];        // of weights: [tile][even or odd column]
  float acc[DIM_BLOCKS][TILES][4];

  DEV_MEMBER int lane() const { return threadIdx.x & 31; }
  DEV_MEMBER int strip() const { return threadIdx.x / 32 & 3; }
  DEV_MEMBER int column(int n, int j) const { return n * 8 + (lane() & 3) * 2 + j; }
  DEV_MEMBER float2& references(int n) { return *reinterpret_cast<float2*>(board.references[strip()] + column(n, 0)); }

  template <class Use>
  DEV_MEMBER void each_column(Use use) {  // tile, even or odd
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int j = 0; j < 2; j++) use(n, j);
  }

  DEV_MEMBER void begin_segment() {
    each_column([&](int n, int j) { sum[n][j] = 0.0f; });
#pragma unroll
    for (int m = 0; m < DIM_BLOCKS; m++)
#pragma unroll
      for (int n = 0; n < TILES; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[m][n][i] = 0.0f;
    for (int col = lane(); col < COLUMNS; col += 32) board.references[strip()][col] = LOWEST;
    __syncwarp();
  }

  DEV_MEMBER void score(float (*s)[4], Matrix keys) {
    hold<TILES>(s);
    begin_products();
#pragma unroll
    for (int k = 0; k < DIM / 16; k++)
      multiply<TILES, 0>(s, keys + k / 4 * BLOCK + k % 4 * STEP, group.queries + k / 4 * QUERY_BLOCK + k % 4 * STEP, k > 0);
    wait_for_products();
    hold<TILES>(s);
  }

  // Hides what columns do not see: keys from limit on, keys before their window, all keys of other rows.
  DEV_MEMBER void hide(float (*s)[4], int base, int limit, u32 mask) {
#pragma unroll
    for (int n = 0; n < TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) {
        const int position = base + strip() * 16 + (lane() >> 2) + (i >> 1) * 8;
        const bool is_early = position < board.low[column(n, i & 1)] && position >= group.plan.sinks;
        if (position >= limit || is_early || !(mask >> n & 1)) s[n][i] = __int_as_float(0xff800000);
      }
  }

  // References of columns that have risen become the maxima of this tile, and their sums shrink.
  DEV_MEMBER void raise(const float (*s)[4]) {
    each_column([&](int n, int j) { tell(n, j, over_keys(fmaxf(s[n][j], s[n][j + 2]), Larger())); });
    group.meet();
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      float2 now = references(n);
      const float shrink[2] = {rise(now.x, board.top[column(n, 0)]), rise(now.y, board.top[column(n, 1)])};
      __syncwarp();
      if (lane() < 4) references(n) = now;
#pragma unroll
      for (int j = 0; j < 2; j++) sum[n][j] = __fmul_rn(sum[n][j], shrink[j]);
#pragma unroll
      for (int m = 0; m < DIM_BLOCKS; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) acc[m][n][i] = __fmul_rn(acc[m][n][i], shrink[i & 1]);
    }
    __syncwarp();
  }

  // What sums over a reference shrink by when a tile's maxima have been seen.
  DEV_MEMBER float rise(float& reference, float4 of) {
    const float most = fmaxf(fmaxf(of.x, of.y), fmaxf(of.z, of.w)), before = reference;
    if (__fsub_rn(most, before) > REACH) reference = most;  // as weigh sees it: what did not rise is below REACH then
    return exp2_fast(__fsub_rn(before, reference));
  }

  // Scores become weights, which go to shared memory. False: some are too large, references must rise.
  DEV_MEMBER bool weigh(float (*s)[4]) {
    const int row = lane() & 7, chunk = strip() * 2 + (lane() >> 3 & 1);
    u8* to = group.weights + row * 128 + ((chunk ^ row) & 7) * 16;
    float most = 0.0f;
#pragma unroll
    for (int n = 0; n < TILES; n++) {
      const float2 from = references(n);
#pragma unroll
      for (int i = 0; i < 4; i++) {
        s[n][i] = __fsub_rn(s[n][i], i & 1 ? from.y : from.x);
        most = fmaxf(most, s[n][i]);
        s[n][i] = exp2_fast(s[n][i]);
      }
      store_matrix_x2_trans(to + n * 1024, round_to_halves(s[n][0], s[n][1]), round_to_halves(s[n][2], s[n][3]));
    }
    const bool is_above = __any_sync(~0u, most > REACH);
    if (lane() == 0) reinterpret_cast<int*>(&board.rises)[strip()] = is_above;
    show_to_matrices();
    group.meet();
    const int4 of = board.rises;
    return !(of.x | of.y | of.z | of.w);
  }

  // To the warps of the group: what this one's keys give a column.
  DEV_MEMBER void tell(int n, int j, float v) {
    if (lane() < 4) reinterpret_cast<float*>(board.top + column(n, j))[strip()] = v;
  }

  DEV_MEMBER void add_values(const float (*s)[4]) {
    const int slot = group.place.slot;
    const Matrix values = group.next_stage();
    hold_sums();
    begin_products();
#pragma unroll
    for (int k = 0; k < TILE / 16; k++)
#pragma unroll
      for (int m = 0; m < DIM_BLOCKS; m++)
        multiply<TILES, 1>(acc[m], values + m * BLOCK + k * TURNED_STEP, group.weight_matrix + k * STEP, 1);
    each_column([&](int n, int j) { sum[n][j] = __fadd_rn(sum[n][j], __fadd_rn(s[n][j], s[n][j + 2])); });
    wait_for_products();
    hold_sums();
    group.end_stage(slot);
  }

  DEV_MEMBER void hold_sums() {
#pragma unroll
    for (int m = 0; m < DIM_BLOCKS; m++) hold<TILES>(acc[m]);
  }

  // One tile of keys at `base` for the tiles of columns in mask, which see nothing from `limit` on.
  DEV_MEMBER void attend(int base, int limit, u32 mask, bool is_first) {
    if (!mask) return group.skip_tile();
    float s[TILES][4] = {};
    const int slot = group.place.slot;
    const Matrix keys = group.next_stage();
    const bool has_hidden = group.shape.window || group.first > base || base + TILE > limit || mask != (1u << num_tiles) - 1;
    for (bool rises = is_first, is_done = false; !is_done; rises = true) {
      score(s, keys);
      if (has_hidden) hide(s, base, limit, mask);
      group.meet();  // the weights before are read
      if (rises) raise(s);
      is_done = weigh(s);
    }
    group.end_stage(slot);
    add_values(s);
  }

  // Queries of the group's columns of an item, and what is known of the columns; others are zeros.
  DEV_MEMBER void load_queries(const Item& item) {
    const Shape& shape = group.shape;
    const Pass& pass = group.pass;
    const int heads = shape.kv_heads * shape.group, thread = threadIdx.x & (GROUP_THREADS - 1), earliest = group.plan.first;
    constexpr int COUNT = COLUMNS * CHUNKS, ROUNDS = (COUNT + GROUP_THREADS - 1) / GROUP_THREADS;
    constexpr int AT_ONCE = ROUNDS < 6 ? ROUNDS : 6;
#pragma unroll 1
    for (int begin = thread; begin < COUNT; begin += AT_ONCE * GROUP_THREADS) {
      Query found[AT_ONCE];
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int at = begin + i * GROUP_THREADS, col = at / CHUNKS, chunk = at % CHUNKS;
        const int column = item.first_col + first_tile * 8 + col, row = divide(column, item.width);
        const int part = column - row * item.width, head = item.kv_head * shape.group + part;
        const bool is_live = col < num_tiles * 8 && row < group.plan.live && part < shape.group;
        const float* from = pass.q + static_cast<u64>(row) * pass.q_row + head * pass.q_head + chunk * 8;
        found[i].read(from, is_live && chunk * 8 < shape.head_dim);
        if (chunk == 0 && at < COUNT) {
          board.entry[col] = is_live ? row * heads + head : -1;
          board.low[col] = is_live && shape.window ? max(earliest, pass.positions[row] - shape.window + 1) : earliest;
        }
      }
#pragma unroll
      for (int i = 0; i < AT_ONCE; i++) {
        const int at = begin + i * GROUP_THREADS, col = at / CHUNKS, chunk = at % CHUNKS;
        u8* to = group.query_place + chunk / 8 * COLUMNS * 128 + col * 128 + ((chunk ^ col) & 7) * 16;
        if (at < COUNT) found[i].store(pass.scale, to);
      }
    }
    show_to_matrices();
    group.meet();
  }

  // The segment's averages, its references and the sums of its weights. Neighbours change places, so that each has
  // two dimensions that follow each other.
  DEV_MEMBER void store(int slot) {
    each_column([&](int n, int j) { tell(n, j, over_keys(sum[n][j], Sum())); });
    group.meet();
    const int before = slot * group.plan.live * group.shape.kv_heads * group.shape.group, row = lane() >> 2;
    each_column([&](int n, int j) {
      const int col = column(n, j), entry = before + board.entry[col];
      const bool is_live = board.entry[col] >= 0, is_odd = row & 1;
      const float4 of = board.top[col];
      const float all = __fadd_rn(__fadd_rn(of.x, of.y), __fadd_rn(of.z, of.w));
      const float share = all > 0.0f ? __fdiv_rn(1.0f, all) : 0.0f;
      u32* to = group.pass.partial + static_cast<u64>(entry) * PARTIALS + strip() * 8 + row / 2 + (is_odd ? 4 : 0);
#pragma unroll
      for (int m = 0; m < DIM_BLOCKS; m++) {
        const float near = __fmul_rn(acc[m][n][j], share), far = __fmul_rn(acc[m][n][j + 2], share);
        const float other = __shfl_xor_sync(~0u, is_odd ? near : far, 4);
        const u32 pair = is_odd ? round_to_halves(other, far) : round_to_halves(near, other);
        if (is_live) to[m * 32] = pair;
      }
      if (is_live && strip() == 0 && lane() < 4) group.pass.stats[entry] = make_float2(board.references[0][col], all);
    });
  }

  DEV_MEMBER void run(const Item& item) {
    launder(group.stages), launder(group.queries), launder(group.weight_matrix), launder(group.weights), launder(group.number);
    if (!board.keeps_queries) load_queries(item);
    begin_segment();
    const u32 own = (1u << num_tiles) - 1;
#pragma unroll 1
    for (int row = item.first_row - 1; row < item.end_row; row++) {
      const Run run = run_of(group.plan, item, item.segment, row, group.pass.positions);
      const int row_tiles = item.width / 8;
      const u32 seen_by = row < item.first_row ? ~0u : ((1u << row_tiles) - 1) << (row - item.first_row) * row_tiles;
#pragma unroll 1
      for (int base = run.begin; base < run.end; base += TILE)
        attend(base, run.limit, seen_by >> first_tile & own, base == run.begin);
    }
    store(item.slot);
  }
};

DEV int tiles_of_group(const Item& item) { return (item.num_cols / 8 + GROUPS - 1) / GROUPS; }

// Few columns, as items of short texts have them, take less time in few tiles.
DEV void consume(Group& group) {
  Board& board = group.board;
  const Item& item = board.item;
  const bool is_first = (threadIdx.x & (GROUP_THREADS - 1)) == 0;
  if (is_first) board.tiles = 0;
#pragma unroll 1
  for (int index = first_item(group.plan); index < group.plan.num_items; index = next_item(group.plan, index)) {
    group.meet();  // the item before is done with what is overwritten now
    if (is_first) {
      const Item next = item_at(group.plan, group.shape, index);
      board.begin_item(next, tiles_of_group(next) <= FEW_TILES ? FEW_TILES : GROUP_TILES);
    }
    group.meet();
    const int share = tiles_of_group(item), first_tile = group.number * share;
    const int num_tiles = max(0, min(share, item.num_cols / 8 - first_tile));
    if constexpr (GROUP_TILES > FEW_TILES)
      if (share <= FEW_TILES) {
        Consumer<FEW_TILES>{group, board, first_tile, num_tiles}.run(item);
        continue;
      }
    Consumer<GROUP_TILES>{group, board, first_tile, num_tiles}.run(item);
  }
}

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
  u8 *stages = aligned_for_matrices(shared), *queries = stages + STAGES * HALF_TILE_BYTES;
  u8 *weights = queries + COLS * DIM * 2, *raw = weights + COLS * 128;
  if (threadIdx.x < THREADS) {
    if constexpr (GIVEN) give_registers<GIVEN>();
    Feeder feeder = {pass, plan, shape, IS_STRAIGHT ? stages : raw, first_item(plan)};
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
    Group group = {pass,        plan,        shape, ring,       boards[number], own_queries, own_weights, matrix_at(stages),
                   matrix_at(own_queries), matrix_at(own_weights), number, plan.first, {0, 0}};
    consume(group);
  }
}
