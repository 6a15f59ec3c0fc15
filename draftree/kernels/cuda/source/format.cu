// The device layout of weights, and how one lane turns it into operands of the matrix instruction.
//
// A unit is ROWS rows by COLS columns, stored whole: units of a row tile follow each other along the columns.
// In a unit, a strip is 16 rows; lane = 4 g + t serves rows g and g + 8 of it and columns 8t..8t+7 of each
// group of 32. FORMAT is the GGML number of the type; COLS is 128 or 256.
//
// Quants of 4 bits sit in 32-bit words so that a mask leaves two integers, one per half, which as 16-bit floats
// are subnormal: q * 2^-24 << position. One fused multiply-add with the scale gives two weights, rounded once.
// Scales are normalised per row by a power of two (row_scale undoes it), so they use the range of 16-bit floats.
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
constexpr int BITS = FORMAT == F16                                        ? 16
                     : FORMAT == Q8_0                                     ? 8
                     : FORMAT == Q6_K                                     ? 6
                     : FORMAT == Q5_K || FORMAT == Q5_0 || FORMAT == Q5_1 ? 5
                                                                          : 4;
constexpr int ROWS = 128;
constexpr int STRIPS = ROWS / 16;
static_assert(COLS == 256 || (COLS == 128 && BITS >= 6 && FORMAT != Q5_K), "no such unit");
constexpr int HALF_COLS = COLS / 2;  // a warp takes one half of a unit's columns
constexpr int GROUPS = HALF_COLS / 32;

// The sections of a unit; each is [strip][half][lane or g], so that a warp reads 16 bytes a lane in one piece.
constexpr int LOW_BYTES = ROWS * COLS * (BITS > 6 ? BITS : 4) / 8;
constexpr int HIGH_BYTES = BITS == 5 || BITS == 6 ? ROWS * COLS * (BITS - 4) / 8 : 0;
constexpr int SCALE_BYTES = FORMAT == F16 ? 0 : HAS_HALF_MIN ? ROWS * COLS / 8 : ROWS * COLS / 16;
constexpr int SUPER_BYTES = HAS_SUPER_MIN ? ROWS * 4 : FORMAT == Q6_K ? ROWS * 2 : 0;
constexpr int HIGH_AT = LOW_BYTES;
constexpr int SCALE_AT = HIGH_AT + HIGH_BYTES;
constexpr int SUPER_AT = SCALE_AT + SCALE_BYTES;
constexpr int UNIT_BYTES = SUPER_AT + SUPER_BYTES;
static_assert(UNIT_BYTES == HOST_UNIT_BYTES, "the host allocates units of another size");

// Where a nibble starts in its half: 2 leaves small minima their precision, 6 bits need 0 to stay mantissas.
constexpr int SHIFT = BITS < 6 ? 2 : 0;
constexpr u32 EVEN_MASK = 0x000F000Fu << SHIFT;
constexpr u32 ODD_MASK = 0x00F000F0u << SHIFT;
constexpr u32 HIGH_MASK = (BITS == 5 ? 0x00100010u : 0x00300030u) << SHIFT;
constexpr int UNIT_EXPONENT = FORMAT == F16 ? 0 : 24 - SHIFT;  // an operand is weight * 2^(e - UNIT_EXPONENT)
// Normalised scales end up just under this power of two, so that nothing below overflows.
constexpr int SCALE_TOP = HAS_SUPER_MIN || FORMAT == Q6_K ? 7 : 13;
// minus the quant that stands for zero, in units of a quant
constexpr u32 ZERO_POINT = FORMAT == Q4_0 ? 0x80208020u : FORMAT == Q5_0 ? 0x80408040u : FORMAT == Q6_K ? 0x80208020u : 0x80808080u;

// Where the high bits of 16 weights lie in their word: rotating by this brings them beside the nibbles.
DEV int high_turn(int group, int pair) {
  return BITS == 5 ? (group & 1) * 2 + pair + (group >> 1) * 8 : pair * 2 + (group & 1) * 8;
}

// What one lane needs of a strip besides the quants.
struct Scales {
  uint4 high;   // 5 bits: x, y = rows g, g + 8; 6 bits: also z, w for the second pair of groups
  uint4 first;  // super: 4 (scale, min) byte pairs a row; halves: 4 halves a row, or 4 (scale, min) of row g
  uint4 second; // 4 (scale, min) of row g + 8
  uint2 super;  // (4 d, -4 dmin) a row, or x = d of both rows
};

DEV Scales load_scales(const u8* unit, int strip, int half, int lane) {
  Scales s = {};
  const int g = lane >> 2, at = strip * 2 + half;
  if (BITS == 5 || (BITS == 6 && GROUPS == 2)) {
    const uint2 h = reinterpret_cast<const uint2*>(unit + HIGH_AT)[at * 32 + lane];
    s.high.x = h.x, s.high.y = h.y;
  }
  if (BITS == 6 && GROUPS == 4) s.high = reinterpret_cast<const uint4*>(unit + HIGH_AT)[at * 32 + lane];
  const u8* scale = unit + SCALE_AT;
  if (FORMAT == Q6_K) {
    s.first.x = reinterpret_cast<const u32*>(scale)[(at * 16 + lane / 2) * (GROUPS / 2)];
    if (GROUPS == 4) s.first.y = reinterpret_cast<const u32*>(scale)[(at * 16 + lane / 2) * 2 + 1];
    s.super.x = reinterpret_cast<const u32*>(unit + SUPER_AT)[strip * 8 + g];
  } else if (HAS_HALF_MIN) {
    s.first = reinterpret_cast<const uint4*>(scale)[at * 16 + g * 2];
    s.second = reinterpret_cast<const uint4*>(scale)[at * 16 + g * 2 + 1];
  } else if (FORMAT != F16 && GROUPS == 2) {
    const uint2 b = reinterpret_cast<const uint2*>(scale)[at * 8 + g];
    s.first.x = b.x, s.first.z = b.y;
  } else if (FORMAT != F16) {
    s.first = reinterpret_cast<const uint4*>(scale)[at * 8 + g];
  }
  if (HAS_SUPER_MIN) s.super = reinterpret_cast<const uint2*>(unit + SUPER_AT)[strip * 8 + g];
  return s;
}

