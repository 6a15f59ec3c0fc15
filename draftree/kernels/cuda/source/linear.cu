// out[token][row] (+)= weights[row][:] . x[token][:] (+ bias[row]) for up to 8 * TOKEN_TILES tokens.
//
// BAND row tiles make a band; bands are worked on in steps of COLS columns, one unit of each tile. All steps of the
// matrix, band by band, are shared out evenly among the blocks, in order; a block streams its share through the
// ring. The shares depend on the matrix alone. A band that several blocks share is summed by the last of them to
// finish, in the order of the columns. So the bits of a token's results do not depend on the other tokens.
// A warp has STRIPS strips of 16 rows and one half of the columns.
constexpr int STRIPS = 2;
constexpr int BAND_ROWS = BAND * ROWS;
constexpr int NUM_WARPS = BAND_ROWS / 16 * 2 / STRIPS;
constexpr int THREADS = NUM_WARPS * 32;
constexpr int X_TILE_BYTES = 2048 + 256;  // 128 columns of 8 tokens, and sums of 16 columns in two parts
constexpr int X_BLOCKS = COLS / 128;
constexpr int STEP_BYTES = BAND * UNIT_BYTES;
// At the end of a band a used stage holds its results: [token][SUM_STRIDE] floats, padded against bank conflicts.
constexpr int SUM_STRIDE = BAND_ROWS + 4;
constexpr int SUM_BYTES = TOKEN_TILES * 8 * SUM_STRIDE * 4;
constexpr int INPUT_BYTES = STEP_BYTES + TOKEN_TILES * X_BLOCKS * X_TILE_BYTES;
constexpr int STAGE_BYTES = INPUT_BYTES > SUM_BYTES ? INPUT_BYTES : SUM_BYTES;
// Then a thread has four rows of one token in eight: vectors n * THREADS + thread of a slot are its own.
constexpr int ROW_THREADS = BAND_ROWS / 4;
constexpr int SLOT = TOKEN_TILES * THREADS;
static_assert(THREADS == ROW_THREADS * 8, "a thread of a row has each eighth token");

// How warps, and blocks, tell each other that they are done: what a thread, and those it met before, read or wrote before
// it counts is done for the thread that sees the sum, and those it meets after.
#ifndef EMULATED
DEV u32 count_up(u32* counter) {  // in shared memory
  u32 before;
  asm volatile("atom.add.acq_rel.cta.shared.u32 %0, [%1], 1;" : "=r"(before) : "r"(shared_address(counter)) : "memory");
  return before;
}

DEV u32 count_up_globally(u32* counter) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(counter) : "memory");
  return before;
}

DEV u32 read_count(const u32* counter) {
  u32 n;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(n) : "l"(counter) : "memory");
  return n;
}
#else
DEV u32 count_up(u32* counter) { return atomicAdd(counter, 1u); }
DEV u32 count_up_globally(u32* counter) { return atomicAdd(counter, 1u); }
DEV u32 read_count(const u32* counter) { return *counter; }
#endif

struct Problem {
  const u8* weights;         // [band][chunk][tile] units
  const float* row_scale;    // [rows], used where weights are 16-bit floats
  const u8* x;               // [cols / 128][x_tiles] X_TILE_BYTES
  const float* token_scale;  // [tokens]
  float* out;                // [tokens][out_stride]
  const float* bias;         // [rows] or null
  float4* partial;           // [blocks][2] slots
  u32* arrived;              // [bands], zero between launches
  int first_token, num_rows, num_bands, num_chunks, x_tiles, out_stride, add_to_out;
};

// Adds up the two halves of the columns; `sums` then holds the block's part of the band.
DEV void add_halves(float (*acc)[TOKEN_TILES][4], float* sums) {
  const int lane = threadIdx.x & 31, half = threadIdx.x >> 5 & 1, first_strip = (threadIdx.x >> 6) * STRIPS;
  float* first = sums + (lane & 3) * 2 * SUM_STRIDE + first_strip * 16 + (lane >> 2);
#pragma unroll
  for (int turn = 1; turn >= 0; turn--) {
    __syncthreads();
    if (half == turn) {
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
        for (int m = 0; m < STRIPS; m++)
#pragma unroll
          for (int i = 0; i < 4; i++) {
            float* at = first + (n * 8 + (i & 1)) * SUM_STRIDE + m * 16 + (i >> 1) * 8;
            *at = turn ? acc[m][n][i] : __fadd_rn(acc[m][n][i], *at);
          }
    }
  }
  __syncthreads();
}

