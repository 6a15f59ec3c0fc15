// A step with activations as bytes, for formats whose scales are small integers, one for 32 columns: all sums over a unit are
// exact 32-bit integers, and float32 enters once a unit. A warp has a strip of 16 rows and all columns.
//
// Nibbles are bytes after a mask, and those above them after a shift and a mask: so a word of a row is the columns 0, 16, 1,
// 17 and 2, 18, 3, 19, counted from 4t, and activations lie in that order (halves.cu).
constexpr int X_TILE_BYTES = 1024 + 128 + 32;  // 128 columns of 8 tokens, sums of 32 columns in two parts, scales
constexpr float RESULT_UNIT = 1.0f;
constexpr bool HAS_TOKEN_SCALE = false;
constexpr u32 NIBBLES = 0x0F0F0F0Fu;
static_assert(HAS_SUPER_MIN, "scales of this format are not integers for 32 columns");

// Where a lane finds its part of a stage.
struct Offsets {
  Place place;
  int x, sums, scales;
};

DEV Offsets find_offsets() {
  const int lane = threadIdx.x & 31;
  Offsets at;
  at.place = own_place();
#if OWN_ROW
  at.x = keep(lane % 4 * 16), at.sums = keep(lane % 4 * 4), at.scales = 0;
#else
  at.x = keep(STEP_BYTES + lane * 16), at.sums = keep(STEP_BYTES + 1024 + lane * 4);
  at.scales = keep(STEP_BYTES + 1152 + lane % 4 * 8);
#endif
  return at;
}

// Where activations of a step begin: bytes, sums and scales.
struct Input {
  const u8 *x, *sums, *scales;

  // Of 64 columns: two words for each group of 32.
  DEV_MEMBER uint4 bytes(const Offsets& at, int pair, int n) const {
#if OWN_ROW
    if (threadIdx.x % 32 >= 4) return make_uint4(0, 0, 0, 0);  // other tokens
    return *reinterpret_cast<const uint4*>(x + at.x + pair * 64);
#else
    return *reinterpret_cast<const uint4*>(x + at.x + (pair >> 1) * TOKEN_TILES * X_TILE_BYTES + n * X_TILE_BYTES + (pair & 1) * 512);
#endif
  }

  DEV_MEMBER u32 sum(const Offsets& at, int i) const {
#if OWN_ROW
    return threadIdx.x % 32 < 4 ? *reinterpret_cast<const u32*>(sums + at.sums + i * 16) : 0;
#else
    return *reinterpret_cast<const u32*>(sums + at.sums + i * X_TILE_BYTES);
#endif
  }

  // Of the lane's two tokens.
  DEV_MEMBER float2 scale(const Offsets& at, int n) const {
#if OWN_ROW
    const float v = *reinterpret_cast<const float*>(scales);
    return make_float2(v, v);
#else
    return *reinterpret_cast<const float2*>(scales + at.scales + n * X_TILE_BYTES);
#endif
  }
};

DEV Input input_of_stage(const u8* stage) { return {stage, stage, stage}; }

// The part of an own row that goes with a chunk: [cols / 64][t] 16 bytes, [cols / 32] sums, [cols / 256] scales.
DEV Input input_of_row(const u8* row, int padded_cols, u32 chunk) {
  const u8* sums = row + padded_cols;
  return {row + chunk * COLS, sums + chunk * (COLS / 8), sums + padded_cols / 8 + chunk * COLS / 256 * 4};
}

// The left operands of a row's group: a[0] and a[2].
DEV void load_byte_operands(u32 word, u32 high, int group, u32* a) {
#pragma unroll
  for (int odd = 0; odd < 2; odd++) {
    a[odd * 2] = (odd ? word >> 4 : word) & NIBBLES;
    if (BITS == 5) a[odd * 2] |= rotate_right(high, (high_turn(group, 0) + odd * 4) & 31) & 0x10101010u;
  }
}

// One group: the matrix instructions, and their sums times its scales.
DEV void multiply_group(const uint4& low, const uint2& high, const uint2& scales, int group, const uint4* b, int (*sums)[4]) {
  u32 a[4], other[4];
  load_byte_operands(group & 1 ? low.z : low.x, high.x, group, a);
  load_byte_operands(group & 1 ? low.w : low.y, high.y, group, other);
  a[1] = other[0], a[3] = other[2];
  const int scale[2] = {static_cast<int>(__byte_perm(scales.x, 0, 0x4440 | group)), static_cast<int>(__byte_perm(scales.y, 0, 0x4440 | group))};
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) {
    int c[4];
    mma_bytes(c, a, group & 1 ? b[n].z : b[n].x, group & 1 ? b[n].w : b[n].y);
#pragma unroll
    for (int k = 0; k < 4; k++) sums[n][k] += c[k] * scale[k >> 1];
  }
}

// One warp: its strip by all columns of a unit. Calls leave when the stage has been read. Token tiles that are not live
// give sums that nobody reads.
template <class F>
DEV void multiply_unit(const u8* stage, const Input& input, const Offsets& at, u32 magic, float (*acc)[4], F leave) {
  int sums[TOKEN_TILES][4] = {};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const uint2 scales = *reinterpret_cast<const uint2*>(stage + at.place.scale + half * 64);
    uint2 high = {};
    if (HIGH_BYTES) high = *reinterpret_cast<const uint2*>(stage + at.place.high + half * 256);
#pragma unroll
    for (int i = 0; i < GROUPS / 2; i++) {
      const int pair = half * (GROUPS / 2) + i;
      uint4 b[TOKEN_TILES];
#pragma unroll
      for (int n = 0; n < TOKEN_TILES; n++) b[n] = input.bytes(at, pair, n);
      const uint4 low = *reinterpret_cast<const uint4*>(stage + at.place.low + pair * 512);
      multiply_group(low, high, scales, i * 2, b, sums);
      multiply_group(low, high, scales, i * 2 + 1, b, sums);
    }
  }
  u32 minima[4], x_sums[TOKEN_TILES][2];
  float2 x_scales[TOKEN_TILES];
  const Supers super = load_supers(stage, at.place);
  load_min_operands(stage, at.place, threadIdx.x, minima);
#pragma unroll
  for (int i = 0; i < TOKEN_TILES * X_BLOCKS; i++) x_sums[i % TOKEN_TILES][i / TOKEN_TILES] = input.sum(at, i);
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) x_scales[n] = input.scale(at, n);
  leave();
  // Sums of activations are stored halved, and bytes are halves of so many times 2^-24.
  const float min_factor[2] = {super.min[0] * -0x1p25f, super.min[1] * -0x1p25f};
#pragma unroll
  for (int n = 0; n < TOKEN_TILES; n++) {
    float offset[4];
    mma_new(offset, minima, x_sums[n][0], x_sums[n][1]);
#pragma unroll
    for (int k = 0; k < 4; k++) {
      const float product = __fmul_rn(static_cast<float>(sums[n][k]), super.scale[k >> 1]);
      const float v = __fmaf_rn(offset[k], min_factor[k >> 1], product);
      acc[n][k] = __fmaf_rn(v, k & 1 ? x_scales[n].y : x_scales[n].x, acc[n][k]);
    }
  }
}
