// Keys and values on their way to shared memory: a ring of half tiles that a block fills ahead of use. Half floats are
// copied to where the matrix instructions find them, other rows as they are.
constexpr int CHUNKS = DIM / 8;                      // of 16 bytes, in a row of DIM halves
constexpr int KEY_BYTES = Row<KEY_CODE, DIM>::BYTES, VALUE_BYTES = Row<VALUE_CODE, DIM>::BYTES;
#ifdef GROUPS  // attention_group.cu: some warpgroups copy; what is not halves comes through RAW_STAGES
constexpr int THREADS = PRODUCERS * GROUP_THREADS, HALF_TILE_BYTES = TILE * DIM * 2, PITCH = 128;  // from row to row
constexpr bool IS_STRAIGHT = KEY_CODE == HALF && VALUE_CODE == HALF;
constexpr int FEED_STAGES = IS_STRAIGHT ? STAGES : RAW_STAGES, FEED_KEYS = IS_STRAIGHT ? TILE : RAW_KEYS;
DEV u32 swizzled(u32 row, u32 chunk) { return chunk / 8 * TILE * PITCH + row * PITCH + ((chunk ^ row) & 7) * 16; }
#else
constexpr int WARPS = 8, THREADS = WARPS * 32, FEED_STAGES = STAGES, FEED_KEYS = TILE, PITCH = CHUNKS * 16;
constexpr bool IS_STRAIGHT = true;
DEV u32 swizzled(u32 row, u32 chunk) { return row * PITCH + (chunk ^ (row & 7)) * 16; }
#endif
constexpr int FEEDS = TILE / FEED_KEYS;  // of a half tile
constexpr int ANGLES_AT = FEED_KEYS * (KEY_BYTES > VALUE_BYTES ? KEY_BYTES : VALUE_BYTES);  // in a stage of keys
constexpr int STAGE_BYTES = ANGLES_AT + (CENTRED ? TILE * DIM * 2 : 0);

struct Pass {
  const int *control, *positions, *ancestors;  // of this launch's rows
  int ancestor_stride;
  const float* q;
  int q_row, q_head;
  float scale;
  Cache cache;
  Partial* partial;  // [slot][row][head][PARTIALS]
  float2* stats;   // maximum and sum of the weights
  const u8* angles;     // where CENTRED: cosines and sines of all positions, [DIM] halves each
  const float* folded;  // and what queries make of them, [row][head][DIM]
  int folded_row;
};

// What both kernels are given, and what they make of it.
#define ATTENTION_ARGS                                                                                                    \
  const int *control, const int *positions, const int *ancestors, const float *q, u8 *pool, const int *pages,             \
      Partial *partial, float2 *stats, float scale, int ancestor_stride, int q_row, int q_head, int page_bytes,             \
      int key_bytes, int value_bytes, int first_row, int num_rows, int kv_heads, int group, int head_dim, int window,     \
      int is_bidirectional, const u8 *angles, const float *folded_queries, int folded_row
#define ATTENTION_SHAPE {kv_heads, group, head_dim, window, is_bidirectional}
#define ATTENTION_PASS                                                                                                    \
  {control, positions, ancestors, ancestor_stride, q, q_row, q_head, scale,                                               \
   {pool, pages, page_bytes, kv_heads, key_bytes, value_bytes}, partial, stats, angles, folded_queries, folded_row}

// Walks over the tiles of the block's items, ahead of the worker, and copies them into the ring.
struct Feeder {
  const Pass& pass;
  const Plan& plan;
  const Shape& shape;
  u8* ring;
  int index, segment, row, stage;
  Item item;
  Run run;     // what is left of it
  int page;    // of its next tile
  bool wrote;  // zeros, beside what was copied

  DEV_MEMBER void begin() {
    if (index >= plan.num_items) return;
    item = item_at(plan, shape, index);
    segment = item.segment, row = item.first_row - 1;
    run = run_of(plan, item, segment, row, pass.positions);
  }

  // Goes on to a run that has tiles.
  DEV_MEMBER void seek() {
    while (index < plan.num_items && run.begin >= run.end) {
      if (++row >= item.end_row) {
        if (++segment == item.segment + item.num_segments) {
          index = next_item(plan, index);
          begin();
          continue;
        }
        row = item.first_row - 1;
      }
      run = run_of(plan, item, segment, row, pass.positions);
    }
  }

  // Before the first tile in a page: it is asked for long before it is needed.
  DEV_MEMBER void find_page() {
    static_assert(PAGE % TILE == 0, "a tile lies in one page");
    if (index < plan.num_items) page = pass.cache.table[run.begin / PAGE];
  }

  DEV_MEMBER bool has_more() const { return index < plan.num_items; }

  // Asks for the next half tile, or for the next of its FEEDS parts, if there is one. The values of a tile follow its
  // keys.
  DEV_MEMBER bool feed(int step) {
    constexpr bool IS_ALIKE = KEY_BYTES == VALUE_BYTES && (KEY_CODE == HALF) == (VALUE_CODE == HALF);
    const bool is_there = has_more(), is_value = step / FEEDS & 1;
    const int part = step % FEEDS;
    if (is_there) {
      if (IS_ALIKE || !is_value)
        copy_tile<KEY_CODE>(is_value, part);
      else
        copy_tile<VALUE_CODE>(is_value, part);
      if (CENTRED && !is_value) copy_angles();
      if (is_value && part == FEEDS - 1) {
        run.begin += TILE;
        if (run.begin >= run.end) seek(), find_page();
        else if (WIDEST > PAGE && run.begin % PAGE == 0) find_page();
      }
    }
    commit_copies();
    stage = stage + 1 == FEED_STAGES ? 0 : stage + 1;
    return is_there;
  }

