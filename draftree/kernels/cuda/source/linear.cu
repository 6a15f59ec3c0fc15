// out[token][row] (+)= weights[row][:] . x[token][:] (+ bias[row]) for up to 8 * TOKEN_TILES tokens.
//
// BAND row tiles make a band; bands are worked on in steps of COLS columns, one unit of each tile. All steps of the
// matrix, band by band, are shared out evenly among the blocks, in order; a block streams its share through the
// ring. The shares depend on the matrix alone. So the bits of a token's results do not depend on the other tokens.
// A warp has STRIPS strips of 16 rows and one half of the columns; at the end of a band it swaps a strip with the warp that
// has the other half. A strip that several blocks share is summed by the last warp to finish it, in the order of the columns.
constexpr int STRIPS = 2;
constexpr int BAND_ROWS = BAND * ROWS;
constexpr int NUM_WARPS = BAND_ROWS / 16 * 2 / STRIPS;
constexpr int THREADS = NUM_WARPS * 32;
constexpr int X_TILE_BYTES = 2048 + 256;  // 128 columns of 8 tokens, and sums of 16 columns in two parts
constexpr int X_BLOCKS = COLS / 128;
constexpr int STEP_BYTES = BAND * UNIT_BYTES;
constexpr int STAGE_BYTES = STEP_BYTES + TOKEN_TILES * X_BLOCKS * X_TILE_BYTES;
// Behind the stages there is room for this many tiles of a strip for each warp.
constexpr int SWAP_TILES = TOKEN_TILES < 4 ? TOKEN_TILES : 4;
constexpr int SLOT = NUM_WARPS * TOKEN_TILES * 32;  // vectors that a block leaves of a band: [strip][tile][lane]
static_assert(STRIPS == 2, "a strip for each of two warps");

// How warps tell each other that they are done with a stage: what they loaded was used before they count.
// How blocks do: what a warp wrote before one of its lanes counts is there for the warp that sees the sum.
#ifndef EMULATED
DEV u32 count_up(u32* counter) {  // in shared memory
  u32 before;
  asm volatile("atom.add.relaxed.cta.shared.u32 %0, [%1], 1;" : "=r"(before) : "r"(shared_address(counter)) : "memory");
  return before;
}

DEV u32 count_up_globally(u32* counter) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}
#else
DEV u32 count_up(u32* counter) { return atomicAdd(counter, 1u); }
DEV u32 count_up_globally(u32* counter) { return atomicAdd(counter, 1u); }
#endif

struct Problem {
  const u8* weights;         // [band][chunk][tile] units
  const float* row_scale;    // [rows], used where weights are 16-bit floats
  const u8* x;               // [cols / 128][x_tiles] X_TILE_BYTES
  const float* token_scale;  // [tokens]
  float* out;                // [tokens][out_stride]
  const float* bias;         // [rows] or null
  float4* partial;           // [blocks][2] slots
  u32* arrived;              // [strips], zero between launches
  int first_token, num_rows, num_bands, num_chunks, x_tiles, out_stride, add_to_out;
};

DEV float4 add4(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// Two warps add up their halves of the columns and share out the strips: the first has the first.
DEV void swap_strips(const float (*acc)[TOKEN_TILES][4], float4* room, float4* v) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float4 *own = room + warp * SWAP_TILES * 32 + lane, *other = room + (warp ^ 1) * SWAP_TILES * 32 + lane;
#pragma unroll
  for (int first = 0; first < TOKEN_TILES; first += SWAP_TILES) {
#pragma unroll
    for (int n = first; n < min(first + SWAP_TILES, TOKEN_TILES); n++) {
      const float *a = acc[0][n], *b = acc[1][n];
      const float4 kept = make_float4(a[0], a[1], a[2], a[3]), given = make_float4(b[0], b[1], b[2], b[3]);
      v[n] = warp & 1 ? given : kept;
      other[(n - first) * 32] = warp & 1 ? kept : given;
    }
    meet_some(1 + warp / 2, 64);
#pragma unroll
    for (int n = first; n < min(first + SWAP_TILES, TOKEN_TILES); n++) v[n] = add4(v[n], own[(n - first) * 32]);
    meet_some(1 + warp / 2, 64);
  }
}

// The host sees to it that steps times blocks fit into 32 bits.
DEV u32 first_step(u32 block, u32 num_steps) { return block * num_steps / gridDim.x; }
DEV u32 block_of(u32 step, u32 num_steps) { return ((step + 1) * gridDim.x - 1) / num_steps; }

// The blocks that share a band: head to tail, in the order of the columns.
struct Sharers {
  u32 head, tail, head_slot;
};

