// Rows of cached keys and values: eight dimensions to bits and back, and where rows lie. The meaning of the bits is in
// kernels/quant/kv_format.py.
//
// Positions lie in pages of PAGE, a table names the page of each. A page is [keys, values][kv_heads][PAGE] rows of
// some bytes; slot = position for committed tokens, a tree's nodes take the slots after them in node order.
constexpr int PAGE = 256;
constexpr int HALF = 0, BYTE = 1, NIBBLE = 2, LEVELS_4 = 3, LEVELS_3 = 4, FIVE = 5;  // codes
constexpr int ROTATED = 128;                                               // dimensions that are rotated together
constexpr u32 LEVELS_4_LOW = 0x3E3C3933, LEVELS_4_HIGH = 0x44424140;       // upper bytes of half floats
constexpr u32 LEVELS_3_ALL = 0x44413E38;

template <int CODE, int HEAD>
struct Row {
  static constexpr int BITS = CODE == HALF ? 16 : CODE == BYTE ? 8 : CODE == FIVE ? 5 : CODE == LEVELS_3 ? 3 : 4;
  static constexpr int GROUP = CODE == LEVELS_4 ? 64 : CODE == FIVE ? 16 : CODE != LEVELS_3 ? 32 : HEAD < 128 ? 16 : 128;
  static constexpr int DATA = HEAD * BITS / 8;
  static constexpr int BYTES = CODE == HALF ? DATA : (DATA + HEAD / GROUP * 2 + 15) / 16 * 16;
};

struct Cache {
  u8* pool;
  const int* table;
  int page_bytes, kv_heads, key_bytes, value_bytes;  // the last two: of a row

  DEV_MEMBER u8* page(int number) const { return pool + static_cast<u64>(number) * page_bytes; }
  DEV_MEMBER u8* page_at(int slot) const { return page(table[slot / PAGE]); }
  DEV_MEMBER int row_bytes(bool is_value) const { return is_value ? value_bytes : key_bytes; }
  DEV_MEMBER int plane(bool is_value, int head) const {
    return PAGE * (is_value ? kv_heads * key_bytes + head * value_bytes : head * key_bytes);
  }
  DEV_MEMBER u8* row(int slot, bool is_value, int head) const {
    return page_at(slot) + plane(is_value, head) + slot % PAGE * row_bytes(is_value);
  }
};

// Eight dimensions as half floats, from the words that hold them; b: the second four bytes, fifth bits or signs.
template <int CODE>
DEV uint4 expand_eight(u32 a, u32 b, u16 half_scale) {
  const u32 scale = half_scale * 0x10001u;
  u32 v[4];
  if constexpr (CODE == BYTE) {
    a ^= 0x80808080, b ^= 0x80808080;  // 1024 + 128 + the byte, as a half float
    v[0] = __byte_perm(a, 0x64646464, 0x4140), v[1] = __byte_perm(a, 0x64646464, 0x4342);
    v[2] = __byte_perm(b, 0x64646464, 0x4140), v[3] = __byte_perm(b, 0x64646464, 0x4342);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = hsub2(v[i], 0x64806480);
  } else if constexpr (CODE == NIBBLE) {
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = hsub2((a >> 4 * i & 0x000F000F) | 0x64006400, 0x64086408);
  } else if constexpr (CODE == FIVE) {
    const u32 fifths = b | b << 12;
#pragma unroll
    for (int i = 0; i < 4; i++)
      v[i] = hsub2((a >> 4 * i & 0x000F000F) | (fifths << (4 - i) & 0x00100010) | 0x64006400, 0x64106410);
  } else {
    u32 low, high;  // upper bytes of dimensions 0 … 3, and 4 … 7
    if constexpr (CODE == LEVELS_4) {
      low = __byte_perm(LEVELS_4_LOW, LEVELS_4_HIGH, a & 0x7777) ^ (a & 0x80808080);
      high = __byte_perm(LEVELS_4_LOW, LEVELS_4_HIGH, a >> 16 & 0x7777) ^ (a << 4 & 0x80808080);
    } else {
      low = __byte_perm(LEVELS_3_ALL, 0, a & 0x3333) ^ (b & 0x80808080);
      high = __byte_perm(LEVELS_3_ALL, 0, a >> 2 & 0x3333) ^ (b << 1 & 0x80808080);
    }
    v[0] = __byte_perm(low, 0, 0x1404), v[1] = __byte_perm(low, 0, 0x3424);
    v[2] = __byte_perm(high, 0, 0x1404), v[3] = __byte_perm(high, 0, 0x3424);
  }
  return make_uint4(hmul2(v[0], scale), hmul2(v[1], scale), hmul2(v[2], scale), hmul2(v[3], scale));
}

template <int CODE, int HEAD>
DEV u16 scale_of(const u8* row, int chunk) {
  return *reinterpret_cast<const u16*>(row + Row<CODE, HEAD>::DATA + chunk * 8 / Row<CODE, HEAD>::GROUP * 2);
}

// Dimensions 8 chunk … 8 chunk + 7 as half floats.
template <int CODE, int HEAD>
DEV uint4 decode_eight(const u8* row, int chunk) {
  if constexpr (CODE == HALF) return reinterpret_cast<const uint4*>(row)[chunk];
  const u16 scale = scale_of<CODE, HEAD>(row, chunk);
  const u32* words = reinterpret_cast<const u32*>(row);
  if constexpr (CODE == BYTE) return expand_eight<CODE>(words[chunk * 2], words[chunk * 2 + 1], scale);
  if constexpr (CODE == FIVE) return expand_eight<CODE>(words[chunk], row[HEAD / 2 + chunk], scale);
  if constexpr (CODE == LEVELS_3)
    return expand_eight<CODE>(reinterpret_cast<const u16*>(row)[chunk], words[HEAD / 16 + chunk / 4] << chunk % 4 * 2, scale);
  return expand_eight<CODE>(words[chunk], 0, scale);
}

// Dimensions 32 part … 32 part + 31 of a row in shared memory, which is read in few pieces.
template <int CODE, int HEAD>
DEV void decode_four(const u8* row, int part, uint4 (&to)[4]) {
  u32 a[8], b = 0;
  if constexpr (CODE == LEVELS_3) {
    const uint2 found = reinterpret_cast<const uint2*>(row)[part];
    a[0] = found.x & 0xFFFF, a[1] = found.x >> 16, a[2] = found.y & 0xFFFF, a[3] = found.y >> 16;
    b = reinterpret_cast<const u32*>(row + HEAD / 4)[part];
  } else {
    constexpr int PIECES = CODE == BYTE ? 2 : 1;
#pragma unroll
    for (int i = 0; i < PIECES; i++) {
      const uint4 found = reinterpret_cast<const uint4*>(row)[part * PIECES + i];
      a[i * 4] = found.x, a[i * 4 + 1] = found.y, a[i * 4 + 2] = found.z, a[i * 4 + 3] = found.w;
    }
    if constexpr (CODE == FIVE) b = reinterpret_cast<const u32*>(row + HEAD / 2)[part];
  }
#pragma unroll
  for (int i = 0; i < 4; i++) {
    const u16 scale = scale_of<CODE, HEAD>(row, part * 4 + i);
    if constexpr (CODE == BYTE) to[i] = expand_eight<CODE>(a[i * 2], a[i * 2 + 1], scale);
    else to[i] = expand_eight<CODE>(a[i], CODE == FIVE ? b >> 8 * i & 255 : b << 2 * i, scale);
  }
}
