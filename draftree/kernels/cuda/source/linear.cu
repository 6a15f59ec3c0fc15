// out[token][row] (+)= weights[row][:] . x[token][:] (+ bias[row]) for up to 8 * TOKEN_TILES tokens.
//
// BAND row tiles make a band; bands are worked on in steps of COLS columns, one unit of each tile. All steps of the
// matrix, band by band, are shared out evenly among the blocks, in order; a block streams its share through the
// ring. The shares depend on the matrix alone. So the bits of a token's results do not depend on the other tokens.
// How a warp multiplies its part of a step, and what activations are, say multiply_*.cu. At the end
// of a band a warp has the sums of one strip, 16 rows. Blocks leave their parts of a strip in memory for one of those
// that end with the band; it waits for them, and adds them up in the order of columns. So all blocks must be on the chip.
//
// OWN_ROW: there is one token, and each block makes all of its activations itself (row_op.cu), in shared memory behind the
// ring. Else prepare_kernel has made tiles of them.
constexpr int STAGE_BYTES = STEP_BYTES + (OWN_ROW ? 0 : TOKEN_TILES * X_BLOCKS * X_TILE_BYTES);
constexpr int THREADS = NUM_WARPS * 32;
constexpr int SLOT = NUM_WARPS * TOKEN_TILES * 32;  // vectors that a block leaves of a band: [strip][tile][lane]
constexpr int PARTS_AHEAD = TOKEN_TILES > 4 ? 1 : TOKEN_TILES > 2 ? 2 : TOKEN_TILES > 1 ? 4 : 7;  // that are asked for at once
constexpr bool KEEPS_OWN = TOKEN_TILES < 3;  // a block's own part stays in registers, of which there are enough
constexpr u32 NOT_YET = 0xFFFFFFFF;  // a part's numbers until they are left there, and again when they have been added

// Warps of a block tell each other how far they are: counted around, from 0 to `last`. (The compiler would wrap the
// addition of a constant into a dozen instructions.) Numbers of a part tell by themselves that they have come, so
// nobody waits for a fence, or for a counter behind it.
#ifndef EMULATED
DEV u32 count_around(u32* counter, u32 last) {
  u32 before;
  asm volatile("atom.inc.relaxed.cta.shared.u32 %0, [%1], %2;" : "=r"(before) : "r"(shared_address(counter)), "r"(last) : "memory");
  return before;
}

