// A step with activations as 16-bit floats: a warp has a strip of 16 rows and all columns of a unit.

// Sums of many tokens leave no registers for the operands of several groups.
constexpr int GROUP_UNROLL = TOKEN_TILES > 4 ? 1 : 2 * GROUPS;

// Where a lane finds its part of a stage.
struct Offsets {
  Place place;
  int x, sums;
};

DEV Offsets find_offsets() {
  const int lane = threadIdx.x & 31;
#if OWN_ROW
  return {own_place(), keep(lane % 4 * 16), keep(lane % 4 * 4)};
#else
  return {own_place(), keep(STEP_BYTES + lane * 16), keep(STEP_BYTES + 2048 + lane * 4)};
#endif
}

// Where activations of a step begin: halves, and sums.
struct Input {
  const u8 *x, *sums;

  DEV_MEMBER uint4 halves(const Offsets& at, int group, int n) const {
#if OWN_ROW
    if (threadIdx.x % 32 >= 4) return make_uint4(0, 0, 0, 0);  // other tokens
    return *reinterpret_cast<const uint4*>(x + at.x + group * 64);
#else
    return *reinterpret_cast<const uint4*>(x + at.x + (group / 4 * TOKEN_TILES + n) * X_TILE_BYTES + group % 4 * 512);
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

// One warp: its strip by all columns of a unit. Calls leave when the stage has been read. Token tiles that are not live
// give sums that nobody reads.
template <class F>
DEV void multiply_unit(const u8* stage, const Input& input, const Offsets& at, u32 magic, float (*acc)[4], F leave) {
  const Place place[2] = {at.place, in_half(at.place, 1)};
  const Scales scales[2] = {load_scales(stage, place[0]), load_scales(stage, place[1])};
  float whole[TOKEN_TILES][4];  // sums over all groups, where scales are in the operands
#pragma unroll GROUP_UNROLL
  for (int group = 0; group < 2 * GROUPS; group++) {
    const int half = group / GROUPS;
    u32 a[2][4];
    load_group(stage, place[half], scales[half], group % GROUPS, magic, a);
#pragma unroll
    for (int n = 0; n < TOKEN_TILES; n++) {
      const uint4 b = input.halves(at, group, n);
      float* c = FORMAT == F16 ? acc[n] : whole[n];
      if (FORMAT != F16 && (group == 0 || !HAS_BYTES))
        mma_new(c, a[0], b.x, b.y);
      else
        mma(c, a[0], b.x, b.y);
      mma(c, a[1], b.z, b.w);
      if (HAS_BYTES || FORMAT == F16) continue;
#pragma unroll
      for (int i = 0; i < 4; i++) acc[n][i] = __fmaf_rn(c[i], group_scale(scales[half], 0.0f, i >> 1, group % GROUPS, 0), acc[n][i]);
    }
  }
  u32 minima[4], sums[TOKEN_TILES][2];
  const Supers super = load_supers(stage, at.place);
  if (HAS_OFFSET) load_min_operands(stage, at.place, threadIdx.x, minima);
#pragma unroll
  for (int i = 0; HAS_OFFSET && i < TOKEN_TILES * X_BLOCKS; i++)
    sums[i % TOKEN_TILES][i / TOKEN_TILES] = input.sum(at, i);
  leave();
  if (HAS_BYTES) add_scaled(whole, super.scale, acc);
  const float factor[2] = {min_factor(super.min[0]), min_factor(super.min[1])};
#pragma unroll
  for (int n = 0; HAS_OFFSET && n < TOKEN_TILES; n++) {
    float sum[4];
    if (COLS == 128)
      mma_new_short(sum, minima, sums[n][0]);
    else
      mma_new(sum, minima, sums[n][0], sums[n][1]);
#pragma unroll
    for (int i = 0; i < 4; i++) acc[n][i] = __fmaf_rn(sum[i], factor[i >> 1], acc[n][i]);
  }
}
