// out[token][row] (+)= weights[row][:] . x[token][:] (+ bias[row]) for up to 8 * TOKEN_TILES tokens.
//
// The units of the matrix, row tile by row tile, are shared out evenly among the blocks, in order; a block
// streams its share through the ring. The share depends on the matrix and the grid alone. A row tile that several
// blocks share is summed by the last of them to finish, in the order of the columns. So the bits of a token's
// results do not depend on the other tokens.
constexpr int X_BYTES = TOKEN_TILES * COLS * 16;
constexpr int TILE_BYTES = TOKEN_TILES * ROWS * 8 * 4;  // a row tile's sums, which a used stage holds at the end
constexpr int STAGE_BYTES = UNIT_BYTES + X_BYTES > TILE_BYTES ? UNIT_BYTES + X_BYTES : TILE_BYTES;
constexpr int X_BLOCKS = COLS / 128;

struct Problem {
  const u8* weights;         // [tile][chunk] units
  const float* row_scale;    // [tile * ROWS]
  const u8* x;               // [cols / 128][x_tiles][4 groups][32 lanes] 8 halves
  const float* token_scale;  // [tokens]
  float* out;                // [tokens][out_stride]
  const float* bias;         // [rows] or null
  float4* partial;           // [blocks][2][TOKEN_TILES][8 warps][32 lanes]
  u32* arrived;              // [tiles], zero between launches
  const int* live;           // number of tokens, or null for all
  int num_tokens, first_token, num_rows, num_tiles, num_chunks, x_tiles, out_stride, add_to_out;
};

DEV void store_strip(const Problem& p, int tile, int strip, int token_tile, int num_live, float4 sum) {
  const float v[4] = {sum.x, sum.y, sum.z, sum.w};
  const int lane = threadIdx.x & 31, g = lane >> 2, t = lane & 3;
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const int row = tile * ROWS + strip * 16 + g + (i >> 1) * 8, token = token_tile * 8 + 2 * t + (i & 1);
    if (row >= p.num_rows || token >= num_live) continue;
    float* to = p.out + static_cast<u64>(p.first_token + token) * p.out_stride + row;
    float y = __fmul_rn(__fmul_rn(v[i], p.row_scale[row]), p.token_scale[p.first_token + token]);
    if (p.bias) y = __fadd_rn(y, p.bias[row]);
    if (p.add_to_out) y = __fadd_rn(*to, y);
    *to = y;
  }
}

// Adds up the two halves of the columns; `shared` then holds the tile, [token tile][strip][lane].
DEV void add_halves(float (*acc)[TOKEN_TILES][4], float4* shared, int rows32, int half, int num_live_tiles) {
#pragma unroll
  for (int turn = 1; turn >= 0; turn--) {
    __syncthreads();
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
      for (int m = 0; m < 2; m++)
        if (half == turn && n < num_live_tiles) {
          float4* at = shared + (n * 8 + rows32 * 2 + m) * 32 + (threadIdx.x & 31);
          const float4 v = turn ? make_float4(0.0f, 0.0f, 0.0f, 0.0f) : *at;
          const float* c = acc[m][n];
          *at = make_float4(c[0] + v.x, c[1] + v.y, c[2] + v.z, c[3] + v.w);
        }
  }
  __syncthreads();
}

DEV u32 first_unit(u32 block, u32 num_units) { return static_cast<u64>(block) * num_units / gridDim.x; }
DEV u32 block_of(u32 unit, u32 num_units) { return ((unit + 1ull) * gridDim.x - 1) / num_units; }

// Writes a finished row tile, or this block's part of it; the last block to come sums the parts in order.
DEV void finish_tile(const Problem& p, int tile, const float4* shared, int num_live) {
  __shared__ bool is_last;
  const int strip = threadIdx.x >> 5, lane = threadIdx.x & 31, num_live_tiles = (num_live + 7) / 8;
  const u32 num_units = p.num_tiles * p.num_chunks, start = tile * p.num_chunks;
  const u32 head = block_of(start, num_units), tail = block_of(start + p.num_chunks - 1, num_units);
  if (head == tail) {
    for (int n = 0; n < num_live_tiles; n++) store_strip(p, tile, strip, n, num_live, shared[(n * 8 + strip) * 32 + lane]);
    return;
  }
  // A block's first tile uses its slot 0, its last one slot 1.
  constexpr int SLOT = TOKEN_TILES * 8 * 32;
  const u32 head_slot = head * 2 + (first_unit(head, num_units) < start);
  const u32 slot = blockIdx.x == head ? head_slot : blockIdx.x * 2;
  for (int n = 0; n < num_live_tiles; n++)
    __stcg(p.partial + slot * SLOT + (n * 8 + strip) * 32 + lane, shared[(n * 8 + strip) * 32 + lane]);
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    is_last = atomicAdd(p.arrived + tile, 1) == tail - head;
    if (is_last) p.arrived[tile] = 0;
  }
  __syncthreads();
  if (!is_last) return;
  __threadfence();
  for (int n = 0; n < num_live_tiles; n++) {
    const float4* part = p.partial + (n * 8 + strip) * 32 + lane;
    float4 sum = __ldcg(part + head_slot * SLOT);
#pragma unroll 4
    for (u32 block = head + 1; block <= tail; block++) {
      const float4 v = __ldcg(part + block * 2 * SLOT);
      sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
    }
    store_strip(p, tile, strip, n, num_live, sum);
  }
}

