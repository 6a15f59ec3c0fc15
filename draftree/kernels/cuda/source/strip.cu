// What products have in common, whatever their activations are: the shape of a step, and small helpers.
#ifndef OWN_ROW
#define OWN_ROW 0
#endif
constexpr int BAND_ROWS = BAND * ROWS;
constexpr int NUM_WARPS = BAND_ROWS / 16;  // each has a strip of 16 rows
constexpr int BLOCKS_AN_SM = 16 / NUM_WARPS;
constexpr int X_BLOCKS = COLS / 128;
constexpr int X_TILE_BYTES = 2048 + 128;  // 128 columns of 8 tokens, and sums of 32 columns in two parts
constexpr int STEP_BYTES = BAND * UNIT_BYTES;
static_assert(!OWN_ROW || TOKEN_TILES == 1, "a row is one token");

// The compiler keeps v in a register, since it cannot know what comes out of a shuffle.
DEV int keep(int v) { return __shfl_sync(~0u, v, threadIdx.x & 31); }

// Where in a stage a lane finds its strip; the second half of the columns lies so much further.
constexpr int HALF_HIGH = 256, HALF_SCALE = 64 * SCALE_WORDS;

DEV Place own_place() {
  const int strip = threadIdx.x >> 5, unit = strip / 8 * UNIT_BYTES;
  const Place p = place_in_unit(strip % 8, 0, threadIdx.x & 31);
  return {keep(unit + p.low), HIGH_BYTES ? keep(unit + p.high) : 0, keep(unit + p.scale), keep(unit + p.super), keep(unit + p.min)};
}

DEV Place in_half(const Place& p, int half) {
  return {p.low + half * LOW_HALF, p.high + half * HALF_HIGH, p.scale + half * HALF_SCALE, p.super, p.min};
}

DEV void load_group(const u8* stage, const Place& at, const Scales& scales, int group, u32 magic, u32 (*a)[4]) {
  if (HAS_BYTES)
    load_scaled_operands(stage, at, scales, group, magic, a);
  else
    load_operands(stage, at, scales, group, a);
}

// acc += sums times the factors of rows g and g + 8.
DEV void add_scaled(const float (*sums)[4], const float* factor, float (*acc)[4]) {
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) acc[n][i] = __fmaf_rn(sums[n][i], factor[i >> 1], acc[n][i]);
}
