// Rows of keys and values on their way into the cache. A warp has a row: lane l its dimensions 8 l … 8 l + 7, lanes
// behind it zeros.
DEV float clamp_half(float v) { return fminf(fmaxf(v, -65504.0f), 65504.0f); }
DEV u32 pack_halves(float even, float odd) {
  return to_half(clamp_half(even)) | static_cast<u32>(to_half(clamp_half(odd))) << 16;
}

DEV uint4 pack_eight(const float* v) {
  return make_uint4(pack_halves(v[0], v[1]), pack_halves(v[2], v[3]), pack_halves(v[4], v[5]), pack_halves(v[6], v[7]));
}

// A lane's COUNT dimensions, at a multiple of them within those that are rotated together.
template <int COUNT>
DEV void flip_signs(float* x) {
  const int dim = threadIdx.x % 32 * COUNT % ROTATED;
  const u32 bits = (dim & 64 ? (dim & 32 ? 0x9D2C5680 : 0x1B873593) : (dim & 32 ? 0xCC9E2D51 : 0xE6546B64)) >> dim % 32;
#pragma unroll
  for (int i = 0; i < COUNT; i++) x[i] = bits >> i & 1 ? -x[i] : x[i];
}

// The orthonormal Walsh-Hadamard transform of every ROTATED dimensions, or of the whole head.
template <int COUNT, int HEAD>
DEV void transform(float* x) {
  constexpr int ORDER = HEAD < ROTATED ? HEAD : ROTATED;
#pragma unroll
  for (int step = 1; step < COUNT; step *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; i++)
      if (!(i & step)) {
        const float a = x[i], b = x[i + step];
        x[i] = __fadd_rn(a, b), x[i + step] = __fsub_rn(a, b);
      }
#pragma unroll
  for (int step = 1; step < ORDER / COUNT; step *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
      const float other = __shfl_xor_sync(~0u, x[i], step);
      x[i] = threadIdx.x & step ? __fsub_rn(other, x[i]) : __fadd_rn(x[i], other);
    }
  constexpr float factor = ORDER == 128 ? 0.08838834764831845f : 0.125f;
  static_assert(ORDER == 128 || ORDER == 64, "heads of 64, 128 or 256");
#pragma unroll
  for (int i = 0; i < COUNT; i++) x[i] = __fmul_rn(x[i], factor);
}

template <int COUNT, int HEAD>
DEV void rotate(float* x) { flip_signs<COUNT>(x), transform<COUNT, HEAD>(x); }
template <int COUNT, int HEAD>
DEV void rotate_back(float* x) { transform<COUNT, HEAD>(x), flip_signs<COUNT>(x); }

template <int LANES>
DEV float sum_lanes(float v) {
#pragma unroll
  for (int d = 1; d < LANES; d *= 2) v = __fadd_rn(v, __shfl_xor_sync(~0u, v, d));
  return v;
}

DEV float sum_squares(const float* x) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < 8; i++) sum = __fmaf_rn(x[i], x[i], sum);
  return sum;
}

// The number of the largest magnitude in a group; the lower dimension of two alike.
template <int GROUP>
DEV float farthest(const float* x) {
  float top = x[0];
#pragma unroll
  for (int i = 1; i < 8; i++) top = fabsf(x[i]) > fabsf(top) ? x[i] : top;
#pragma unroll
  for (int d = 1; d < GROUP / 8; d *= 2) {
    const float other = __shfl_xor_sync(~0u, top, d);
    const bool is_later = threadIdx.x & d;
    top = fabsf(other) > fabsf(top) || (is_later && fabsf(other) == fabsf(top)) ? other : top;
  }
  return top;
}

DEV float inverse(float v) { return v == 0.0f ? 0.0f : __fdiv_rn(1.0f, v); }

// The index of the nearest of COUNT levels, as many as it passes borders of.
template <int COUNT>
DEV int nearest(float v) {
  constexpr float fours[7] = {0.421875f, 0.8125f, 1.25f, 1.75f, 2.25f, 2.75f, 3.5f}, threes[3] = {1.0f, 2.0f, 3.25f};
  int index = 0;
#pragma unroll
  for (int i = 0; i < COUNT - 1; i++) index += fabsf(v) > (COUNT == 8 ? fours[i] : threes[i]);
  return index;
}

