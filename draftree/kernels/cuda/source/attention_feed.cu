// Keys and values on their way to shared memory: a ring of half tiles that a block fills ahead of use.
constexpr int WARPS = 8, THREADS = WARPS * 32;
constexpr int CHUNKS = DIM / 8;                      // of 16 bytes, in a row of DIM halves
constexpr int STAGE_BYTES = TILE * DIM * 2;

struct Pass {
  const int *control, *positions, *ancestors;  // of this launch's rows
  int ancestor_stride;
  const float* q;
  int q_row, q_head;
  float scale;
  const u16 *keys, *values;  // [kv_heads][capacity][head_dim]
  int capacity;
  float* partial;  // [slot][row][head][DIM]
  float2* stats;   // maximum and sum of the weights
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
  Run run;  // what is left of it

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

  // Asks for the next half tile. The values of a tile follow its keys.
  DEV_MEMBER void feed(bool is_value) {
    if (index < plan.num_items) {
      copy_tile((is_value ? pass.values : pass.keys) + static_cast<u64>(item.kv_head) * pass.capacity * shape.head_dim);
      if (is_value) run.begin += TILE, seek();
    }
    commit_copies();
    stage = stage + 1 == STAGES ? 0 : stage + 1;
  }

  DEV_MEMBER void copy_tile(const u16* plane) {
    constexpr int ROUNDS = TILE * CHUNKS / THREADS, KEYS = THREADS / CHUNKS;  // keys a round, a multiple of 8
    const int key = threadIdx.x / CHUNKS, chunk = threadIdx.x % CHUNKS, head_dim = shape.head_dim;
    u8* to = ring + stage * STAGE_BYTES + swizzled(key, chunk);
    plane += chunk * 8;
    const bool is_looked_up = row >= item.first_row && pass.control[IS_TREE];
    if (!is_looked_up && run.begin + TILE <= run.limit && head_dim == DIM) {
      const u16* from = plane + static_cast<u64>(run.begin + key) * DIM;
#pragma unroll
      for (int i = 0; i < ROUNDS; i++) copy16_async(to + i * KEYS * CHUNKS * 16, from + i * KEYS * DIM);
      return;
    }
    const int* ancestors = pass.ancestors + row * pass.ancestor_stride - plan.committed;
    int slots[ROUNDS];  // all are asked for before the first one is needed
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      const int position = run.begin + key + i * KEYS;
      slots[i] = position;
      if (is_looked_up && position >= plan.committed && position < run.limit) slots[i] = plan.committed + ancestors[position];
    }
#pragma unroll
    for (int i = 0; i < ROUNDS; i++) {
      const int position = run.begin + key + i * KEYS, slot = slots[i];
      // Keys that nobody sees are zeros: what else lies there must not even touch the rounding.
      if (position < run.limit && chunk * 8 < head_dim)
        copy16_async(to + i * KEYS * CHUNKS * 16, plane + static_cast<u64>(slot) * head_dim);
      else
        *reinterpret_cast<uint4*>(to + i * KEYS * CHUNKS * 16) = make_uint4(0, 0, 0, 0);
    }
  }
};
