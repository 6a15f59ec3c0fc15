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

// Dimensions 8 chunk … 8 chunk + 7 as half floats.
template <int CODE, int HEAD>
DEV uint4 decode_eight(const u8* row, int chunk) {
  typedef Row<CODE, HEAD> Form;
  if constexpr (CODE == HALF) return reinterpret_cast<const uint4*>(row)[chunk];
  const u32 scale = *reinterpret_cast<const u16*>(row + Form::DATA + chunk * 8 / Form::GROUP * 2) * 0x10001u;
  u32 v[4];
  if constexpr (CODE == BYTE) {
    const uint2 raw = reinterpret_cast<const uint2*>(row)[chunk];
    const u32 a = raw.x ^ 0x80808080, b = raw.y ^ 0x80808080;  // 1024 + 128 + the byte, as a half float
    v[0] = __byte_perm(a, 0x64646464, 0x4140), v[1] = __byte_perm(a, 0x64646464, 0x4342);
    v[2] = __byte_perm(b, 0x64646464, 0x4140), v[3] = __byte_perm(b, 0x64646464, 0x4342);
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = hsub2(v[i], 0x64806480);
  } else if constexpr (CODE == NIBBLE) {
    const u32 raw = reinterpret_cast<const u32*>(row)[chunk];
#pragma unroll
    for (int i = 0; i < 4; i++) v[i] = hsub2((raw >> 4 * i & 0x000F000F) | 0x64006400, 0x64086408);
  } else if constexpr (CODE == FIVE) {
    const u32 raw = reinterpret_cast<const u32*>(row)[chunk], byte = row[HEAD / 2 + chunk], fifths = byte | byte << 12;
#pragma unroll
    for (int i = 0; i < 4; i++)
      v[i] = hsub2((raw >> 4 * i & 0x000F000F) | (fifths << (4 - i) & 0x00100010) | 0x64006400, 0x64106410);
  } else {
    u32 a, b;  // upper bytes of dimensions 0 … 3, and 4 … 7
    if constexpr (CODE == LEVELS_4) {
      const u32 raw = reinterpret_cast<const u32*>(row)[chunk];
      a = __byte_perm(LEVELS_4_LOW, LEVELS_4_HIGH, raw & 0x7777) ^ (raw & 0x80808080);
      b = __byte_perm(LEVELS_4_LOW, LEVELS_4_HIGH, raw >> 16 & 0x7777) ^ (raw << 4 & 0x80808080);
    } else {
      const u32 raw = reinterpret_cast<const u16*>(row)[chunk];
      const u32 signs = reinterpret_cast<const u32*>(row + HEAD / 4)[chunk / 4] << chunk % 4 * 2;
      a = __byte_perm(LEVELS_3_ALL, 0, raw & 0x3333) ^ (signs & 0x80808080);
      b = __byte_perm(LEVELS_3_ALL, 0, raw >> 2 & 0x3333) ^ (signs << 1 & 0x80808080);
    }
    v[0] = __byte_perm(a, 0, 0x1404), v[1] = __byte_perm(a, 0, 0x3424);
    v[2] = __byte_perm(b, 0, 0x1404), v[3] = __byte_perm(b, 0, 0x3424);
  }
  return make_uint4(hmul2(v[0], scale), hmul2(v[1], scale), hmul2(v[2], scale), hmul2(v[3], scale));
}
