// Raw GGUF rows to units; rows arrive in slabs. Rows of Q4_K may lie in units of Q5_K, beside rows of that format.
constexpr bool IS_WIDENED = FORMAT == Q5_K && SOURCE == Q4_K;
constexpr int RAW_BYTES = IS_WIDENED ? 144 : BLOCK_BYTES;

DEV u32 read_weight(const u8* block, int i) {
  return IS_WIDENED ? block[16 + (i >> 6) * 32 + (i & 31)] >> (i >> 5 & 1) * 4 & 15 : read_quant(block, i);
}

// A bound of a block's weights.
DEV float block_bound(const u8* block) {
  if (FORMAT == F16) return fabsf(read_float(block));
  if (FORMAT == Q6_K) return fabsf(read_half(block + 208)) * (128 * 32);
  const float d = fabsf(read_half(block)), m = HAS_SUPER_MIN || HAS_HALF_MIN ? fabsf(read_half(block + 2)) : 0.0f;
  return HAS_SUPER_MIN ? d * (63 * ((1 << BITS) - 1)) + m * 63 : d * ((1 << BITS) - 1) + m;
}

// A warp a row: the power of two by which the row is divided where its weights are written as 16-bit floats. Quantised
// weights of ordinary size are rounded well enough as they are; is_plain says that all are.
KERNEL void row_scale_kernel(const u8* raw, float* row_scale, int* is_plain, int num_rows, int num_cols) {
  const int row = blockIdx.x * (blockDim.x >> 5) + (threadIdx.x >> 5), num_blocks = num_cols / BLOCK_LEN;
  if (row >= num_rows) return;
  float largest = 0.0f;
  for (int b = threadIdx.x & 31; b < num_blocks; b += 32)
    largest = fmaxf(largest, block_bound(raw + (static_cast<u64>(row) * num_blocks + b) * RAW_BYTES));
  for (int d = 16; d; d >>= 1) largest = fmaxf(largest, __shfl_xor_sync(~0u, largest, d));
  const bool is_ordinary = FORMAT != F16 && largest > 0x1p-7f && largest < 0x1p15f;
  if (threadIdx.x & 31) return;
  row_scale[row] = is_ordinary ? 1.0f : pow2(-exponent_to(largest, 13));
  if (row_scale[row] != 1.0f) *is_plain = 0;
}

// The scales of one row and half unit; first_group counts groups of 32 along the row.
DEV void pack_scales(const u8* row, u8* unit, int strip, int r, int half, int first_group, int num_groups) {
  const int at = strip * 2 + half, g = r & 7, upper = r >> 3;
  u8* bytes = unit + SCALE_AT + (at * 16 + g * 2 + upper) * 4;
  u16* halves = reinterpret_cast<u16*>(unit + SCALE_AT) + (at * 16 + g * 2 + upper) * GROUPS;
  u16* minima = reinterpret_cast<u16*>(unit + MIN_AT) + (at * 16 + g * 2 + upper) * GROUPS;
  for (int group = 0; group < GROUPS; group++) {
    const int k = first_group + group;
    const bool inside = k < num_groups;
    const u8* block = row + static_cast<u64>(inside ? k * 32 / BLOCK_LEN : 0) * RAW_BYTES;
    if (HAS_SUPER_MIN) {
      bytes[group] = inside ? read_super_byte(block, k & 7, 0) : 0;
      (unit + MIN_AT)[(strip * 32 + g * 4 + group) * 4 + half * 2 + upper] = inside ? read_super_byte(block, k & 7, 1) : 0;
    } else if (FORMAT == Q6_K) {
      for (int step = 0; step < 2; step++)
        bytes[group * 2 + step] = inside ? block[192 + (k & 7) * 2 + step] ^ 0x80 : 0x80;
    } else if (FORMAT != F16) {
      halves[group] = inside ? read16(block) : 0;
      if (HAS_HALF_MIN) minima[group] = inside ? read16(block + 2) : 0;
    }
  }
  if (half || !SUPER_BYTES) return;
  const bool inside = first_group < num_groups;
  const u8* block = row + static_cast<u64>(inside ? first_group * 32 / BLOCK_LEN : 0) * RAW_BYTES;
  u16* super = reinterpret_cast<u16*>(unit + SUPER_AT);
  const int index = strip * 16 + g * 2 + upper;
  if (HAS_SUPER_MIN)
    super[index * 2] = inside ? read16(block) : 0, super[index * 2 + 1] = inside ? read16(block + 2) : 0;
  else
    super[index] = inside ? read16(block + 208) : 0;
}