DEV float4 load_vector(const float4* from) {
  float4 v;
  asm volatile("ld.relaxed.gpu.global.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(from) : "memory");
  return v;
}
DEV float2 load_vector(const float2* from) {
  float2 v;
  asm volatile("ld.relaxed.gpu.global.v2.f32 {%0, %1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(from) : "memory");
  return v;
}

DEV void store_vector(float4* to, float4 v) {
  asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(to), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}
DEV void store_vector(float2* to, float2 v) {
  asm volatile("st.relaxed.gpu.global.v2.f32 [%0], {%1, %2};" ::"l"(to), "f"(v.x), "f"(v.y) : "memory");
}
#else
DEV u32 count_around(u32* counter, u32 last) { return atomicAdd(counter, 1u) % (last + 1); }
template <class T>
DEV T load_vector(const T* from) {
  emulator::spin();
  return *from;
}
template <class T>
DEV void store_vector(T* to, T v) { *to = v; }
#endif

// What a lane has of a strip's sums for a tile of tokens: two rows of two of them each, or of the only one.
#if OWN_ROW
typedef float2 Part;
DEV Part part_of(const float* acc) { return make_float2(acc[0], acc[2]); }
DEV Part add(Part a, Part b) { return make_float2(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y)); }
DEV float4 whole(Part v) { return make_float4(v.x, 0.0f, v.y, 0.0f); }
DEV bool have_come(Part v) { return __float_as_uint(v.x) != NOT_YET && __float_as_uint(v.y) != NOT_YET; }
DEV Part all_of(float v) { return make_float2(v, v); }
#else
typedef float4 Part;
DEV Part part_of(const float* acc) { return make_float4(acc[0], acc[1], acc[2], acc[3]); }
DEV Part add(Part a, Part b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}
DEV float4 whole(Part v) { return v; }
DEV bool have_come(Part v) {
  return __float_as_uint(v.x) != NOT_YET && __float_as_uint(v.y) != NOT_YET && __float_as_uint(v.z) != NOT_YET && __float_as_uint(v.w) != NOT_YET;
}
DEV Part all_of(float v) { return make_float4(v, v, v, v); }
#endif

struct Problem {
  const u8* weights;         // [band][chunk][tile] units
  const float* row_scale;    // [rows], used where weights are 16-bit floats
  float* out;                // [tokens][out_stride]
  const float* bias;         // [rows] or null
  Part* partial;             // [blocks][2] slots, NOT_YET between launches
  int first_token, num_rows, num_bands, num_chunks, out_stride, add_to_out;
  const u8* x;               // [cols / 128][x_tiles] X_TILE_BYTES
  int x_tiles;
};

// The host sees to it that steps times blocks fit into 32 bits.
DEV u32 first_step(u32 block, u32 num_steps) { return block * num_steps / gridDim.x; }
DEV u32 block_of(u32 step, u32 num_steps) { return ((step + 1) * gridDim.x - 1) / num_steps; }

// The blocks that share a band, from head on in the order of the columns, and how many of them have no later band: their
// strips of it are shared out among those.
struct Sharers {
  int head, count, num_owners, head_slot;
};

DEV Sharers sharers_of(u32 band, u32 num_bands, u32 num_chunks) {
  const u32 num_steps = num_bands * num_chunks, start = band * num_chunks, end = start + num_chunks;
  const int head = block_of(start, num_steps), tail = block_of(end - 1, num_steps), count = tail - head + 1;
  // A block's first band uses its slot 0, its last one slot 1.
  return {head, count, count - (first_step(tail + 1, num_steps) > end), head * 2 + (first_step(head, num_steps) < start)};
}

// Where a strip of a slot lies.
DEV Part* strip_of(const Problem& p, u32 slot, u32 strip) {
  return p.partial + slot * SLOT + strip * TOKEN_TILES * 32 + (threadIdx.x & 31);
}

DEV void leave_part(const float (*acc)[4], Part* to) {
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) {
    float v[4];
    for (int i = 0; i < 4; i++) v[i] = __uint_as_float(min(__float_as_uint(acc[n][i]), NOT_YET - 1));
    store_vector(to + n * 32, part_of(v));
  }
}

// v = the parts of COUNT tiles of a strip, the first at `from`, added up in the order of the columns. acc: this block's own,
// which has been left with the others, or where it stays in registers. AHEAD of them are on their way at once.
template <int COUNT, int AHEAD>
DEV void add_parts(const Sharers& by, Part* from, const float (*acc)[4], Part* v) {
  const int own = KEEPS_OWN ? blockIdx.x - by.head : -1, head_offset = (by.head_slot & 1) * SLOT;
#pragma unroll 1
  for (int first = 0; first < by.count; first += AHEAD, from += AHEAD * 2 * SLOT) {
    Part part[AHEAD][COUNT];
    const auto place = [&](int a, int n) { return from + (first + a ? 0 : head_offset) + a * 2 * SLOT + n * 32; };
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
#pragma unroll
      for (int n = 0; n < COUNT; n++)
        if (first + a < by.count && first + a != own) part[a][n] = load_vector(place(a, n));
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
#pragma unroll
      for (int n = 0; n < COUNT; n++) {
        if (first + a >= by.count) continue;
        if (first + a == own) {
          part[a][n] = part_of(acc[n]);
        } else {
          while (!have_come(part[a][n])) part[a][n] = load_vector(place(a, n));
          store_vector(place(a, n), all_of(__uint_as_float(NOT_YET)));
        }
        v[n] = first + a ? add(v[n], part[a][n]) : part[a][n];
      }
  }
}

// Where a lane's results of a strip go: of each vector, two tokens of a row, then those of the row eight further.
struct Target {
  float* even;
  bool has_row[2];
  float bias[2], factor[2];
  int first_token;
};

