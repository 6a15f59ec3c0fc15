// out[token][row] (+)= weights[row][:] . x[token][:] (+ bias[row]) for up to 8 * TOKEN_TILES tokens.
//
// TILES row tiles make a band; bands are worked on in steps of COLS columns, one unit of each tile. All steps of
// the matrix, band by band, are shared out evenly among the blocks, in order; a block streams its share through the
// ring. The share depends on the matrix and the grid alone. A band that several blocks share is summed by the last of
// them to finish, in the order of the columns. So the bits of a token's results do not depend on the other tokens.
// A warp has STRIPS strips of 16 rows and one half of the columns.
constexpr int STRIPS = 2;
constexpr int BAND_STRIPS = TILES * ROWS / 16;
constexpr int NUM_WARPS = BAND_STRIPS * 2 / STRIPS;
constexpr int THREADS = NUM_WARPS * 32;
constexpr int X_TILE_BYTES = 2048 + 256;  // 128 columns of 8 tokens, and sums of 16 columns in two parts
constexpr int X_BLOCKS = COLS / 128;
constexpr int X_BYTES = TOKEN_TILES * X_BLOCKS * X_TILE_BYTES;
constexpr int STEP_BYTES = TILES * UNIT_BYTES;
constexpr int SLOT = TOKEN_TILES * BAND_STRIPS * 32;  // a band's results in vectors of 4: [token tile][strip][lane]
// At the end of a band a used stage holds its results.
constexpr int STAGE_BYTES = STEP_BYTES + X_BYTES > SLOT * 16 ? STEP_BYTES + X_BYTES : SLOT * 16;
constexpr int SHARE = (SLOT + THREADS - 1) / THREADS;  // vectors a thread

struct Problem {
  const u8* weights;         // [band][tile][chunk] units
  const float* row_scale;    // [rows], used where weights are 16-bit floats
  const u8* x;               // [cols / 128][x_tiles] X_TILE_BYTES
  const float* token_scale;  // [tokens]
  float* out;                // [tokens][out_stride]
  const float* bias;         // [rows] or null
  float4* partial;           // [blocks][2] slots
  u32* arrived;              // [bands], zero between launches
  int num_tokens, first_token, num_rows, num_bands, num_chunks, x_tiles, out_stride, add_to_out;
};

// One vector of sums to its places in out; index as in a slot.
DEV void store_vector(const Problem& p, int band, int index, int live, const float* token_scale, float4 sum) {
  const float v[4] = {sum.x, sum.y, sum.z, sum.w};
  const int lane = index & 31, strip = index / 32 % BAND_STRIPS;
  const int first_token = index / 32 / BAND_STRIPS * 8 + (lane & 3) * 2;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = (band * BAND_STRIPS + strip) * 16 + (lane >> 2) + (i >> 1) * 8, token = first_token + (i & 1);
    if (row >= p.num_rows || token >= live) continue;
    float* to = p.out + static_cast<u64>(p.first_token + token) * p.out_stride + row;
    float y = __fmul_rn(__fmul_rn(v[i], BITS == 16 ? __ldg(p.row_scale + row) : OPERAND_UNIT), token_scale[token]);
    if (p.bias) y = __fadd_rn(y, __ldg(p.bias + row));
    if (p.add_to_out) y = __fadd_rn(*to, y);
    *to = y;
  }
}

// Adds up the two halves of the columns; `shared` then holds the block's part of the band.
DEV void add_halves(float (*acc)[TOKEN_TILES][4], float4* shared, int first_strip, int half) {
#pragma unroll
  for (int turn = 1; turn >= 0; turn--) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
      for (int m = 0; m < STRIPS; m++)
        if (half == turn) {
          float4* at = shared + (n * BAND_STRIPS + first_strip + m) * 32 + (threadIdx.x & 31);
          const float4 v = turn ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *at;
          const float* c = acc[m][n];
          *at = make_float4(c[0] + v.x, c[1] + v.y, c[2] + v.z, c[3] + v.w);
        }
  }
  __syncthreads();
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