// One warp: 32 rows by half the columns of a unit, all live token tiles.
DEV void multiply_unit(const u8* unit, const u8* x, int rows32, int half, int num_live_tiles, float (*acc)[TOKEN_TILES][4]) {
  const int lane = threadIdx.x & 31;
  const Scales scales[2] = {load_scales(unit, rows32 * 2, half, lane), load_scales(unit, rows32 * 2 + 1, half, lane)};
#pragma unroll
  for (int group = 0; group < GROUPS; group++) {
    u32 a[2][2][4];
#pragma unroll
    for (int m = 0; m < 2; m++) load_operands(unit, scales[m], rows32 * 2 + m, half, group, lane, a[m]);
    const int column = half * HALF_COLS + group * 32;
    const uint4* xs = reinterpret_cast<const uint4*>(x) + (column / 128 * TOKEN_TILES * 4 + column % 128 / 32) * 32 + lane;
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++)
      if (n == 0 || n < num_live_tiles) {
        const uint4 b = xs[n * 128];
#pragma unroll
        for (int m = 0; m < 2; m++) mma(acc[m][n], a[m][0], b.x, b.y);
#pragma unroll
        for (int m = 0; m < 2; m++) mma(acc[m][n], a[m][1], b.z, b.w);
      }
  }
}

extern "C" __global__ void __launch_bounds__(256, BLOCKS_PER_SM)
    linear_kernel(const u8* weights, const float* row_scale, const u8* x, const float* token_scale, float* out,
                  const float* bias, float4* partial, u32* arrived, const int* live, int num_tokens, int first_token,
                  int num_rows, int num_tiles, int num_chunks, int x_tiles, int out_stride, int add_to_out) {
  const Problem p = {weights,     row_scale, x,         token_scale, out,     bias,       partial,   arrived, live, num_tokens,
                     first_token, num_rows,  num_tiles, num_chunks,  x_tiles, out_stride, add_to_out};
  extern __shared__ __align__(128) u8 stages[];
  __shared__ u64 full[STAGES];
  const int warp = threadIdx.x >> 5, rows32 = warp & 3, half = warp >> 2;
  const bool is_copier = !BULK || threadIdx.x == 0;
  const u32 num_units = p.num_tiles * p.num_chunks;
  const u32 begin = first_unit(blockIdx.x, num_units), count = first_unit(blockIdx.x + 1, num_units) - begin;
  let_later_grids_start();
  if (threadIdx.x == 0) {
    for (int i = 0; i < STAGES; i++) init_barrier(full + i, 2);
    publish_barriers();
  }
  __syncthreads();
  auto copy_unit = [&](u32 i) {
    expect_bytes(full + i % STAGES, UNIT_BYTES);
    copy_async(stages + i % STAGES * STAGE_BYTES, p.weights + static_cast<u64>(begin + i) * UNIT_BYTES, UNIT_BYTES,
               full + i % STAGES);
  };
  if (is_copier)
    for (u32 i = 0; i < min(STAGES - 1, count); i++) copy_unit(i);
  wait_for_earlier_grids();
  const int num_live = min(p.num_tokens, (p.live ? *p.live : p.first_token + p.num_tokens) - p.first_token);
  const int num_live_tiles = max(1, (num_live + 7) / 8);
  auto copy_x = [&](u32 i) {
    expect_bytes(full + i % STAGES, X_BLOCKS * num_live_tiles * 2048);
    for (int b = 0; b < X_BLOCKS; b++) {
      const u64 from = static_cast<u64>((begin + i) % p.num_chunks * X_BLOCKS + b) * p.x_tiles + p.first_token / 8;
      copy_async(stages + i % STAGES * STAGE_BYTES + UNIT_BYTES + b * TOKEN_TILES * 2048, p.x + from * 2048,
                 num_live_tiles * 2048, full + i % STAGES);
    }
  };
  for (u32 i = 0; i < STAGES - 1; i++) {
    if (is_copier && i < count) copy_x(i);
    end_stage_copy();
  }
  float acc[2][TOKEN_TILES][4] = {};
  u32 tile = begin / p.num_chunks, chunk = begin % p.num_chunks;
  for (u32 i = 0; i < count; i++) {
    u8* stage = stages + i % STAGES * STAGE_BYTES;
    wait_stage_copy<STAGES - 2>(full + i % STAGES, i / STAGES & 1);
    __syncthreads();
    if (is_copier && i + STAGES - 1 < count) copy_unit(i + STAGES - 1), copy_x(i + STAGES - 1);
    end_stage_copy();
    multiply_unit(stage, stage + UNIT_BYTES, rows32, half, num_live_tiles, acc);
    if (++chunk == p.num_chunks || i + 1 == count) {
      float4* shared = reinterpret_cast<float4*>(stage);
      add_halves(acc, shared, rows32, half, num_live_tiles);
      finish_tile(p, tile, shared, num_live);
      release_stage();
#pragma unroll
      for (int m = 0; m < 2; m++)
#pragma unroll
        for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
          for (int c = 0; c < 4; c++) acc[m][n][c] = 0.0f;
      chunk = 0, tile++;
    }
  }
}
