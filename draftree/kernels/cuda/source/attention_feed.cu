// Keys and values on their way to shared memory: a ring of half tiles that a block fills ahead of use. Half floats are
// copied to where the matrix instructions find them, other rows as they are.
constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int CHUNKS = DIM / 8;                      // of 16 bytes, in a row of DIM halves
constexpr int KEY_BYTES = Row<KEY_CODE, DIM>::BYTES, VALUE_BYTES = Row<VALUE_CODE, DIM>::BYTES;
constexpr int ANGLES_AT = TILE * (KEY_BYTES > VALUE_BYTES ? KEY_BYTES : VALUE_BYTES);  // in a stage of keys
constexpr int STAGE_BYTES = ANGLES_AT + (CENTRED ? TILE * DIM * 2 : 0);

struct Pass {
  const int *control, *positions, *ancestors;  // of this launch's rows
  int ancestor_stride;
  const float* q;
  int q_row, q_head;
  float scale;
  Cache cache;
  float* partial;  // [slot][row][head][DIM]
  float2* stats;   // maximum and sum of the weights
  const u8* angles;     // where CENTRED: cosines and sines of all positions, [DIM] halves each
  const float* folded;  // and what queries make of them, [row][head][DIM]
  int folded_row;
};

DEV int swizzled(int row, int chunk) { return (row * CHUNKS + (chunk ^ (row & 7))) * 16; }

// Walks over the tiles of the block's items, ahead of the worker, and copies them into the ring.
struct Feeder {
  const Pass& pass;
  const Plan& plan;
  const Shape& shape;
  u8* ring;
  int index, segment, row, stage;
  Item item;
  Run run;   // what is left of it
  int page;  // of its next tile

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
          index += gridDim.x;
          begin();
          continue;
        }
        row = item.first_row - 1;
      }
      run = run_of(plan, item, segment, row, pass.positions);
    }
  }

  // Before the first tile, and after each: the page is asked for long before it is needed.
  DEV_MEMBER void find_page() {
    if (index < plan.num_items) page = pass.cache.table[run.begin / PAGE];
  }

  // Asks for the next half tile. The values of a tile follow its keys.
  DEV_MEMBER void feed(bool is_value) {
    constexpr bool IS_ALIKE = KEY_BYTES == VALUE_BYTES && (KEY_CODE == HALF) == (VALUE_CODE == HALF);
    if (index < plan.num_items) {
      if (IS_ALIKE || !is_value)
        copy_tile<KEY_CODE>(is_value);
      else
        copy_tile<VALUE_CODE>(is_value);
      if (CENTRED && !is_value) copy_angles();
      if (is_value) run.begin += TILE, seek(), find_page();
    }
    commit_copies();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  DEV_MEMBER void copy_angles() {
    const u8* from = pass.angles + static_cast<u64>(run.begin) * DIM * 2;
    u8* to = ring + stage * STAGE_BYTES + ANGLES_AT;
    for (int at = threadIdx.x; at < TILE * CHUNKS; at += THREADS) copy16_async(to + swizzled(at / CHUNKS, at % CHUNKS), from + at * 16);
  }

  template <int CODE>
  DEV_MEMBER void copy_tile(bool is_value) {
    constexpr bool IS_HALF = CODE == HALF;
    constexpr int PIECES = Row<CODE, DIM>::BYTES / 16, COUNT = TILE * PIECES;  // of 16 bytes: in a row, in a tile
    constexpr int ROUNDS = (COUNT + THREADS - 1) / THREADS;
    const int row_bytes = IS_HALF ? shape.head_dim * 2 : PIECES * 16, plane = pass.cache.plane(is_value, item.kv_head);
    // The swizzle is the same in every round, which takes a multiple of 8 keys.
    u8* to = ring + stage * STAGE_BYTES + (IS_HALF ? swizzled(threadIdx.x / PIECES, threadIdx.x % PIECES) : threadIdx.x * 16);
    const bool is_looked_up = row >= item.first_row && pass.control[IS_TREE];
    if (!is_looked_up && run.begin + TILE <= run.limit && row_bytes == PIECES * 16) {
      const u8* from = pass.cache.page(page) + plane + run.begin % PAGE * row_bytes + threadIdx.x * 16;
#pragma unroll
      for (int i = 0; i < ROUNDS; i++)
        if (COUNT % THREADS == 0 || threadIdx.x + i * THREADS < COUNT)
          copy16_async(to + i * THREADS * 16, from + i * THREADS * 16);
      return;
    }
    const int* ancestors = pass.ancestors + row * pass.ancestor_stride - plan.committed;
#pragma unroll 1  // the last tiles of a pass: short code serves the others
    for (int at = threadIdx.x; at < COUNT; at += THREADS) {
      const int position = run.begin + at / PIECES, piece = at % PIECES;
      u8* place = to + (at - threadIdx.x) * 16;
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

// A tile of rows as half floats, where the matrix instructions find them.
template <int CODE>
DEV void decode_tile(const u8* rows, u8* halves) {
  constexpr int KEYS = THREADS / CHUNKS;
  const int key = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS;
#pragma unroll
  for (int i = 0; i < TILE / KEYS; i++)
    *reinterpret_cast<uint4*>(halves + swizzled(key + i * KEYS, chunk)) =
        decode_eight<CODE, DIM>(rows + (key + i * KEYS) * Row<CODE, DIM>::BYTES, chunk);
}