  DEV_MEMBER void copy_angles() {
    const u8* from = pass.angles + static_cast<u64>(run.begin) * DIM * 2;
    u8* to = ring + stage * STAGE_BYTES + ANGLES_AT;
    for (int at = threadIdx.x; at < TILE * CHUNKS; at += THREADS) copy16_async(to + swizzled(at / CHUNKS, at % CHUNKS), from + at * 16);
  }

  template <int CODE>
  DEV_MEMBER void copy_tile(bool is_value, int part) {
    constexpr bool IS_HALF = CODE == HALF, IS_PLACED = IS_HALF && IS_STRAIGHT;
    constexpr int PIECES = Row<CODE, DIM>::BYTES / 16, COUNT = FEED_KEYS * PIECES;  // of 16 bytes: in a row, in all
    constexpr int ROUNDS = (COUNT + THREADS - 1) / THREADS;
    const int row_bytes = IS_HALF ? shape.head_dim * 2 : PIECES * 16, plane = pass.cache.plane(is_value, item.kv_head);
    const int begin = run.begin + part * FEED_KEYS;
    u8* stage_begin = ring + stage * STAGE_BYTES;
    const auto place_of = [&](u32 at) { return stage_begin + (IS_PLACED ? swizzled(at / PIECES, at % PIECES) : at * 16); };
    const bool is_looked_up = row >= item.first_row && pass.control[IS_TREE];
    wrote = run.begin + TILE > run.limit || row_bytes != PIECES * 16;
    if (!is_looked_up && !wrote) {
      const u8* from = pass.cache.page(page) + plane + begin % PAGE * row_bytes + threadIdx.x * 16;
      // The swizzle is the same again 8 keys on: places are a few, and distances from them.
      constexpr int TURNS = IS_PLACED && THREADS < 8 * PIECES ? 8 * PIECES / THREADS : 1;
      constexpr int FURTHER = IS_PLACED ? TURNS * THREADS / PIECES * PITCH : THREADS * 16;
#pragma unroll
      for (int turn = 0; turn < TURNS; turn++) {
        u8* to = place_of(threadIdx.x + turn * THREADS);
#pragma unroll
        for (int i = turn; i < ROUNDS; i += TURNS)
          if (COUNT % THREADS == 0 || threadIdx.x + i * THREADS < COUNT)
            copy16_async(to + i / TURNS * FURTHER, from + i * THREADS * 16);
      }
      return;
    }
    const int* ancestors = pass.ancestors + row * pass.ancestor_stride - plan.committed;
#pragma unroll 1  // the last tiles of a pass: short code serves the others
    for (int at = threadIdx.x; at < COUNT; at += THREADS) {
      const int position = begin + at / PIECES, piece = at % PIECES;
      u8* place = place_of(at);
      // Keys that nobody sees are zeros: what else lies there must not even touch the rounding.
      if (position < run.limit && piece * 16 < row_bytes) {
        const int slot = is_looked_up && position >= plan.committed ? plan.committed + ancestors[position] : position;
        copy16_async(place, pass.cache.page_at(slot) + plane + slot % PAGE * row_bytes + piece * 16);
      } else {
        *reinterpret_cast<uint4*>(place) = make_uint4(0, 0, 0, 0);
      }
    }
  }
};

// Rows as half floats, where the matrix instructions find them.
template <int CODE>
DEV void decode_tile(const u8* rows, u8* halves) {
  constexpr int KEYS = THREADS / CHUNKS, TURNS = KEYS < 8 ? 8 / KEYS : 1;
  const u32 key = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
#pragma unroll
  for (int turn = 0; turn < TURNS; turn++) {
    u8* to = halves + swizzled(key + turn * KEYS, chunk);
#pragma unroll
    for (int i = turn; i < FEED_KEYS / KEYS; i += TURNS)
      *reinterpret_cast<uint4*>(to + i / TURNS * TURNS * KEYS * PITCH) =
          decode_eight<CODE, DIM>(rows + (key + i * KEYS) * Row<CODE, DIM>::BYTES, chunk);
  }
}

DEV u32 pack_halves(float even, float odd) { return to_half(even) | static_cast<u32>(to_half(odd)) << 16; }
DEV float clamp_half(float v) { return fminf(fmaxf(v, -65504.0f), 65504.0f); }

// Eight dimensions of a query, on their way to halves; zeros where there are none.
struct Query {
  float4 low, high;

  DEV_MEMBER void read(const float* source, bool is_there) {
    low = high = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
    if (is_there) low = reinterpret_cast<const float4*>(source)[0], high = reinterpret_cast<const float4*>(source)[1];
  }

  DEV_MEMBER void store(float scale, u8* to) const {
    const auto pair = [&](float even, float odd) {
      return pack_halves(clamp_half(__fmul_rn(even, scale)), clamp_half(__fmul_rn(odd, scale)));
    };
    *reinterpret_cast<uint4*>(to) = make_uint4(pair(low.x, low.y), pair(low.z, low.w), pair(high.x, high.y), pair(high.z, high.w));
  }
};

DEV void load_query(const float* source, bool is_there, float scale, u8* to) {
  Query query;
  query.read(source, is_there);
  query.store(scale, to);
}

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
