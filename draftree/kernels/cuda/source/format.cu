// The device layout of weights, and how one lane turns it into operands of the matrix instruction.
//
// A unit is ROWS rows by COLS columns, stored whole: units of a row tile follow each other along the columns.
// In a unit a strip is 16 rows, and a half is half the columns. lane = 4 g + t serves rows g and g + 8 of a strip
// and, of each group of 32 columns, columns 4t..4t+3 and 16+4t..16+4t+3. FORMAT is the GGML number of the type.
//
// Quants enter the matrix instruction as they are: an integer in the lowest bits of a half is the 16-bit float
// q * 2^-24, exactly. Nibbles lie so that masks leave two quants, one per half; every other pair sits four bits
// higher, and the activations of the others are stored times 16. Sums over a group are scaled in float32.
// Minima and zero points enter as one product more: their values times the sums of activations over 16 columns.
#define Q4_0 2
#define Q4_1 3
#define Q5_0 6
#define Q5_1 7
#define Q8_0 8
#define Q4_K 12
#define Q5_K 13
#define Q6_K 14
#define F16 1

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
constexpr float SUPER_UNIT = 0x1p110f;    // times a byte's 2^-133 makes 2^-23, which OPERAND_UNIT undoes
constexpr float BYTE_ZERO = -0x1p-126f;  // minus the byte 128, which stands for a scale of 0 where scales have signs

constexpr u32 EVEN_MASK = 0x000F000Fu, ODD_MASK = 0x00F000F0u;
constexpr u32 HIGH_MASK = BITS == 5 ? 0x00100010u : 0x00300030u;
// What a sum of operands times activations must be multiplied by.
constexpr float OPERAND_UNIT = BITS == 16 ? 1.0f : BITS == 8 ? 0x1p24f : HAS_BYTES ? 0x1p43f : 0x1p20f;
constexpr float ZERO_POINT = FORMAT == Q4_0 ? 8.0f : FORMAT == Q5_0 ? 16.0f : FORMAT == Q6_K ? 32.0f : 128.0f;

// Where the high bits of a group's weights lie in their word: rotating by this brings them beside the nibbles.
DEV int high_turn(int group, int step) {
  return BITS == 5 ? (group & 1) * 2 + step + (group >> 1) * 8 : step * 2 + (group & 1) * 8;
}

// What one lane needs of a strip and half besides the quants.
struct Scales {
  u32 high[2];     // of rows g and g + 8
  u32 word[2][2];  // [row] bytes, one per group of 32 or of 16, or halves, one per group
  float super[2];  // [row] what bytes are multiplied by, times SUPER_UNIT
};

DEV Scales load_scales(const u8* unit, int strip, int half, int lane) {
  Scales s = {};
  const int g = lane >> 2, at = strip * 2 + half;
  if (HIGH_BYTES) {
    const uint2 v = reinterpret_cast<const uint2*>(unit + HIGH_AT)[at * 32 + lane];
    s.high[0] = v.x, s.high[1] = v.y;
  }
  if (SCALE_WORDS == 2) {
    const uint4 v = reinterpret_cast<const uint4*>(unit + SCALE_AT)[at * 8 + g];
    s.word[0][0] = v.x, s.word[0][1] = v.y, s.word[1][0] = v.z, s.word[1][1] = v.w;
  } else if (SCALE_BYTES) {
    const uint2 v = reinterpret_cast<const uint2*>(unit + SCALE_AT)[at * 8 + g];
    s.word[0][0] = v.x, s.word[1][0] = v.y;
  }
  if (HAS_SUPER_MIN) {
    const uint2 v = reinterpret_cast<const uint2*>(unit + SUPER_AT)[strip * 8 + g];
    s.super[0] = lower_half(v.x) * SUPER_UNIT, s.super[1] = lower_half(v.y) * SUPER_UNIT;
  } else if (FORMAT == Q6_K) {
    const u32 v = reinterpret_cast<const u32*>(unit + SUPER_AT)[strip * 8 + g];
    s.super[0] = lower_half(v) * SUPER_UNIT, s.super[1] = upper_half(v) * SUPER_UNIT;
  }
  return s;
}

// The scale of 16 columns (step 0 or 1 of a group of 32) in row g or g + 8.
DEV float group_scale(const Scales& s, int row, int group, int step) {
  if (FORMAT == F16) return 1.0f;
  if (!HAS_BYTES) {
    const u32 word = SCALE_WORDS == 2 && group >> 1 ? s.word[row][1] : s.word[row][0];
    return group & 1 ? upper_half(word) : lower_half(word);
  }
  // byte << 16 is the 32-bit float byte * 2^-133.
  const int i = FORMAT == Q6_K ? group * 2 + step : group;
  const float byte = __uint_as_float(__byte_perm(s.word[row][0], 0, 0x4044 | i << 8));
  return FORMAT == Q6_K ? __fmaf_rn(byte, s.super[row], s.super[row] * BYTE_ZERO) : __fmul_rn(byte, s.super[row]);
}

