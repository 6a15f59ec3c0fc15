// Keys and values on their way to shared memory. A block has two roles: half of its threads compute scores from keys,
// the other half add values up. Each half fills a ring of tiles of its own, ahead of use. Half floats are copied to
// where the matrix instructions find them, other rows as they are.
constexpr int ROLE_THREADS = 128, THREADS = 2 * ROLE_THREADS;
constexpr int CHUNKS = DIM / 8;                      // of 16 bytes, in a row of DIM halves
constexpr int KEY_BYTES = Row<KEY_CODE, DIM>::BYTES, VALUE_BYTES = Row<VALUE_CODE, DIM>::BYTES;
constexpr int KEY_STAGE = TILE * (KEY_BYTES + (CENTRED ? DIM * 2 : 0)), VALUE_STAGE = TILE * VALUE_BYTES;
constexpr int SCORING = 1, ADDING = 2;               // barriers of a role's threads

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

// Walks over the tiles of the block's items, ahead of use, and copies keys or values into the ring.
template <bool IS_VALUE>
struct Feeder {
  static constexpr int CODE = IS_VALUE ? VALUE_CODE : KEY_CODE, STAGE_BYTES = IS_VALUE ? VALUE_STAGE : KEY_STAGE;
  const Pass& pass;
  const Plan& plan;
  const Shape& shape;
  u8 *ring, *halves;
  int index, segment, row, next_fed, next_used;
  Item item;
  Run run;   // what is left of it
  int page;  // of its next tile

  DEV_MEMBER static int thread() { return threadIdx.x % ROLE_THREADS; }
  DEV_MEMBER static void meet() { meet_some(IS_VALUE ? ADDING : SCORING, ROLE_THREADS); }

  DEV_MEMBER void begin(Item& first) {
    begin_item();
    if (thread() == 0) first = item;
    seek();
    find_page();
#pragma unroll 1
    for (int i = 0; i < STAGES - 1; i++) feed();
  }

  // The next tile as half floats. The one before it is filled again.
  DEV_MEMBER const u8* next() {
    wait_copies<STAGES - 2>();
    meet();
    feed();
    const u8* found = ring + next_used * STAGE_BYTES;
    next_used = next_used + 1 == STAGES ? 0 : next_used + 1;
    if constexpr (CODE == HALF) return found;
    decode_tile(found);
    meet();
    return halves;
  }

  // Angles of the positions of the tile that next gave.
  DEV_MEMBER const u8* angles() const {
    return ring + (next_used ? next_used - 1 : STAGES - 1) * STAGE_BYTES + TILE * KEY_BYTES;
  }

  DEV_MEMBER void begin_item() {
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
          begin_item();
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

  // Asks for the next tile.
  DEV_MEMBER void feed() {
    if (index < plan.num_items) {
      copy_tile();
      if (CENTRED && !IS_VALUE) copy_angles();
      run.begin += TILE, seek(), find_page();
    }
    commit_copies();
    next_fed = next_fed + 1 == STAGES ? 0 : next_fed + 1;
  }

  DEV_MEMBER void copy_angles() {
    const u8* from = pass.angles + static_cast<u64>(run.begin) * DIM * 2;
    u8* to = ring + next_fed * STAGE_BYTES + TILE * KEY_BYTES;
    for (int at = thread(); at < TILE * CHUNKS; at += ROLE_THREADS)
      copy16_async(to + swizzled(at / CHUNKS, at % CHUNKS), from + at * 16);
  }

  DEV_MEMBER void copy_tile() {
    constexpr bool IS_HALF = CODE == HALF;
    constexpr int PIECES = Row<CODE, DIM>::BYTES / 16, COUNT = TILE * PIECES;  // of 16 bytes: in a row, in a tile
    constexpr int ROUNDS = (COUNT + ROLE_THREADS - 1) / ROLE_THREADS;
    const int row_bytes = IS_HALF ? shape.head_dim * 2 : PIECES * 16, plane = pass.cache.plane(IS_VALUE, item.kv_head);
    u8* to = ring + next_fed * STAGE_BYTES;
    const bool is_looked_up = row >= item.first_row && pass.control[IS_TREE];
    if (!is_looked_up && run.begin + TILE <= run.limit && row_bytes == PIECES * 16) {
      constexpr int TURN = IS_HALF ? ROLE_THREADS / PIECES % 8 * 16 : 0;  // of the swizzle, from round to round
      const int place = IS_HALF ? swizzled(thread() / PIECES, thread() % PIECES) : thread() * 16;
      const u8* from = pass.cache.page(page) + plane + run.begin % PAGE * row_bytes + thread() * 16;
#pragma unroll
      for (int i = 0; i < ROUNDS; i++)
        if (COUNT % ROLE_THREADS == 0 || thread() + i * ROLE_THREADS < COUNT)
          copy16_async(to + (place ^ i * TURN % 128) + i * ROLE_THREADS * 16, from + i * ROLE_THREADS * 16);
      return;
    }
    const int* ancestors = pass.ancestors + row * pass.ancestor_stride - plan.committed;
#pragma unroll 1  // the last tiles of a pass: short code serves the others
    for (int at = thread(); at < COUNT; at += ROLE_THREADS) {
      const int key = at / PIECES, position = run.begin + key, piece = at % PIECES;
      u8* place = to + (IS_HALF ? swizzled(key, piece) : at * 16);
      // Keys that nobody sees are zeros: what else lies there must not even touch the rounding.
      if (position < run.limit && piece * 16 < row_bytes) {
        const int slot = is_looked_up && position >= plan.committed ? plan.committed + ancestors[position] : position;
        copy16_async(place, pass.cache.page_at(slot) + plane + slot % PAGE * row_bytes + piece * 16);
      } else {
        *reinterpret_cast<uint4*>(place) = make_uint4(0, 0, 0, 0);
      }
    }
  }

  // A tile of rows as half floats, where the matrix instructions find them.
  DEV_MEMBER void decode_tile(const u8* rows) {
    constexpr int KEYS = ROLE_THREADS / CHUNKS;
    const int key = thread() / CHUNKS, chunk = thread() % CHUNKS;
#pragma unroll
    for (int i = 0; i < TILE / KEYS; i++)
      *reinterpret_cast<uint4*>(halves + swizzled(key + i * KEYS, chunk)) =
          decode_eight<CODE, DIM>(rows + (key + i * KEYS) * Row<CODE, DIM>::BYTES, chunk);
  }
};
