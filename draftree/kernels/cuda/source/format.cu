// The device layout of weights, and how one lane turns it into operands of the matrix instruction.
//
// A unit is ROWS rows by COLS columns, stored whole: units of a row tile follow each other along the columns.
// In a unit a strip is 16 rows, and a half is half the columns. lane = 4 g + t serves rows g and g + 8 of a strip
// and, of each group of 32 columns, columns 4t..4t+3 and 16+4t..16+4t+3. FORMAT is the GGML number of the type.
//
// An integer in the lowest bits of a half is the 16-bit float q * 2^-24, exactly. Nibbles lie so that masks leave two
// quants, one per half; every other pair sits four bits higher, and the activations of the others are stored times 16.
// Where a group's scale is a small integer, it is multiplied in before the matrix instruction: 16 bits hold the product
// (all but the largest of Q6_K, which are rounded), and float32 enters once a unit. Else quants go in as they are, and
// sums over a group are scaled in float32. Minima and zero points enter as one product more: their values times the
// sums of activations over a group, each of which is two numbers (halves.cu).
#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define F16 1

// Single instructions. The spread of a half to both places is free where an operation on halves reads it.
#ifndef EMULATED
DEV u32 hfma2(u32 a, u32 b, u32 c) {
  u32 r;
  asm("fma.rn.f16x2 %0, %1, %2, %3;" : "=r"(r) : "r"(a), "r"(b), "r"(c));
  return r;
}

DEV u32 hneg2(u32 v) {
  u32 r;
  asm("neg.f16x2 %0, %1;" : "=r"(r) : "r"(v));
  return r;
}

DEV u32 spread_lo(u32 v) {
  u32 r;
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {lo, lo};}" : "=r"(r) : "r"(v));
  return r;
}

DEV u32 spread_hi(u32 v) {
  u32 r;
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; mov.b32 %0, {hi, hi};}" : "=r"(r) : "r"(v));
  return r;
}
#else
// (Products of operands have few enough bits for 32-bit floats.)
DEV u32 hfma2(u32 a, u32 b, u32 c) {
  const u32 lo = to_half(__fmaf_rn(lower_half(a), lower_half(b), lower_half(c)));
  return lo | static_cast<u32>(to_half(__fmaf_rn(upper_half(a), upper_half(b), upper_half(c)))) << 16;
}
DEV u32 hneg2(u32 v) { return v ^ 0x80008000u; }
DEV u32 spread_lo(u32 v) { return dup_lo(v); }
DEV u32 spread_hi(u32 v) { return dup_hi(v); }
#endif

constexpr bool HAS_SUPER_MIN = FORMAT == Q4_K || FORMAT == Q5_K;
constexpr bool HAS_HALF_MIN = FORMAT == Q4_1 || FORMAT == Q5_1;
constexpr bool HAS_BYTES = HAS_SUPER_MIN || FORMAT == Q6_K;  // scales are bytes times a 16-bit float
constexpr int BITS = FORMAT == F16                                        ? 16
                     : FORMAT == Q8_0                                     ? 8
                     : FORMAT == Q6_K                                     ? 6
                     : FORMAT == Q5_K || FORMAT == Q5_0 || FORMAT == Q5_1 ? 5
                                                                          : 4;
constexpr int ROWS = 128;
constexpr int HALF_COLS = COLS / 2;  // a warp takes one half
constexpr int GROUPS = HALF_COLS / 32;
static_assert(COLS == (BITS < 6 ? 256 : 128), "no such unit");