DEV Target target_of(const Problem& p, u32 band, u32 strip) {
  const int row = (band * NUM_WARPS + strip) * 16 + threadIdx.x % 32 / 4, first_token = threadIdx.x % 4 * 2;
  Target to = {p.out + static_cast<u64>(p.first_token + first_token) * p.out_stride + row, {row < p.num_rows, row + 8 < p.num_rows}};
  to.first_token = first_token;
#pragma unroll
  for (int i = 0; i < 2; i++) {
    to.bias[i] = p.bias && to.has_row[i] ? __ldg(p.bias + row + i * 8) : 0.0f;
    to.factor[i] = BITS == 16 && to.has_row[i] ? __ldg(p.row_scale + row + i * 8) : OPERAND_UNIT;
  }
  return to;
}

// Ends COUNT tiles of a strip, from the first on, whose parts are acc or have been left.
template <int COUNT, int AHEAD>
DEV void finish_tiles(const Problem& p, const Target& to, const Sharers& by, int first, Part* from, const float (*acc)[4],
                      int live, const float* token_scale) {
  float *even = to.even + static_cast<u64>(first * 8) * p.out_stride, *odd = even + p.out_stride;
  const int first_token = first * 8 + to.first_token;
  float old[COUNT][4];
#pragma unroll
  for (int n = 0; n < COUNT; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const bool counts = p.add_to_out && to.has_row[i >> 1] && n * 8 + first_token + (i & 1) < live;
      old[n][i] = counts ? (i & 1 ? odd : even)[static_cast<u64>(n * 8) * p.out_stride + (i >> 1) * 8] : 0.0f;
    }
  Part v[COUNT];
  if (!KEEPS_OWN || by.count > 1)
    add_parts<COUNT, AHEAD>(by, from + first * 32, acc, v);
  else
#pragma unroll
    for (int n = 0; n < COUNT; n++) v[n] = part_of(acc[n]);
#pragma unroll
  for (int n = 0; n < COUNT; n++) {
    const float2 scale = *reinterpret_cast<const float2*>(token_scale + n * 8 + first_token);
    const float4 sums = whole(v[n]);
    const float y[4] = {sums.x, sums.y, sums.z, sums.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const float sum = __fadd_rn(__fmul_rn(__fmul_rn(y[i], to.factor[i >> 1]), i & 1 ? scale.y : scale.x), to.bias[i >> 1]);
      if (to.has_row[i >> 1] && n * 8 + first_token + (i & 1) < live)
        (i & 1 ? odd : even)[static_cast<u64>(n * 8) * p.out_stride + (i >> 1) * 8] = __fadd_rn(old[n][i], sum);
    }
  }
}

// Ends a strip of a band, all tiles at once, or where there is still work to do tile by tile, which takes few registers.
template <bool IS_LAST>
DEV void finish_strip(const Problem& p, u32 band, u32 strip, const Sharers& by, const float (*acc)[4], int live, const float* token_scale) {
  const Target to = target_of(p, band, strip);
  Part* from = strip_of(p, by.head * 2, strip);
  if (IS_LAST || KEEPS_OWN)
    finish_tiles<TOKEN_TILES, PARTS_AHEAD>(p, to, by, 0, from, acc, live, token_scale);
  else
#pragma unroll 1
    for (int n = 0; n < TOKEN_TILES; n++) finish_tiles<1, 1>(p, to, by, n, from, acc, live, token_scale);
}

// Fills the stages in turn: stage i % STAGES with step i of the share and the activations for it.
struct Feeder {
  const Problem& p;
  u8* stages;
  u64* full;
  u32 begin, count;
  int x_bytes;

  // Also says how much is to come before the stage is full.
  DEV_MEMBER void copy_weights(u32 i) {
    const int stage = i % STAGES;
    expect_bytes(full + stage, STEP_BYTES + X_BLOCKS * x_bytes);
    copy_async<true>(stages + stage * STAGE_BYTES, p.weights + static_cast<u64>(begin + i) * STEP_BYTES, STEP_BYTES, full + stage);
  }