// The eight quants of a group that lane t serves: low words, and the high bits turned to where they belong.
DEV void pack_octet(const u8* row, u8* unit, int strip, int r, int half, int t, int group, int k, bool inside, float unscale, u32* high) {
  const int at = strip * 2 + half, g = r & 7, upper = r >> 3, lane = g * 4 + t;
  u32* low = reinterpret_cast<u32*>(unit);
  u32 q[8];
  for (int i = 0; i < 8; i++) {
    const int column = k * 32 + i / 4 * 16 + t * 4 + i % 4;
    const u8* block = row + static_cast<u64>(inside ? column / BLOCK_LEN : 0) * RAW_BYTES;
    const float factor = i % 4 < 2 ? unscale * 0.0625f : unscale;
    q[i] = !inside ? 0 : FORMAT == F16 ? to_half(read_float(block) * factor) : read_weight(block, column % BLOCK_LEN);
  }
  if (BITS == 16) {
    for (int i = 0; i < 4; i++)  // pair i is word upper + 2 (i % 2) of step i / 2
      low[((at * GROUPS + group) * 2 + i / 2) * 128 + lane * 4 + upper + i % 2 * 2] = q[2 * i] | q[2 * i + 1] << 16;
  } else if (BITS == 8) {
    for (int i = 0; i < 2; i++)
      low[(at * GROUPS + group) * 128 + lane * 4 + upper * 2 + i] =
          q[4 * i] | q[4 * i + 1] << 8 | q[4 * i + 2] << 16 | q[4 * i + 3] << 24;
  } else {
    u32 word = 0;
    for (int i = 0; i < 8; i++) {  // even columns in the low half, odd ones in the high half
      const int pair = i >> 1, side = i & 1;
      word |= (q[i] & 15) << (pair * 4 + side * 16);
      const u32 beside = (q[i] >> 4) << (4 + pair % 2 * 4 + side * 16);
      *high |= rotate_right(beside, (32 - high_turn(group, pair >> 1)) & 31);
    }
    low[(at * (GROUPS / 2) + (group >> 1)) * 128 + lane * 4 + (group & 1) * 2 + upper] = word;
  }
}

// A thread: one row, half a unit's columns, one lane's eight columns of each group. raw has the rows from first_row
// to last_row; what lies after num_rows is zero. Blocks count units from that of first_row on.
KERNEL void repack_kernel(const u8* raw, const float* row_scale, u8* units, int first_row, int last_row,
                                         int num_rows, int num_cols, int num_chunks) {
  const u32 index = blockIdx.x * blockDim.x + threadIdx.x;
  const int t = index & 3, half = index >> 2 & 1, r = index >> 3 & 15, strip = index >> 7 & 7, chunk = index / 1024 % num_chunks;
  const int tile = first_row / ROWS + index / 1024 / num_chunks, row = tile * ROWS + strip * 16 + r;
  const bool is_row = row < num_rows;
  if (row < first_row || is_row && row >= last_row) return;
  u8* unit = units + (static_cast<u64>(tile / BAND * num_chunks + chunk) * BAND + tile % BAND) * UNIT_BYTES;
  const u8* source = raw + static_cast<u64>(is_row ? row - first_row : 0) * (num_cols / BLOCK_LEN) * RAW_BYTES;
  const float unscale = is_row && FORMAT == F16 ? 1.0f / row_scale[row] : 1.0f;
  const int first_group = (chunk * COLS + half * HALF_COLS) / 32, num_groups = is_row ? num_cols / 32 : 0;
  u32 high = 0;
  for (int group = 0; group < GROUPS; group++) {
    const int k = first_group + group;
    pack_octet(source, unit, strip, r, half, t, group, k, k < num_groups, unscale, &high);
  }
  if (HIGH_BYTES)
    reinterpret_cast<u32*>(unit + HIGH_AT)[((strip * 2 + half) * 32 + (r & 7) * 4 + t) * 2 + (r >> 3)] = high;
  if (t == 0 && FORMAT != F16) pack_scales(source, unit, strip, r, half, first_group, num_groups);
}