// This thread's vectors of the block's part.
DEV void load_sums(const float* sums, float4* v) {
  const float* first = sums + threadIdx.x / ROW_THREADS * SUM_STRIDE + threadIdx.x % ROW_THREADS * 4;
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) v[n] = *reinterpret_cast<const float4*>(first + n * 8 * SUM_STRIDE);
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

DEV float4* own_slot(const Problem& p, const Sharers& by, u32 block) {
  return p.partial + (block == by.head ? by.head_slot : block * 2) * SLOT + threadIdx.x;
}

// Leaves this block's part for the last one to come. Only thread 0 waits for that to be done, and gets how many came before.
DEV u32 publish_part(const Problem& p, u32 band, const Sharers& by, const float4* v) {
  float4* to = own_slot(p, by, blockIdx.x);
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) __stcg(to + n * THREADS, v[n]);
  __syncthreads();
  return threadIdx.x ? 0 : count_up_globally(p.arrived + band);
}

// Sums the parts of a band in the order of the columns; v is this block's own. Thread 0 has seen that all have come.
// Every thread brings its own vectors to shared memory first, as many at once as there is room for in the ring.
DEV void add_parts(const Problem& p, u32 band, const Sharers& by, u8* ring, float4* v) {
  constexpr int AHEAD = STAGES * STAGE_BYTES / (SLOT * 16);
  float4* room = reinterpret_cast<float4*>(ring) + threadIdx.x;
  if (threadIdx.x == 0) p.arrived[band] = 0;
  __syncthreads();
  float4 sum[TOKEN_TILES];
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) sum[n] = make_float4(-0.0f, -0.0f, -0.0f, -0.0f);
#pragma unroll 1
  for (u32 first = by.head; first <= by.tail; first += AHEAD) {
    const u32 end = min(first + AHEAD, by.tail + 1);
#pragma unroll 1
    for (u32 block = first; block < end; block++)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++)
        if (block != blockIdx.x) copy16_async(room + (block - first) * SLOT + n * THREADS, own_slot(p, by, block) + n * THREADS);
    commit_copies();
    wait_copies<0>();
#pragma unroll 1
    for (u32 block = first; block < end; block++)
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++) {
        const float4 part = block == blockIdx.x ? v[n] : room[(block - first) * SLOT + n * THREADS];
        sum[n].x = __fadd_rn(sum[n].x, part.x), sum[n].y = __fadd_rn(sum[n].y, part.y);
        sum[n].z = __fadd_rn(sum[n].z, part.z), sum[n].w = __fadd_rn(sum[n].w, part.w);
      }
  }
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) v[n] = sum[n];
}