DEV Sharers sharers_of(u32 band, u32 num_bands, u32 num_chunks) {
  const u32 num_steps = num_bands * num_chunks, start = band * num_chunks;
  const u32 head = block_of(start, num_steps);
  // A block's first band uses its slot 0, its last one slot 1.
  return {head, block_of(start + num_chunks - 1, num_steps), head * 2 + (first_step(head, num_steps) < start)};
}

// Where a block's part of this warp's strip lies.
DEV float4* part_of(const Problem& p, const Sharers& by, u32 block) {
  return p.partial + (block == by.head ? by.head_slot : block * 2) * SLOT + (threadIdx.x >> 5) * TOKEN_TILES * 32 + (threadIdx.x & 31);
}

// Leaves this block's part of a strip for the last one to come; true for that one.
DEV bool publish_part(const Problem& p, u32 strip, const Sharers& by, const float4* v) {
  float4* to = part_of(p, by, blockIdx.x);
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) __stcg(to + n * 32, v[n]);
  __syncwarp();
  u32 before = 0;
  if (threadIdx.x % 32 == 0) before = count_up_globally(p.arrived + strip);
  before = __shfl_sync(~0u, before, 0);
  __syncwarp();
  return before == by.tail - by.head;
}

// Sums the parts of a strip in the order of the columns, all of which have come.
DEV void add_parts(const Problem& p, u32 strip, const Sharers& by, float4* v) {
  constexpr int AHEAD = TOKEN_TILES < 3 ? 2 : 1;  // parts on their way
  if (threadIdx.x % 32 == 0) p.arrived[strip] = 0;
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) v[n] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
  const float4* from = part_of(p, by, by.head);
  int step = ((by.head + 1) * 2 - by.head_slot) * SLOT;
#pragma unroll 1
  for (int left = by.tail - by.head + 1; left > 0; left -= AHEAD) {
    float4 part[AHEAD][TOKEN_TILES];
#pragma unroll
    for (int a = 0; a < AHEAD; a++) {
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
        if (a < left) part[a][n] = __ldcg(from + n * 32);
      from += step, step = 2 * SLOT;
    }
#pragma unroll
    for (int a = 0; a < AHEAD; a++)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
        if (a < left) v[n] = add4(v[n], part[a][n]);
  }
}

// Calls f(vector, part of it, row, token) for what a lane has of a strip, as far as it counts.
template <class F>
DEV void each_result(const Problem& p, u32 strip, int live, F f) {
  const int first_row = strip * 16 + threadIdx.x % 32 / 4, first_token = threadIdx.x % 4 * 2;
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const int row = first_row + (i >> 1) * 8, token = first_token + n * 8 + (i & 1);
      if (row < p.num_rows && token < live) f(n, i, row, token);
    }
}

// Ends a band for one warp, whose strip's part v is.
DEV void finish_strip(const Problem& p, u32 band, const Sharers& by, int live, const float* token_scale, float4* v) {
  const u32 strip = band * NUM_WARPS + threadIdx.x / 32;
  if (by.head != by.tail && !publish_part(p, strip, by, v)) return;
  float old[TOKEN_TILES][4];
  float* out = p.out + static_cast<u64>(p.first_token) * p.out_stride;
  if (p.add_to_out)
    each_result(p, strip, live, [&](int n, int i, int row, int token) { old[n][i] = out[static_cast<u64>(token) * p.out_stride + row]; });
  if (by.head != by.tail) add_parts(p, strip, by, v);
  each_result(p, strip, live, [&](int n, int i, int row, int token) {
    const float y = i == 0 ? v[n].x : i == 1 ? v[n].y : i == 2 ? v[n].z : v[n].w;
    float sum = __fmul_rn(__fmul_rn(y, BITS == 16 ? __ldg(p.row_scale + row) : OPERAND_UNIT), token_scale[token]);
    if (p.bias) sum = __fadd_rn(sum, __ldg(p.bias + row));
    out[static_cast<u64>(token) * p.out_stride + row] = p.add_to_out ? __fadd_rn(old[n][i], sum) : sum;
  });
}

// Sums of many tokens leave no registers for the operands of several groups.
constexpr int GROUP_UNROLL = TOKEN_TILES > 4 ? 1 : GROUPS;

// Where a lane finds its part of a stage; the compiler keeps it, since it cannot know what comes out of a shuffle.
struct Offsets {
  Place place;
  int x, sums;
};

DEV int keep(int v) { return __shfl_sync(~0u, v, threadIdx.x & 31); }