// Level indices of a lane and the group's scale.
template <int COUNT, int GROUP>
DEV float choose_levels(const float* x, int* index) {
  constexpr float eight[8] = {0.21875f, 0.625f, 1.0f, 1.5f, 2.0f, 2.5f, 3.0f, 4.0f}, four[4] = {0.5f, 1.5f, 2.5f, 4.0f};
  const float rms = sqrtf(__fdiv_rn(sum_lanes<GROUP / 8>(sum_squares(x)), static_cast<float>(GROUP)));
  const float factor = __fmul_rn(COUNT == 8 ? 1.54f : 1.91f, inverse(rms));
  float found[8];
#pragma unroll
  for (int i = 0; i < 8; i++) {
    index[i] = nearest<COUNT>(__fmul_rn(x[i], factor));
    float level = COUNT == 8 ? eight[0] : four[0];
#pragma unroll
    for (int j = 1; j < COUNT; j++) level = index[i] == j ? (COUNT == 8 ? eight[j % 8] : four[j % 4]) : level;
    found[i] = level;
  }
  return __fdiv_rn(rms, sqrtf(__fdiv_rn(sum_lanes<GROUP / 8>(sum_squares(found)), static_cast<float>(GROUP))));
}

DEV u32 pack_levels_4(const float* x, const int* index) {
  u32 word = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) word |= index[i] << 4 * i | static_cast<u32>(x[i] < 0.0f) << (i % 4 * 8 + (i < 4 ? 7 : 3));
  return word;
}

// Two bits a dimension for the lane, and the signs of four lanes' dimensions for the first of them.
DEV u32 pack_levels_3(const float* x, const int* index, u32& signs) {
  u32 word = 0;
  signs = 0;
#pragma unroll
  for (int i = 0; i < 8; i++) {
    word |= index[i] << (i % 4 * 4 + i / 4 * 2);
    signs |= static_cast<u32>(x[i] < 0.0f) << (i % 4 * 8 + 7 - i / 4);
  }
  signs >>= (threadIdx.x & 3) * 2;
#pragma unroll
  for (int d = 1; d < 4; d *= 2) signs |= __shfl_xor_sync(~0u, signs, d);
  return word;
}

// All lanes call; what is to be rotated is rotated.
template <int CODE, int HEAD>
DEV void store_row(const float* x, u8* row) {
  typedef Row<CODE, HEAD> Form;
  const int lane = threadIdx.x & 31;
  const bool is_inside = lane * 8 < HEAD;
  float scale;
  u32 signs = 0, word = 0, fifths = 0;
  uint2 bytes = make_uint2(0, 0);
  if constexpr (CODE == BYTE) {
    scale = __fdiv_rn(fabsf(farthest<Form::GROUP>(x)), 127.0f);
    const float by = inverse(scale);
    u32 v[2] = {0, 0};
#pragma unroll
    for (int i = 0; i < 8; i++) v[i / 4] |= (__float2int_rn(__fmul_rn(x[i], by)) & 255) << i % 4 * 8;
    bytes = make_uint2(v[0], v[1]);
  } else if constexpr (CODE == NIBBLE || CODE == FIVE) {
    constexpr int MOST = CODE == FIVE ? 16 : 8;
    scale = __fdiv_rn(farthest<Form::GROUP>(x), static_cast<float>(-MOST));
    const float by = inverse(scale);
#pragma unroll
    for (int i = 0; i < 8; i++) {
      const int n = max(0, min(2 * MOST - 1, __float2int_rd(__fadd_rn(__fmul_rn(x[i], by), MOST + 0.5f))));
      word |= (n & 15) << (i % 2 * 16 + i / 2 * 4);
      fifths |= n >> 4 << (i % 2 * 4 + i / 2);
    }
  } else {
    int index[8];
    scale = choose_levels<CODE == LEVELS_4 ? 8 : 4, Form::GROUP>(x, index);
    word = CODE == LEVELS_4 ? pack_levels_4(x, index) : pack_levels_3(x, index, signs);
  }
  if (!is_inside) return;
  if constexpr (CODE == BYTE) reinterpret_cast<uint2*>(row)[lane] = bytes;
  else if constexpr (CODE == LEVELS_3) {
    reinterpret_cast<u16*>(row)[lane] = word;
    if (lane % 4 == 0) reinterpret_cast<u32*>(row + HEAD / 4)[lane / 4] = signs;
  } else reinterpret_cast<u32*>(row)[lane] = word;
  if constexpr (CODE == FIVE) row[HEAD / 2 + lane] = fifths;
  if (lane * 8 % Form::GROUP == 0) reinterpret_cast<u16*>(row + Form::DATA)[lane * 8 / Form::GROUP] = to_half(clamp_half(scale));
}
