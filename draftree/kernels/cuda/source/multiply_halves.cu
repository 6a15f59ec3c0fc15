// A step with activations as 16-bit floats. A warp has two strips of 16 rows and one half of the columns; at the end of a
// band it swaps a strip with the warp that has the other half.
constexpr int STRIPS = 2, OWN_STRIPS = 1;  // in a step, at the end of a band
constexpr int NUM_WARPS = NUM_STRIPS;
constexpr int BLOCKS_AN_SM = 16 / NUM_WARPS;
constexpr int X_TILE_BYTES = 2048 + 128;  // 128 columns of 8 tokens, and sums of 32 columns in two parts
constexpr float RESULT_UNIT = OPERAND_UNIT;
constexpr bool HAS_TOKEN_SCALE = true;
// Behind the stages there is room for this many tiles of a strip for each warp.
constexpr int SWAP_TILES = TOKEN_TILES < 4 ? TOKEN_TILES : 4;
constexpr int SWAP_BYTES = NUM_WARPS * SWAP_TILES * 512;

// Two warps add up their halves of the columns: each has one strip of its own, and gives the other its sums of the other's.
DEV void store_sums(const float (*acc)[TOKEN_TILES][4], float4* room, float4* to) {
  const int warp = threadIdx.x >> 5, lane = threadIdx.x & 31;
  float4 *own = room + warp * SWAP_TILES * 32 + lane, *other = room + (warp ^ 1) * SWAP_TILES * 32 + lane;
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) {
    const float* given = acc[1][n];
    other[n % SWAP_TILES * 32] = make_float4(given[0], given[1], given[2], given[3]);
    if ((n + 1) % SWAP_TILES && n + 1 < TOKEN_TILES) continue;
    meet_some(1 + warp / 2, 64);
#pragma unroll
    for (int i = n / SWAP_TILES * SWAP_TILES; i <= n; i++) {
      const float* kept = acc[0][i];
      __stcg(to + i * 32, add4(make_float4(kept[0], kept[1], kept[2], kept[3]), own[i % SWAP_TILES * 32]));
    }
    meet_some(1 + warp / 2, 64);
  }
}

// Sums of many tokens leave no registers for the operands of several groups.
constexpr int GROUP_UNROLL = TOKEN_TILES > 4 ? 1 : GROUPS;

// Where a lane finds its part of a stage, for its own strip and for the other warp's.
struct Offsets {
  Place place[STRIPS];
  int x, sums;
};

DEV Offsets find_offsets() {
  const int lane = threadIdx.x & 31, half = threadIdx.x >> 5 & 1, first_strip = (threadIdx.x >> 6) * STRIPS;
  const int unit = first_strip / 8 * UNIT_BYTES;
  Offsets at;
#pragma unroll
  for (int m = 0; m < STRIPS; m++) {
    const Place p = place_in_unit(first_strip % 8 + (m ^ half), half, lane);
    at.place[m] = {keep(unit + p.low), HIGH_BYTES ? keep(unit + p.high) : 0, keep(unit + p.scale), keep(unit + p.super), keep(unit + p.min)};
  }
  const int column = half * HALF_COLS;
#if OWN_ROW
  at.x = keep(column / 32 * 64 + lane % 4 * 16);
  at.sums = keep(lane % 4 * 4);
#else
  at.x = keep(STEP_BYTES + column / 128 * TOKEN_TILES * X_TILE_BYTES + column % 128 / 32 * 512 + lane * 16);
  at.sums = keep(STEP_BYTES + 2048 + lane * 4);
#endif
  return at;
}

// Where activations of a step begin: halves, and sums.
struct Input {
  const u8 *x, *sums;

  DEV_MEMBER uint4 halves(const Offsets& at, int group, int n) const {
#if OWN_ROW
    if (threadIdx.x % 32 >= 4) return make_uint4(0, 0, 0, 0);  // other tokens
    return *reinterpret_cast<const uint4*>(x + at.x + group * 64);
#else
    return *reinterpret_cast<const uint4*>(x + at.x + group * 512 + n * X_TILE_BYTES);
#endif
  }

  DEV_MEMBER u32 sum(const Offsets& at, int i) const {
#if OWN_ROW
    return threadIdx.x % 32 < 4 ? *reinterpret_cast<const u32*>(sums + at.sums + i * 16) : 0;
#else
    return *reinterpret_cast<const u32*>(sums + at.sums + i * X_TILE_BYTES);
#endif
  }
};

DEV Input input_of_stage(const u8* stage) { return {stage, stage}; }

// The part of an own row that goes with a chunk: [cols / 128][4 groups][t] 8 halves, then [cols / 32] sums.
DEV Input input_of_row(const u8* row, int padded_cols, u32 chunk) {
  return {row + chunk * COLS * 2, row + padded_cols * 2 + chunk * (COLS / 8)};
}

// One warp: STRIPS strips by half the columns of a unit, and minima for all columns, but for its own strip alone. Calls
// leave when the stage has been read. Token tiles that are not live give sums that nobody reads.
template <class F>
DEV void multiply_unit(const u8* stage, const Input& input, const Offsets& at, u32 magic, float (*acc)[TOKEN_TILES][4], F leave) {
  Scales scales[STRIPS];
#pragma unroll
  for (int m = 0; m < STRIPS; m++) scales[m] = load_scales(stage, at.place[m]);
  float whole[STRIPS][TOKEN_TILES][4];  // sums over all groups, where scales are in the operands
#pragma unroll GROUP_UNROLL
  for (int group = 0; group < GROUPS; group++) {
    u32 a[STRIPS][2][4];
#pragma unroll
    for (int m = 0; m < STRIPS; m++)
      if (HAS_BYTES)
        load_scaled_operands(stage, at.place[m], scales[m], group, magic, a[m]);
      else
        load_operands(stage, at.place[m], scales[m], group, a[m]);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
      uint4 b = input.halves(at, group, n);
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
  Supers super[STRIPS];
  u32 minima[4], sums[TOKEN_TILES][2];
#pragma unroll
  for (int m = 0; m < STRIPS; m++) super[m] = load_supers(stage, at.place[m]);
  if (HAS_OFFSET) load_min_operands(stage, at.place[0], threadIdx.x, minima);
#pragma unroll
  for (int i = 0; HAS_OFFSET && i < TOKEN_TILES * X_BLOCKS; i++)
    sums[i % TOKEN_TILES][i / TOKEN_TILES] = input.sum(at, i);
  leave();
#pragma unroll
  for (int m = 0; HAS_BYTES && m < STRIPS; m++)
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
      for (int i = 0; i < 4; i++) acc[m][n][i] = __fmaf_rn(whole[m][n][i], super[m].scale[i >> 1], acc[m][n][i]);
  const float factor[2] = {min_factor(super[0].min[0]), min_factor(super[0].min[1])};
#pragma unroll
  for (int n = 0; HAS_OFFSET && n < TOKEN_TILES; n++) {
    float sum[4];
    if (COLS == 128)
      mma_new_short(sum, minima, sums[n][0]);
    else
      mma_new(sum, minima, sums[n][0], sums[n][1]);
#pragma unroll
    for (int i = 0; i < 4; i++) acc[0][n][i] = __fmaf_rn(sum[i], factor[i >> 1], acc[0][n][i]);
  }
}