  // Those of stages from `from` to `to`, if this thread asks for weights.
  DEV_MEMBER void begin_stages(u32 from, u32 to) {
    if (BULK && threadIdx.x != 0 || is_prefetched()) return;
    for (u32 i = from; i < min(to, count); i++) copy_weights(i);
  }

  DEV_MEMBER void copy_x(u32 i, u32 band) {
    if (OWN_ROW) return;
    u32 chunk = begin + i - band * p.num_chunks;
    while (chunk >= p.num_chunks) chunk -= p.num_chunks;
    u8* to = stages + i % STAGES * STAGE_BYTES + STEP_BYTES;
    const u8* from = p.x + static_cast<u64>(chunk * X_BLOCKS * p.x_tiles + p.first_token / 8) * X_TILE_BYTES;
#pragma unroll
    for (int b = 0; b < X_BLOCKS; b++)
      copy_async<false>(to + b * TOKEN_TILES * X_TILE_BYTES, from + b * p.x_tiles * X_TILE_BYTES, x_bytes, full + i % STAGES);
  }

  // Refills the stage of step i, which must be empty; band is that of the next step or an earlier one.
  DEV_MEMBER void refill(u32 i, u32 band) {
    if (i + STAGES < count) copy_weights(i + STAGES), copy_x(i + STAGES, band);
  }
};

#if OWN_ROW
// What the token's activations are made from; the row of x is the first, or the one that rows names.
struct RowSource {
  const float *x, *other, *weight;
  const int* rows;
  float* copy;  // gets the row as it came, or is null
  float eps;
  int num_cols, x_stride;
};
#define INPUT                                                                                                            \
  const float *x, const float *other, const float *norm_weight, const int *rows, float *copy, float eps, int num_cols, \
      int x_stride
#define X_OF_TILES nullptr, 0

// Leaves the row in shared memory, and its scale. Waits for earlier grids.
DEV void make_row(const RowSource& source, const int* live_count, int padded_cols, u8* to, float* scale, Feeder& feeder) {
  RowSlices row;
  row.load_weights(source.weight, source.num_cols);
  wait_for_earlier_grids();
  feeder.begin_stages(EARLY_STAGES, STAGES);
  const bool is_live = !live_count || *live_count > 0;
  const int from = source.rows && is_live ? source.rows[0] : 0;
  row.load(source.x + static_cast<u64>(from) * source.x_stride, source.other, source.num_cols);
  if (source.copy && is_live && blockIdx.x == 0) row.copy(source.copy, source.num_cols);
  row.combine(source.eps);
  store_own(row.v, row.finish(source.num_cols, source.eps), to, scale, padded_cols);
}
#else
#define INPUT const u8 *x, const float *token_scale, int x_tiles
#define X_OF_TILES x, x_tiles
#endif