DEV Offsets find_offsets() {
  const int lane = threadIdx.x & 31, half = threadIdx.x >> 5 & 1, first_strip = (threadIdx.x >> 6) * STRIPS;
  const int unit = first_strip / 8 * UNIT_BYTES;
  Place p = place_in_unit(first_strip % 8, half, lane);
  p.low = keep(unit + p.low), p.scale = keep(unit + p.scale), p.super = keep(unit + p.super), p.min = keep(unit + p.min);
  if (HIGH_BYTES) p.high = keep(unit + p.high);
  const int column = half * HALF_COLS;
  const int x = STEP_BYTES + column / 128 * TOKEN_TILES * X_TILE_BYTES + column % 128 / 32 * 512 + lane * 16;
  // The first half takes the leading bits of the sums of activations, the second the rest.
  return {p, keep(x), keep(STEP_BYTES + 2048 + half * 128 + lane * 4)};
}

// One warp: STRIPS strips by half the columns of a unit. Token tiles that are not live give sums that nobody reads.
DEV void multiply_unit(const u8* stage, const Offsets& at, u32 magic, float (*acc)[TOKEN_TILES][4]) {
  Scales scales[STRIPS];
  Place place[STRIPS];
#pragma unroll
  for (int m = 0; m < STRIPS; m++) {
    const Place& p = at.place;
    place[m] = {p.low + m * STRIP_LOW, p.high + m * STRIP_HIGH, p.scale + m * STRIP_SCALE, p.super + m * STRIP_SUPER,
                p.min + m * STRIP_MIN};
    scales[m] = load_scales(stage, place[m]);
  }
  float whole[STRIPS][TOKEN_TILES][4];  // sums over all groups, where scales are in the operands
#pragma unroll GROUP_UNROLL
  for (int group = 0; group < GROUPS; group++) {
    u32 a[STRIPS][2][4];
#pragma unroll
    for (int m = 0; m < STRIPS; m++)
      if (HAS_BYTES)
        load_scaled_operands(stage, place[m], scales[m], group, magic, a[m]);
      else
        load_operands(stage, place[m], scales[m], group, a[m]);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
      uint4 b = *reinterpret_cast<const uint4*>(stage + at.x + group * 512 + n * X_TILE_BYTES);
      if (BITS == 8) b.x = hmul2(b.x, 0x2C002C00u), b.z = hmul2(b.z, 0x2C002C00u);
#pragma unroll
      for (int m = 0; m < STRIPS; m++) {
        float* c = FORMAT == F16 ? acc[m][n] : whole[m][n];
        if (FORMAT != F16 && (group == 0 || !HAS_BYTES))
          mma_new(c, a[m][0], b.x, b.y);
        else
          mma(c, a[m][0], b.x, b.y);
        mma(c, a[m][1], b.z, b.w);
        if (HAS_BYTES || FORMAT == F16) continue;
#pragma unroll
        for (int i = 0; i < 4; i++) acc[m][n][i] = __fmaf_rn(c[i], group_scale(scales[m], 0.0f, i >> 1, group, 0), acc[m][n][i]);
      }
    }
  }