// Two words, of rows g and g + 8, each with the half that `t` selects in both places.
DEV void select_half(const u8* section, int at, int t, int lane, u32* a) {
  const u32* words = reinterpret_cast<const u32*>(section) + (at * 8 + (lane >> 2)) * 2 * SCALE_WORDS;
  for (int r = 0; r < 2; r++) {
    const u32 word = words[r * SCALE_WORDS + (SCALE_WORDS == 2 ? t >> 1 : 0)];
    a[r] = __byte_perm(word, word, t & 1 ? 0x3232 : 0x1010);
  }
}

// The left operand for sums of activations over 16 columns: minima, or scales where zero is not the quant 0.
DEV void load_min_operands(const u8* unit, int strip, int lane, u32* a) {
  const int t = lane & 3;
  if (HAS_SUPER_MIN) {
    const u32 bytes = reinterpret_cast<const u32*>(unit + MIN_AT)[strip * 32 + lane];
    a[0] = __byte_perm(bytes, 0, 0x4040), a[1] = __byte_perm(bytes, 0, 0x4141);
    a[2] = __byte_perm(bytes, 0, 0x4242), a[3] = __byte_perm(bytes, 0, 0x4343);
  } else if (FORMAT == Q6_K) {
    const uint2 v = reinterpret_cast<const uint2*>(unit + SCALE_AT)[(strip * 2 + (t >> 1)) * 8 + (lane >> 2)];
    const int pick = t & 1 ? 0x4342 : 0x4140;  // 0x6400 | byte is 1024 + byte, and the byte is 128 + scale
    a[0] = hsub2(__byte_perm(v.x, 0x64646464u, pick), 0x64806480u);
    a[1] = hsub2(__byte_perm(v.y, 0x64646464u, pick), 0x64806480u);
  } else if (COLS == 128) {
    select_half(unit + SCALE_AT, strip * 2 + (t >> 1), t, lane, a);
  } else {
    const u8* section = unit + (HAS_HALF_MIN ? MIN_AT : SCALE_AT);
    select_half(section, strip * 2, t, lane, a);
    select_half(section, strip * 2 + 1, t, lane, a + 2);
  }
}

// What that product is multiplied by, in units of the other sums; sums of activations are stored halved.
DEV float min_factor(const u8* unit, const Scales& s, int strip, int row, int lane) {
  if (HAS_SUPER_MIN) {
    const u32 word = reinterpret_cast<const u32*>(unit + SUPER_AT)[(strip * 8 + (lane >> 2)) * 2 + row];
    return upper_half(word) * (-2.0f * 0x1p24f / OPERAND_UNIT);
  }
  if (HAS_HALF_MIN) return 2.0f / OPERAND_UNIT;
  return (FORMAT == Q6_K ? s.super[row] / SUPER_UNIT : 1.0f) * (-2.0f * ZERO_POINT / OPERAND_UNIT);
}

// The quants of one row and group as four pairs, columns in order.
DEV void decode_nibbles(u32 word, u32 high, int group, u32* pair) {
  const u32 upper = word >> 8;
  pair[0] = word & EVEN_MASK, pair[1] = word & ODD_MASK, pair[2] = upper & EVEN_MASK, pair[3] = upper & ODD_MASK;
  if (BITS > 4) {
#pragma unroll
    for (int p = 0; p < 4; p++)
      pair[p] |= rotate_right(high, high_turn(group, p >> 1)) & (p & 1 ? HIGH_MASK << 4 : HIGH_MASK);
  }
}

DEV void decode_bytes(u32 first, u32 second, u32* pair) {
  pair[0] = __byte_perm(first, 0, 0x4140), pair[1] = __byte_perm(first, 0, 0x4342);
  pair[2] = __byte_perm(second, 0, 0x4140), pair[3] = __byte_perm(second, 0, 0x4342);
}

// The left operands of two matrix instructions: 16 rows by the two times 16 columns of a group.
DEV void load_operands(const u8* unit, const Scales& s, int strip, int half, int group, int lane, u32 (*a)[4]) {
  const uint4* low = reinterpret_cast<const uint4*>(unit);
  const int at = strip * 2 + half;
  if (FORMAT == F16) {
#pragma unroll
    for (int step = 0; step < 2; step++) {
      const uint4 v = low[((at * GROUPS + group) * 2 + step) * 32 + lane];
      a[step][0] = v.x, a[step][1] = v.y, a[step][2] = v.z, a[step][3] = v.w;
    }
    return;
  }
  u32 pair[2][4];
  if (BITS == 8) {
    const uint4 v = low[(at * GROUPS + group) * 32 + lane];
    decode_bytes(v.x, v.y, pair[0]);
    decode_bytes(v.z, v.w, pair[1]);
  } else {
    const uint4 v = low[(at * (GROUPS / 2) + (group >> 1)) * 32 + lane];
    decode_nibbles(group & 1 ? v.z : v.x, s.high[0], group, pair[0]);
    decode_nibbles(group & 1 ? v.w : v.y, s.high[1], group, pair[1]);
  }
#pragma unroll
  for (int step = 0; step < 2; step++) {
    a[step][0] = pair[0][step * 2], a[step][1] = pair[1][step * 2];
    a[step][2] = pair[0][step * 2 + 1], a[step][3] = pair[1][step * 2 + 1];
  }
}