KERNEL void LAUNCH_BOUNDS(THREADS, BLOCKS_AN_SM)
    linear_kernel(const u8* weights, const float* row_scale, float* out, const float* bias, Part* partial,
                  const int* live_count, int num_tokens, int first_token, int num_rows, int num_bands, int num_chunks,
                  int out_stride, int add_to_out, INPUT) {
  const Problem p = {weights,  row_scale, out,        bias,       partial,    first_token,
                     num_rows, num_bands, num_chunks, out_stride, add_to_out, X_OF_TILES};
  DYNAMIC_SHARED(stages);
  RING_BARRIERS(full);
  __shared__ u32 num_left[STAGES];  // warps that have left a stage
  __shared__ __align__(8) float scales[TOKEN_TILES * 8];
  __shared__ int live;            // tokens that count
  __shared__ u32 shared_magic;    // MAGIC in a way that keeps the compiler from seeing a constant: it stays in a register
  __shared__ Sharers sharers;     // of the last band
  const u32 num_steps = num_bands * num_chunks, begin = first_step(blockIdx.x, num_steps);
  const u32 count = first_step(blockIdx.x + 1, num_steps) - begin;
  Feeder feeder = {p, stages, full, begin, count, OWN_ROW ? 0 : min(TOKEN_TILES, p.x_tiles - first_token / 8) * X_TILE_BYTES};
  let_later_grids_start();
  if (threadIdx.x == 0) {
    shared_magic = MAGIC | num_rows >> 31;
    for (int i = 0; i < STAGES; i++) num_left[i] = 0;
    if (!is_prefetched()) init_barriers(full, STAGES);
  }
  // Weights never change, so the first of them need not wait for earlier grids. More would take bandwidth from the end
  // of the product before, for which everything waits.
  const bool starts = !BULK || threadIdx.x == 0;
  feeder.begin_stages(0, EARLY_STAGES);
  const Offsets offsets = find_offsets();
  const u32 first_band = begin / num_chunks;
  if (threadIdx.x == 32) sharers = sharers_of((begin + count - 1) / num_chunks, num_bands, num_chunks);
  __syncthreads();
#if OWN_ROW
  const int padded_cols = (num_chunks * COLS + 255) / 256 * 256;
  u8* row = stages + STAGES * STAGE_BYTES;
  make_row({x, other, norm_weight, rows, copy, eps, num_cols, x_stride}, live_count, padded_cols, row, scales, feeder);
#else
  wait_for_earlier_grids();
  const float own_scale = threadIdx.x < num_tokens ? token_scale[first_token + threadIdx.x] : 0.0f;
#endif
  const int num_live = live_count && threadIdx.x == 0 ? *live_count : first_token + num_tokens;
  for (u32 i = 0; i < STAGES; i++) {
    if (!OWN_ROW) feeder.begin_stages(max(i, EARLY_STAGES), i + 1);
    if (starts && i < count) feeder.copy_x(i, first_band);
    end_stage_copy();
  }
#if !OWN_ROW
  if (threadIdx.x < num_tokens) scales[threadIdx.x] = own_scale;
#endif
  if (threadIdx.x == 0) live = min(num_tokens, num_live - first_token);
  __syncthreads();
  const u32 magic = shared_magic, strip = threadIdx.x / 32;
  u32 band = first_band, left = (first_band + 1) * num_chunks - begin, turn = 0, parity = 0;
  const bool begins_inside = left < num_chunks;  // of a band
  float acc[TOKEN_TILES][4] = {};
  for (u32 i = 0; i < count; i++) {
#if BULK
    wait_barrier(full + turn, parity);
#else
    meet_at_stage<STAGES - 1>();
#endif
    __syncwarp();
    u32 before = 0;  // warps that left the stage before this one
    const u8* stage = stages + turn * STAGE_BYTES;
#if OWN_ROW
    const Input input = input_of_row(row, padded_cols, num_chunks - left);
#else
    const Input input = input_of_stage(stage);
#endif
    multiply_unit(stage, input, offsets, magic, acc, [&] {
#if BULK
      __syncwarp();
      if (threadIdx.x % 32 == 0) before = count_around(num_left + turn, NUM_WARPS - 1);
#endif
    });
    if (BULK && before == NUM_WARPS - 1) feeder.refill(i, band);  // the last one
    if (--left == 0 && i + 1 < count) {
      const bool is_whole = band != first_band || !begins_inside;
      const Sharers alone = {static_cast<int>(blockIdx.x), 1, 1, static_cast<int>(blockIdx.x) * 2 + 1};
      if (!KEEPS_OWN || !is_whole) leave_part(acc, strip_of(p, blockIdx.x * 2 + is_whole, strip));
      if (is_whole) finish_strip<false>(p, band, strip, alone, acc, live, scales);
      band++, left = num_chunks;
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
        for (int c = 0; c < 4; c++) acc[n][c] = 0.0f;
    }
#if !BULK
    __syncthreads();
    feeder.refill(i, band);
    end_stage_copy();
#endif
    if (++turn == STAGES) turn = 0, parity ^= 1;
  }
  const Sharers by = sharers;
  const bool finishes = strip % by.num_owners == blockIdx.x - by.head;
  if (!KEEPS_OWN || !finishes) leave_part(acc, strip_of(p, blockIdx.x * 2 + (band != first_band), strip));
  if (finishes) finish_strip<true>(p, band, strip, by, acc, live, scales);
}