// Scale and offset of a group for rows g and g + 8, each twice in a word.
DEV void group_scales(const Scales& s, int group, u32* scale, u32* offset) {
  const bool odd = group & 1, upper = group >> 1;
  if (HAS_SUPER_MIN) {
    // 0x5400 | byte is 64 + byte / 16, and bytes hold 4 * scale: the product with 4 d less 64 * 4 d is scale * d.
    const u32 bytes[2] = {upper ? s.first.y : s.first.x, upper ? s.first.w : s.first.z};
    const u32 super[2] = {s.super.x, s.super.y};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      const u32 h = __byte_perm(bytes[r], 0x54545454u, odd ? 0x4342 : 0x4140);
      const u32 both = hfma2(h, super[r], hmul2(super[r], 0xD400D400u));
      scale[r] = dup_lo(both), offset[r] = dup_hi(both);
    }
  } else if (FORMAT == Q6_K) {
    // 0x6400 | byte is 1024 + byte, and bytes hold 128 + scale.
    const u32 h = __byte_perm(upper ? s.first.y : s.first.x, 0x64646464u, odd ? 0x4342 : 0x4140);
    const u32 both = hmul2(hsub2(h, 0x64806480u), s.super.x);
    scale[0] = dup_lo(both), scale[1] = dup_hi(both);
    offset[0] = hmul2(scale[0], ZERO_POINT), offset[1] = hmul2(scale[1], ZERO_POINT);
  } else if (HAS_HALF_MIN) {
    const u32 both[2] = {upper ? (odd ? s.first.w : s.first.z) : (odd ? s.first.y : s.first.x),
                         upper ? (odd ? s.second.w : s.second.z) : (odd ? s.second.y : s.second.x)};
#pragma unroll
    for (int r = 0; r < 2; r++) scale[r] = dup_lo(both[r]), offset[r] = dup_hi(both[r]);
  } else {
    const u32 both[2] = {upper ? s.first.y : s.first.x, upper ? s.first.w : s.first.z};
#pragma unroll
    for (int r = 0; r < 2; r++) {
      scale[r] = odd ? dup_hi(both[r]) : dup_lo(both[r]);
      offset[r] = hmul2(scale[r], ZERO_POINT);
    }
  }
}

// Eight weights of one row as four pairs, columns in order.
DEV void decode_nibbles(u32 word, u32 high, int group, u32 scale, u32 offset, u32* pair) {
  const u32 swapped = __byte_perm(word, word, 0x2301);
  u32 q[4] = {word & EVEN_MASK, word & ODD_MASK, swapped & EVEN_MASK, swapped & ODD_MASK};
  if (BITS > 4) {
    const u32 turned[2] = {rotate_right(high, high_turn(group, 0)), rotate_right(high, high_turn(group, 1))};
#pragma unroll
    for (int p = 0; p < 4; p++) q[p] |= turned[p >> 1] & (p & 1 ? HIGH_MASK << 4 : HIGH_MASK);
  }
  const u32 odd_scale = hmul2(scale, 0x2C002C00u);  // odd pairs lie four bits higher
#pragma unroll
  for (int p = 0; p < 4; p++) pair[p] = hfma2(q[p], p & 1 ? odd_scale : scale, offset);
}

DEV void decode_bytes(u32 low, u32 high, u32 scale, u32 offset, u32* pair) {
  const u32 q[4] = {__byte_perm(low, 0, 0x4140), __byte_perm(low, 0, 0x4342), __byte_perm(high, 0, 0x4140),
                    __byte_perm(high, 0, 0x4342)};
#pragma unroll
  for (int p = 0; p < 4; p++) pair[p] = hfma2(q[p], scale, offset);
}

// The left operands of two matrix instructions: 16 rows by the 32 columns of a group.
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
  u32 scale[2], offset[2], pair[2][4];
  group_scales(s, group, scale, offset);
  if (BITS == 8) {
    const uint4 v = low[(at * GROUPS + group) * 32 + lane];
    decode_bytes(v.x, v.y, scale[0], offset[0], pair[0]);
    decode_bytes(v.z, v.w, scale[1], offset[1], pair[1]);
  } else {
    const uint4 v = low[(at * (GROUPS / 2) + (group >> 1)) * 32 + lane];
    const bool upper = BITS == 6 && group >> 1;
    decode_nibbles(group & 1 ? v.z : v.x, upper ? s.high.z : s.high.x, group, scale[0], offset[0], pair[0]);
    decode_nibbles(group & 1 ? v.w : v.y, upper ? s.high.w : s.high.y, group, scale[1], offset[1], pair[1]);
  }
#pragma unroll
  for (int step = 0; step < 2; step++) {
    a[step][0] = pair[0][step * 2], a[step][1] = pair[1][step * 2];
    a[step][2] = pair[0][step * 2 + 1], a[step][3] = pair[1][step * 2 + 1];
  }
}