// The sections of a unit.
constexpr int LOW_BYTES = ROWS * COLS * (BITS > 6 ? BITS : 4) / 8;                       // see load_operands
constexpr int HIGH_BYTES = BITS == 5 || BITS == 6 ? ROWS * COLS * (BITS - 4) / 8 : 0;    // [strip][half][lane] 2 words
constexpr int SCALE_BYTES = FORMAT == F16 ? 0 : ROWS * COLS / (HAS_SUPER_MIN ? 32 : 16); // [strip][half][g][2 rows]
constexpr int MIN_BYTES = HAS_SUPER_MIN ? SCALE_BYTES : HAS_HALF_MIN ? SCALE_BYTES : 0;  // bytes: [strip][lane]
constexpr int SUPER_BYTES = HAS_SUPER_MIN ? ROWS * 4 : FORMAT == Q6_K ? ROWS * 2 : 0;    // [strip][g][2 rows]
constexpr int HIGH_AT = LOW_BYTES;
constexpr int SCALE_AT = HIGH_AT + HIGH_BYTES;
constexpr int MIN_AT = SCALE_AT + SCALE_BYTES;
constexpr int SUPER_AT = MIN_AT + MIN_BYTES;
constexpr int UNIT_BYTES = SUPER_AT + SUPER_BYTES;
static_assert(UNIT_BYTES == HOST_UNIT_BYTES, "the host allocates units of another size");
constexpr int SCALE_WORDS = HAS_BYTES ? 1 : GROUPS / 2;  // a row's words of SCALE in a half

constexpr u32 EVEN_MASK = 0x000F000Fu, ODD_MASK = 0x00F000F0u;
constexpr u32 HIGH_MASK = BITS == 5 ? 0x00100010u : 0x00300030u;
// What a sum of operands times activations must be multiplied by.
constexpr float OPERAND_UNIT = BITS == 16 ? 1.0f : 0x1p20f;
constexpr bool HAS_OFFSET = FORMAT != F16 && FORMAT != Q6_K;  // something is added to scale * quant
constexpr u32 MAGIC = 0x64646464u;
constexpr float ZERO_POINT = FORMAT == Q4_0 ? 8.0f : FORMAT == Q5_0 ? 16.0f : FORMAT == Q6_K ? 32.0f : 128.0f;

// Where the high bits of a group's weights lie in their word: rotating by this brings them beside the nibbles. Those of
// the second step are a byte further, as the nibbles are.
DEV int high_turn(int group, int step) { return (BITS == 5 ? group : (group & 1) * 2) + step * 8; }

// Where in a unit a lane finds what it needs of a strip and half, in bytes; the next strip lies STRIP_... further.
struct Place {
  int low, high, scale, super, min;
};
constexpr int LOW_HALF = LOW_BYTES / (ROWS / 8);  // a strip's half
constexpr int SUPER_ROW = HAS_SUPER_MIN ? 4 : 2;
constexpr int STRIP_LOW = 2 * LOW_HALF, STRIP_HIGH = 512, STRIP_SCALE = 128 * SCALE_WORDS, STRIP_SUPER = 16 * SUPER_ROW;
constexpr int STRIP_MIN = 128 * SCALE_WORDS;

DEV Place place_in_unit(int strip, int half, int lane) {
  const int at = strip * 2 + half, g = lane >> 2, t = lane & 3;
  // The lane's minima, or the scales that stand in for them: of rows g and g + 8, group t.
  const int section = HAS_HALF_MIN || HAS_SUPER_MIN ? MIN_AT : SCALE_AT;
  const int min = HAS_SUPER_MIN     ? lane * 4
                  : SCALE_WORDS > 1 ? g * 16 + (t >> 1) * 4
                                    : (t >> 1) * 64 + g * 8;
  return {at * LOW_HALF + lane * 16, HIGH_AT + (at * 32 + lane) * 8, SCALE_AT + (at * 8 + g) * 8 * SCALE_WORDS,
          SUPER_AT + (strip * 8 + g) * 2 * SUPER_ROW, section + strip * STRIP_MIN + min};
}

// What one lane needs of a strip and half besides the quants.
struct Scales {
  u32 high[2];     // of rows g and g + 8
  u32 word[2][2];  // [row] bytes, one per group of 32 or of 16, or halves, one per group
};

// What bytes of rows g and g + 8 are multiplied by, and what minima are.
struct Supers {
  float scale[2], min[2];
};