#pragma unroll
  for (int m = 0; m < STRIPS; m++) {
    const Supers super = load_supers(stage, place[m]);
#pragma unroll
    for (int n = 0; HAS_BYTES && n < TOKEN_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m][n][i] = __fmaf_rn(whole[m][n][i], super.scale[i >> 1], acc[m][n][i]);
    u32 a[4];
    if (HAS_OFFSET) load_min_operands(stage, place[m], threadIdx.x, a);
    const float factor[2] = {min_factor(super.min[0]), min_factor(super.min[1])};
#pragma unroll
    for (int n = 0; HAS_OFFSET && n < TOKEN_TILES; n++) {
      const u32* sums = reinterpret_cast<const u32*>(stage + at.sums + n * X_TILE_BYTES);
      float sum[4];
      if (COLS == 128)
        mma_new_short(sum, a, *sums);
      else
        mma_new(sum, a, *sums, sums[TOKEN_TILES * X_TILE_BYTES / 4]);
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m][n][i] = __fmaf_rn(sum[i], factor[i >> 1], acc[m][n][i]);
    }
  }
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
    copy_async(stages + stage * STAGE_BYTES, p.weights + static_cast<u64>(begin + i) * STEP_BYTES, STEP_BYTES, full + stage);
  }

  DEV_MEMBER void copy_x(u32 i, u32 band) {
    u32 chunk = begin + i - band * p.num_chunks;
    while (chunk >= p.num_chunks) chunk -= p.num_chunks;
    u8* to = stages + i % STAGES * STAGE_BYTES + STEP_BYTES;
    const u8* from = p.x + static_cast<u64>(chunk * X_BLOCKS * p.x_tiles + p.first_token / 8) * X_TILE_BYTES;
#pragma unroll
    for (int b = 0; b < X_BLOCKS; b++)
      copy_async(to + b * TOKEN_TILES * X_TILE_BYTES, from + b * p.x_tiles * X_TILE_BYTES, x_bytes, full + i % STAGES);
  }

  // Refills the stage of step i, which must be empty; band is that of the next step or an earlier one.
  DEV_MEMBER void refill(u32 i, u32 band) {
    if (i + STAGES < count) copy_weights(i + STAGES), copy_x(i + STAGES, band);
  }
};

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
    linear_kernel(const u8* weights, const float* row_scale, const u8* x, const float* token_scale, float* out,
                  const float* bias, float4* partial, u32* arrived, const int* live_count, int num_tokens, int first_token,
                  int num_rows, int num_bands, int num_chunks, int x_tiles, int out_stride, int add_to_out) {
  const Problem p = {weights,     row_scale, x,         token_scale, out,     bias,       partial,   arrived,
                     first_token, num_rows,  num_bands, num_chunks,  x_tiles, out_stride, add_to_out};
  extern __shared__ __align__(128) u8 stages[];
  __shared__ u64 full[STAGES];
  __shared__ u32 num_left[STAGES];  // how many times a warp has left the stage
  __shared__ float scales[TOKEN_TILES * 8];
  __shared__ int live;            // tokens that count
  __shared__ u32 shared_magic;    // MAGIC in a way that keeps the compiler from seeing a constant: it stays in a register
  __shared__ Sharers sharers[2];  // of the first and the last band; those between belong to this block alone
  const u32 num_steps = num_bands * num_chunks, begin = first_step(blockIdx.x, num_steps);
  const u32 count = first_step(blockIdx.x + 1, num_steps) - begin;
  Feeder feeder = {p, stages, full, begin, count, min(TOKEN_TILES, x_tiles - first_token / 8) * X_TILE_BYTES};
  let_later_grids_start();
  if (threadIdx.x == 0) {
    shared_magic = MAGIC | num_rows >> 31;
    for (int i = 0; i < STAGES; i++) init_barrier(full + i, 1), num_left[i] = 0;
    publish_barriers();
  }
  // Weights never change, so the first of them need not wait for earlier grids.
  const bool starts = !BULK || threadIdx.x == 0;
  for (u32 i = 0; starts && i < min(STAGES, count); i++) feeder.copy_weights(i);
  const Offsets offsets = find_offsets();
  const u32 first_band = begin / num_chunks;
  if (threadIdx.x / 2 == 16) {  // two threads of the second warp
    const u32 which = threadIdx.x & 1, last_band = (begin + count - 1) / num_chunks;
    sharers[which] = sharers_of(which ? last_band : first_band, num_bands, num_chunks);
  }
  __syncthreads();
  wait_for_earlier_grids();
  for (u32 i = 0; i < STAGES; i++) {
    if (starts && i < count) feeder.copy_x(i, first_band);
    end_stage_copy();
  }
  if (threadIdx.x == 0) live = min(num_tokens, (live_count ? *live_count : first_token + num_tokens) - first_token);
  if (threadIdx.x < num_tokens) scales[threadIdx.x] = token_scale[first_token + threadIdx.x];
  __syncthreads();
  const u32 magic = shared_magic;
  u32 band = first_band, left = (first_band + 1) * num_chunks - begin, turn = 0, parity = 0;
  float acc[STRIPS][TOKEN_TILES][4] = {};
  for (u32 i = 0; i < count; i++) {
#if BULK
    wait_barrier(full + turn, parity);
#else
    meet_at_stage<STAGES - 1>();
#endif
    __syncwarp();
    multiply_unit(stages + turn * STAGE_BYTES, offsets, magic, acc);
#if BULK
    __syncwarp();
    // The last warp to leave a stage refills it.
    if (threadIdx.x % 32 == 0 && count_up(num_left + turn) % NUM_WARPS == NUM_WARPS - 1) feeder.refill(i, band);
#endif
    if (--left == 0 || i + 1 == count) {
      float4 v[TOKEN_TILES];
      swap_strips(acc, reinterpret_cast<float4*>(stages + STAGES * STAGE_BYTES), v);
      Sharers by = {blockIdx.x, blockIdx.x, 0};
      if (band == first_band || i + 1 == count) by = sharers[band != first_band];
      finish_strip(p, band, by, live, scales, v);
      band++, left = num_chunks;
#pragma unroll
      for (int m = 0; m < STRIPS; m++)
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
          for (int c = 0; c < 4; c++) acc[m][n][c] = 0.0f;
    }
#if !BULK
    __syncthreads();
    feeder.refill(i, band);
    end_stage_copy();
#endif
    if (++turn == STAGES) turn = 0, parity ^= 1;
  }
}