DEV void add(float4& sum, float4 v) { sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w; }

// Writes a finished band, or this block's part of it; the last block to come sums the parts in order.
// is_alone: the other blocks, if any, have delivered their parts already.
DEV void finish_band(const Problem& p, u32 band, const Sharers& by, bool is_alone, const float4* shared, int live,
                     const float* token_scale) {
  __shared__ bool is_last;
  const int count = (live + 7) / 8 * BAND_STRIPS * 32, thread = threadIdx.x;
  if (!is_alone) {
    float4* to = p.partial + (blockIdx.x == by.head ? by.head_slot : blockIdx.x * 2) * SLOT;
    for (int i = thread; i < count; i += THREADS) __stcg(to + i, shared[i]);
    __threadfence();
    __syncthreads();
    if (thread == 0) is_last = atomicAdd(p.arrived + band, 1) == by.tail - by.head;
    __syncthreads();
    if (!is_last) return;
  }
  if (by.head != by.tail) __threadfence();
  if (by.head != by.tail && thread == 0) p.arrived[band] = 0;
  // All of a part is asked for at once, as far as registers go; parts follow in the order of the columns.
  constexpr int ROUND = SHARE < 4 ? SHARE : 4;
  for (int first = thread; first < count; first += ROUND * THREADS) {
    float4 sum[ROUND];
#pragma unroll 1
    for (u32 block = by.head; block <= by.tail; block++) {
      const float4* part = p.partial + (block == by.head ? by.head_slot : block * 2) * SLOT;
      float4 v[ROUND];
#pragma unroll
      for (int k = 0; k < ROUND; k++) {
        const int i = min(first + k * THREADS, count - 1);
        v[k] = block == blockIdx.x ? shared[i] : __ldcg(part + i);
      }
#pragma unroll
      for (int k = 0; k < ROUND; k++)
        if (block == by.head)
          sum[k] = v[k];
        else
          add(sum[k], v[k]);
    }
#pragma unroll
    for (int k = 0; k < ROUND; k++)
      if (first + k * THREADS < count) store_vector(p, band, first + k * THREADS, live, token_scale, sum[k]);
  }
}

// Sums of many tokens leave no registers for the operands of several groups.
constexpr int GROUP_UNROLL = TOKEN_TILES > 4 ? 1 : GROUPS;

// One warp: STRIPS strips by half the columns of a unit. Token tiles that are not live give sums that nobody reads.
DEV void multiply_unit(const u8* unit, const u8* x, int first_strip, int half, float (*acc)[TOKEN_TILES][4]) {
  const int lane = threadIdx.x & 31;
  Scales scales[STRIPS];
#pragma unroll
  for (int m = 0; m < STRIPS; m++) scales[m] = load_scales(unit, first_strip + m, half, lane);
#pragma unroll GROUP_UNROLL
  for (int group = 0; group < GROUPS; group++) {
    u32 a[STRIPS][2][4];
#pragma unroll
    for (int m = 0; m < STRIPS; m++) load_operands(unit, scales[m], first_strip + m, half, group, lane, a[m]);
    const int column = half * HALF_COLS + group * 32;
    const u8* xs = x + column / 128 * TOKEN_TILES * X_TILE_BYTES + column % 128 / 32 * 512 + lane * 16;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
      uint4 b = *reinterpret_cast<const uint4*>(xs + n * X_TILE_BYTES);
      if (BITS == 8) b.x = hmul2(b.x, 0x2C002C00u), b.z = hmul2(b.z, 0x2C002C00u);
#pragma unroll
      for (int m = 0; m < STRIPS; m++) {
        if (FORMAT == F16) {
          mma(acc[m][n], a[m][0], b.x, b.y);
          mma(acc[m][n], a[m][1], b.z, b.w);
          continue;
        }
        float sum[2][4];
        mma_new(sum[0], a[m][0], b.x, b.y);
        if (FORMAT == Q6_K)
          mma_new(sum[1], a[m][1], b.z, b.w);
        else
          mma(sum[0], a[m][1], b.z, b.w);
#pragma unroll
        for (int i = 0; i < 4; i++)
#pragma unroll
          for (int step = 0; step <= (FORMAT == Q6_K); step++)
            acc[m][n][i] = __fmaf_rn(sum[step][i], group_scale(scales[m], i >> 1, group, step), acc[m][n][i]);
      }
    }
  }
  if (FORMAT == F16) return;