DEV Supers load_supers(const u8* unit, const Place& at) {
  Supers s = {};
  if (HAS_SUPER_MIN) {
    const uint2 v = *reinterpret_cast<const uint2*>(unit + at.super);
    s.scale[0] = lower_half(v.x), s.min[0] = upper_half(v.x), s.scale[1] = lower_half(v.y), s.min[1] = upper_half(v.y);
  } else if (FORMAT == Q6_K) {
    const u32 v = *reinterpret_cast<const u32*>(unit + at.super);
    s.scale[0] = lower_half(v), s.scale[1] = upper_half(v);
  }
  return s;
}

DEV Scales load_scales(const u8* unit, const Place& at) {
  Scales s = {};
  if (HIGH_BYTES) {
    const uint2 v = *reinterpret_cast<const uint2*>(unit + at.high);
    s.high[0] = v.x, s.high[1] = v.y;
  }
  if (SCALE_WORDS == 2) {
    const uint4 v = *reinterpret_cast<const uint4*>(unit + at.scale);
    s.word[0][0] = v.x, s.word[0][1] = v.y, s.word[1][0] = v.z, s.word[1][1] = v.w;
  } else if (SCALE_BYTES) {
    const uint2 v = *reinterpret_cast<const uint2*>(unit + at.scale);
    s.word[0][0] = v.x, s.word[1][0] = v.y;
  }
  return s;
}

// The scale of 16 columns (step 0 or 1 of a group of 32) in row g or g + 8; super is the row's.
DEV float group_scale(const Scales& s, float super, int row, int group, int step) {
  if (FORMAT == F16) return 1.0f;
  if (!HAS_BYTES) {
    const u32 word = SCALE_WORDS == 2 && group >> 1 ? s.word[row][1] : s.word[row][0];
    return group & 1 ? upper_half(word) : lower_half(word);
  }
  const int i = FORMAT == Q6_K ? group * 2 + step : group, byte = s.word[row][0] >> i * 8 & 255;
  return __fmul_rn(static_cast<float>(FORMAT == Q6_K ? byte - 128 : byte), super);
}

// The left operand for sums of activations over a group: minima, twice each, or scales where zero is not the quant 0.
DEV void load_min_operands(const u8* unit, const Place& at, int lane, u32* a) {
  if (HAS_SUPER_MIN) {
    const u32 bytes = *reinterpret_cast<const u32*>(unit + at.min);
    a[0] = __byte_perm(bytes, 0, 0x4040), a[1] = __byte_perm(bytes, 0, 0x4141);
    a[2] = __byte_perm(bytes, 0, 0x4242), a[3] = __byte_perm(bytes, 0, 0x4343);
    return;
  }
#pragma unroll
  for (int i = 0; i < COLS / 64; i++) {  // rows g and g + 8 of one half, then of the other
    const u32 word = *reinterpret_cast<const u32*>(unit + at.min + (i & 1) * 4 * SCALE_WORDS + (i >> 1) * 64 * SCALE_WORDS);
    a[i] = __byte_perm(word, word, lane & 1 ? 0x3232 : 0x1010);
  }
}

// What that product is multiplied by, in units of the other sums; sums of activations are stored halved.
DEV float min_factor(float super_min) {
  if (HAS_SUPER_MIN) return super_min * (-2.0f * 0x1p24f / OPERAND_UNIT);
  return (HAS_HALF_MIN ? 2.0f : -2.0f * ZERO_POINT) / OPERAND_UNIT;
}

// The quants of one row and group as four pairs, columns in order.
DEV void decode_nibbles(u32 word, u32 high, int group, u32* pair) {
#pragma unroll
  for (int p = 0; p < 4; p++) {
    pair[p] = (p & 2 ? word >> 8 : word) & (p & 1 ? ODD_MASK : EVEN_MASK);
    if (BITS > 4) pair[p] |= rotate_right(high, high_turn(group, p >> 1)) & (p & 1 ? HIGH_MASK << 4 : HIGH_MASK);
  }
}

