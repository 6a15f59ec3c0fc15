// Reading raw GGUF blocks. SOURCE is the GGML number of the raw type, FORMAT that of the device layout (they differ
// only for 32-bit and bfloat16 sources, which become 16-bit floats).
constexpr int BLOCK_LEN = FORMAT == F16 ? 1 : HAS_SUPER_MIN || FORMAT == Q6_K ? 256 : 32;
constexpr int BLOCK_BYTES = SOURCE == 0      ? 4
                            : FORMAT == F16  ? 2
                            : FORMAT == Q4_0 ? 18
                            : FORMAT == Q4_1 ? 20
                            : FORMAT == Q5_0 ? 22
                            : FORMAT == Q5_1 ? 24
                            : FORMAT == Q8_0 ? 34
                            : FORMAT == Q4_K ? 144
                            : FORMAT == Q5_K ? 176
                                             : 210;

DEV u32 read16(const u8* p) { return p[0] | p[1] << 8; }
DEV float read_half(const u8* p) { return from_half(static_cast<u16>(read16(p))); }

DEV float read_float(const u8* p) {
  if (SOURCE == 0) return __uint_as_float(read16(p) | read16(p + 2) << 16);
  return SOURCE == 30 ? __uint_as_float(read16(p) << 16) : read_half(p);
}

// One 8-bit quant, as stored in units.
DEV u32 read_quant(const u8* block, int i) {
  const int j = i & 15, upper = i >> 4 & 1;  // blocks of 32: low nibbles are the first 16 weights
  if (FORMAT == Q8_0) return block[2 + i] ^ 0x80;
  if (FORMAT == Q4_0 || FORMAT == Q4_1) return block[(FORMAT == Q4_0 ? 2 : 4) + j] >> upper * 4 & 15;
  if (FORMAT == Q5_0 || FORMAT == Q5_1) {
    const u8* bits = block + (FORMAT == Q5_0 ? 2 : 4);
    return (bits[4 + j] >> upper * 4 & 15) | (bits[i >> 3] >> (i & 7) & 1) << 4;
  }
  const int group = i >> 5, l = i & 31;
  if (FORMAT == Q6_K) {
    const int part = group & 3, n = i >> 7;
    const u32 low = block[n * 64 + (part & 1) * 32 + l] >> (part >> 1) * 4 & 15;
    return low | (block[128 + n * 32 + l] >> part * 2 & 3) << 4;
  }
  const u32 low = block[(FORMAT == Q4_K ? 16 : 48) + (group >> 1) * 32 + l] >> (group & 1) * 4 & 15;
  return FORMAT == Q4_K ? low : low | (block[16 + l] >> group & 1) << 4;
}

// The 6-bit scale (which = 0) or minimum (1) of a group.
DEV u8 read_super_byte(const u8* block, int group, int which) {
  const u8* s = block + 4;
  if (group < 4) return s[group + which * 4] & 63;
  return which ? s[group + 4] >> 4 | (s[group] >> 6) << 4 : (s[group + 4] & 15) | (s[group - 4] >> 6) << 4;
}

// The arithmetic of the plain decoder: every product but the last of Q6_K is exact.
DEV float raw_value(const u8* block, int i) {
  if (FORMAT == F16) return read_float(block);
  const float d = read_half(block + (FORMAT == Q6_K ? 208 : 0));
  const int q = read_quant(block, i);
  if (FORMAT == Q6_K)
    return __fmul_rn(__fmul_rn(d, static_cast<float>(static_cast<signed char>(block[192 + i / 16]))), static_cast<float>(q - 32));
  if (HAS_HALF_MIN) return __fadd_rn(__fmul_rn(d, static_cast<float>(q)), read_half(block + 2));
  if (HAS_SUPER_MIN) {
    const float scale = __fmul_rn(d, static_cast<float>(read_super_byte(block, i / 32, 0)));
    const float offset = __fmul_rn(read_half(block + 2), static_cast<float>(read_super_byte(block, i / 32, 1)));
    return __fsub_rn(__fmul_rn(scale, static_cast<float>(q)), offset);
  }
  return __fmul_rn(d, static_cast<float>(q - static_cast<int>(ZERO_POINT)));
}