#pragma unroll
  for (int m = 0; m < STRIPS; m++) {
    u32 a[4];
    load_min_operands(unit, first_strip + m, lane, a);
    const float factor[2] = {min_factor(unit, scales[m], first_strip + m, 0, lane), min_factor(unit, scales[m], first_strip + m, 1, lane)};
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
      // The first half takes the leading bits of the sums of activations, the second the rest.
      const u8* at = x + n * X_TILE_BYTES + 2048 + half * 128 + lane * 4;
      float sum[4];
      if (COLS == 128)
        mma_new_short(sum, a, *reinterpret_cast<const u32*>(at));
      else
        mma_new(sum, a, *reinterpret_cast<const u32*>(at), *reinterpret_cast<const u32*>(at + TOKEN_TILES * X_TILE_BYTES));
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m][n][i] = __fmaf_rn(sum[i], factor[i >> 1], acc[m][n][i]);
    }
  }
}

// Fills the stages in turn: stage i % STAGES with step i of the block's share and the activations for it.
struct Feeder {
  const Problem& p;
  u8* stages;
  u64 *full, *empty;
  u32 begin, count;

  DEV_MEMBER void copy_weights(u32 i) {
    const u32 band = (begin + i) / p.num_chunks, chunk = (begin + i) % p.num_chunks;
    expect_bytes(full + i % STAGES, STEP_BYTES);
    for (int k = 0; k < TILES; k++)
      copy_async(stages + i % STAGES * STAGE_BYTES + k * UNIT_BYTES,
                 p.weights + (static_cast<u64>(band * TILES + k) * p.num_chunks + chunk) * UNIT_BYTES, UNIT_BYTES, full + i % STAGES);
  }

  DEV_MEMBER void copy_x(u32 i, int x_bytes) {
    const u32 chunk = (begin + i) % p.num_chunks;
    u8* to = stages + i % STAGES * STAGE_BYTES + STEP_BYTES;
    expect_bytes(full + i % STAGES, X_BLOCKS * x_bytes);
    for (int b = 0; b < X_BLOCKS; b++) {
      const u64 from = static_cast<u64>(chunk * X_BLOCKS + b) * p.x_tiles + p.first_token / 8;
      copy_async(to + b * TOKEN_TILES * X_TILE_BYTES, p.x + from * X_TILE_BYTES, x_bytes, full + i % STAGES);
    }
  }

  // Refills the stage of step i, which must be empty.
  DEV_MEMBER void refill(u32 i, int x_bytes) {
    if (i + STAGES < count) copy_weights(i + STAGES), copy_x(i + STAGES, x_bytes);
  }

  DEV_MEMBER bool is_empty(u32 i) { return has_ended(empty + i % STAGES, i / STAGES & 1); }
  DEV_MEMBER void wait_empty(u32 i) { wait_barrier(empty + i % STAGES, i / STAGES & 1); }
};