// Ends a band, of which v is this block's part: the thread's vectors, summed and scaled, to their places in out.
DEV void finish_band(const Problem& p, u32 band, const Sharers& by, int live, const float* token_scale, u8* ring, float4* v) {
  const int token = threadIdx.x / ROW_THREADS, row = band * BAND_ROWS + threadIdx.x % ROW_THREADS * 4;
  float* to = p.out + static_cast<u64>(p.first_token + token) * p.out_stride + row;
  const u64 stride = static_cast<u64>(p.out_stride) * 8;
  const bool is_whole = row + 4 <= p.num_rows && (reinterpret_cast<u64>(p.out) & 15 | p.out_stride & 3) == 0;
  float4 before[TOKEN_TILES] = {};
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++)
    if (p.add_to_out && is_whole && token + n * 8 < live) before[n] = *reinterpret_cast<const float4*>(to + n * stride);
  if (by.head != by.tail) add_parts(p, band, by, ring, v);
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++, to += stride) {
    if (token + n * 8 >= live) return;
    float y[4] = {v[n].x, v[n].y, v[n].z, v[n].w};
    const float scale = token_scale[token + n * 8], old[4] = {before[n].x, before[n].y, before[n].z, before[n].w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
      if (row + i >= p.num_rows) break;
      y[i] = __fmul_rn(__fmul_rn(y[i], BITS == 16 ? __ldg(p.row_scale + row + i) : OPERAND_UNIT), scale);
      if (p.bias) y[i] = __fadd_rn(y[i], __ldg(p.bias + row + i));
      if (p.add_to_out) y[i] = __fadd_rn(is_whole ? old[i] : to[i], y[i]);
      if (!is_whole) to[i] = y[i];
    }
    if (is_whole) *reinterpret_cast<float4*>(to) = make_float4(y[0], y[1], y[2], y[3]);
  }
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

  // Refills the stage of step i, which must be empty; band is that of step i or an earlier one.
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
  u32 band = first_band;
  if (threadIdx.x / 2 == 16) {  // two threads of the second warp
    const u32 which = threadIdx.x & 1, last_band = (begin + count - 1) / num_chunks;
    sharers[which] = sharers_of(which ? last_band : first_band, num_bands, num_chunks);
  }
  __syncthreads();
  wait_for_earlier_grids();
  for (u32 i = 0; i < STAGES; i++) {
    if (starts && i < count) feeder.copy_x(i, band);
    end_stage_copy();
  }
  if (threadIdx.x == 0) live = min(num_tokens, (live_count ? *live_count : first_token + num_tokens) - first_token);
  if (threadIdx.x < num_tokens) scales[threadIdx.x] = token_scale[first_token + threadIdx.x];
  const u32 magic = shared_magic;
  u32 first_answer = ~0u, turn = 0, parity = 0;
  float acc[STRIPS][TOKEN_TILES][4] = {};
  for (u32 i = 0; i < count; i++) {
    u8* stage = stages + turn * STAGE_BYTES;
    // Asked before the last step is multiplied, so that the answer is there when it is needed.
    const bool is_last = i + 1 == count, is_end = is_last || begin + i + 1 == (band + 1) * num_chunks;
    const u32 seen = is_last && threadIdx.x == 0 ? read_count(arrived + band) : 0;
#if BULK
    wait_barrier(full + turn, parity);
#else
    meet_at_stage<STAGES - 1>();
#endif
    __syncwarp();
    multiply_unit(stage, offsets, magic, acc);
    if (is_end) {
      add_halves(acc, reinterpret_cast<float*>(stage));
      float4 v[TOKEN_TILES];
      load_sums(reinterpret_cast<float*>(stage), v);
      Sharers by = {blockIdx.x, blockIdx.x, 0};
      if (band == first_band || is_last) by = sharers[band != first_band];
      // Other blocks' parts are added at the end of the share, where the ring is free and most parts have come.
      const u32 others = by.tail - by.head;
      bool is_mine = others == 0 || is_last && __syncthreads_or(threadIdx.x == 0 && seen == others);
      if (!is_mine) {
        const u32 before = publish_part(p, band, by, v);
        if (!is_last) first_answer = before;
        is_mine = is_last && __syncthreads_or(threadIdx.x == 0 && before == others);
      }
      if (is_mine) finish_band(p, band, by, live, scales, stages, v);
#pragma unroll
      for (int m = 0; m < STRIPS; m++)
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
          for (int c = 0; c < 4; c++) acc[m][n][c] = 0.0f;
      release_stores();
    }
#if BULK
    __syncwarp();
    // The last warp to leave a stage refills it.
    if (threadIdx.x % 32 == 0 && count_up(num_left + turn) % NUM_WARPS == NUM_WARPS - 1) feeder.refill(i, band);
#else
    __syncthreads();
    feeder.refill(i, band);
    end_stage_copy();
#endif
    band += is_end;
    if (++turn == STAGES) turn = 0, parity ^= 1;
  }
  // Seldom: the other blocks of the first band had come before this one.
  const Sharers by = sharers[0];
  if (!__syncthreads_or(threadIdx.x == 0 && first_answer == by.tail - by.head)) return;
  float4 v[TOKEN_TILES];
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) v[n] = __ldcg(own_slot(p, by, blockIdx.x) + n * THREADS);
  finish_band(p, first_band, by, live, scales, stages, v);
}