// The same of bytes. Every other pair is multiplied by 16, as nibbles lie.
DEV void decode_bytes(u32 first, u32 second, u32* pair) {
  pair[0] = __byte_perm(first, 0, 0x4140), pair[1] = __byte_perm(first, 0, 0x4342);
  pair[2] = __byte_perm(second, 0, 0x4140), pair[3] = __byte_perm(second, 0, 0x4342);
  pair[1] = hmul2(pair[1], 0x4C004C00u), pair[3] = hmul2(pair[3], 0x4C004C00u);
}

// The left operands of two matrix instructions: 16 rows by the two times 16 columns of a group.
DEV void load_operands(const u8* unit, const Place& at, const Scales& s, int group, u32 (*a)[4]) {
  const uint4* low = reinterpret_cast<const uint4*>(unit + at.low);
  if (FORMAT == F16) {
#pragma unroll
    for (int step = 0; step < 2; step++) {
      const uint4 v = low[(group * 2 + step) * 32];
      a[step][0] = v.x, a[step][1] = v.y, a[step][2] = v.z, a[step][3] = v.w;
    }
    return;
  }
  u32 pair[2][4];
  const uint4 v = low[(BITS == 8 ? group : group >> 1) * 32];
  if (BITS == 8) {
    decode_bytes(v.x, v.y, pair[0]);
    decode_bytes(v.z, v.w, pair[1]);
  } else {
    decode_nibbles(group & 1 ? v.z : v.x, s.high[0], group, pair[0]);
    decode_nibbles(group & 1 ? v.w : v.y, s.high[1], group, pair[1]);
  }
#pragma unroll
  for (int step = 0; step < 2; step++) {
    a[step][0] = pair[0][step * 2], a[step][1] = pair[1][step * 2];
    a[step][2] = pair[0][step * 2 + 1], a[step][3] = pair[1][step * 2 + 1];
  }
}

// Scales that are bytes, as halves: those of group & ~1 and the next, or of the two steps of a group of Q6_K.
// 0x6400 | n is the 16-bit float 1024 + n; `magic` has the byte 0x64 four times.
DEV u32 byte_scales(const Scales& s, int row, int group, u32 magic) {
  const bool upper = FORMAT == Q6_K ? group & 1 : group >> 1;
  return hsub2(__byte_perm(s.word[row][0], magic, upper ? 0x4342 : 0x4140), FORMAT == Q6_K ? 0x64806480u : 0x64006400u);
}

// The operands times their scales, where these are bytes.
DEV void load_scaled_operands(const u8* unit, const Place& at, const Scales& s, int group, u32 magic, u32 (*a)[4]) {
  if (BITS > 4) load_operands(unit, at, s, group, a);
  const uint4 low = reinterpret_cast<const uint4*>(unit + at.low)[(group >> 1) * 32];
#pragma unroll
  for (int row = 0; row < 2; row++) {
    const u32 scales = byte_scales(s, row, group, magic), word = row ? (group & 1 ? low.w : low.y) : (group & 1 ? low.z : low.x);
    const u32 zeros[2] = {hmul2(scales, 0x80208020u), hmul2(scales, 0x82008200u)};  // -32 quants, and 16 times as much
#pragma unroll
    for (int step = 0; step < 2; step++) {
      const bool upper = FORMAT == Q6_K ? step : group & 1;
      const u32 scale = upper ? spread_hi(scales) : spread_lo(scales);
      u32 &even = a[step][row], &odd = a[step][2 + row];
      if (BITS == 4) {  // even quants alone, then both together less the even ones: one mask fewer
        const u32 both = step ? __byte_perm(word, 0, 0x4341) : word & (EVEN_MASK | ODD_MASK);
        even = hmul2(both & EVEN_MASK, scale);
        odd = hfma2(both, scale, hneg2(even));
      } else if (FORMAT == Q6_K) {
        even = hfma2(even, scale, upper ? spread_hi(zeros[0]) : spread_lo(zeros[0]));
        odd = hfma2(odd, scale, upper ? spread_hi(zeros[1]) : spread_lo(zeros[1]));
      } else {
        even = hmul2(even, scale), odd = hmul2(odd, scale);
      }
    }
  }
}