extern "C" __global__ void __launch_bounds__(THREADS, 512 / THREADS)
    linear_kernel(const u8* weights, const float* row_scale, const u8* x, const float* token_scale, float* out,
                  const float* bias, float4* partial, u32* arrived, const int* live_count, int num_tokens, int first_token,
                  int num_rows, int num_bands, int num_chunks, int x_tiles, int out_stride, int add_to_out) {
  const Problem p = {weights,     row_scale, x,         token_scale, out,     bias,       partial,   arrived, num_tokens,
                     first_token, num_rows,  num_bands, num_chunks,  x_tiles, out_stride, add_to_out};
  extern __shared__ __align__(128) u8 stages[];
  __shared__ u64 full[STAGES], empty[STAGES];
  __shared__ float scales[TOKEN_TILES * 8];
  __shared__ Sharers ends[2];  // of the first and the last band; those between belong to this block alone
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31, half = warp & 1, first_strip = (warp >> 1) * STRIPS;
  const u32 num_steps = num_bands * num_chunks;
  const u32 begin = first_step(blockIdx.x, num_steps), count = first_step(blockIdx.x + 1, num_steps) - begin;
  const u32 first_band = begin / num_chunks;
  u32 band = first_band, chunk = begin % num_chunks;
  Feeder feeder = {p, stages, full, empty, begin, count};
  let_later_grids_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) init_barrier(full + i, 2), init_barrier(empty + i, NUM_WARPS);
    publish_barriers();
    ends[0] = sharers_of(first_band, num_bands, num_chunks);
    ends[1] = sharers_of((begin + count - 1) / num_chunks, num_bands, num_chunks);
  }
  __syncthreads();
  // Weights never change, so the first of them need not wait for earlier grids.
  const bool starts = !BULK || threadIdx.x == 0;
  for (u32 i = 0; starts && i < min(STAGES, count); i++) feeder.copy_weights(i);
  wait_for_earlier_grids();
  const int live = min(num_tokens, (live_count ? *live_count : first_token + num_tokens) - first_token);
  const int x_bytes = max(1, (live + 7) / 8) * X_TILE_BYTES;
  for (u32 i = 0; i < STAGES; i++) {
    if (starts && i < count) feeder.copy_x(i, x_bytes);
    end_stage_copy();
  }
  if (threadIdx.x < live) scales[threadIdx.x] = token_scale[first_token + threadIdx.x];
  float acc[STRIPS][TOKEN_TILES][4] = {};
  for (u32 i = 0; i < count; i++) {
    u8* stage = stages + i % STAGES * STAGE_BYTES;
    const bool is_end = ++chunk == num_chunks || i + 1 == count;
    // Asked before the last step is multiplied, so that the answer is there when it is needed.
    const u32 seen = is_end ? __ldcv(arrived + band) : 0;
#if BULK
    // The stage before is refilled when all warps have left it; the warps take turns at that.
    bool must_refill = i > 0 && warp == i % NUM_WARPS && lane == 0;
    if (must_refill && feeder.is_empty(i - 1)) feeder.refill(i - 1, x_bytes), must_refill = false;
    wait_barrier(full + i % STAGES, i / STAGES & 1);
#else
    meet_at_stage<STAGES - 1>();
#endif
    __syncwarp();
    multiply_unit(stage + first_strip / 8 * UNIT_BYTES, stage + STEP_BYTES, first_strip % 8, half, acc);
#if BULK
    if (must_refill) feeder.wait_empty(i - 1), feeder.refill(i - 1, x_bytes);
#endif
    if (is_end) {
      float4* shared = reinterpret_cast<float4*>(stage);
      add_halves(acc, shared, first_strip, half);
      const bool is_first = band == first_band, is_shared = is_first || i + 1 == count;
      const Sharers by = is_shared ? ends[!is_first] : Sharers{blockIdx.x, blockIdx.x, 0};
      finish_band(p, band, by, __syncthreads_and(seen == by.tail - by.head), shared, live, scales);
#pragma unroll
      for (int m = 0; m < STRIPS; m++)
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
          for (int c = 0; c < 4; c++) acc[m][n][c] = 0.0f;
      chunk = 0, band++;
      release_stores();
    }
#if BULK
    __syncwarp();
    if (lane == 0) arrive(empty + i % STAGES);
#else
    __syncthreads();
    feeder.refill(i, x_bytes);
    end_stage_copy();
#endif
  }
}
