// Units back to rows of 16-bit floats for the vendor matmul, each row divided by its row_scale.
constexpr float SCALE_UNIT = HAS_BYTES ? 0x1p23f : 1.0f;

DEV float operand_value(u32 pair, int side, int odd) {
  const float v = side ? upper_half(pair) : lower_half(pair);
  return BITS == 16 ? v * (odd ? 1.0f : 16.0f) : v * (odd && BITS < 8 ? 0x1p20f : 0x1p24f);
}

// What is added to scale * quant, for the row and the group of 32 columns that lane t serves in another place.
DEV float group_offset(const u8* unit, const Scales& s, int strip, int half, int row, int group, int step, int lane) {
  if (HAS_SUPER_MIN) {
    const u32 bytes = reinterpret_cast<const u32*>(unit + MIN_AT)[strip * 32 + (lane & 28) + group];
    const u32 word = reinterpret_cast<const u32*>(unit + SUPER_AT)[(strip * 8 + (lane >> 2)) * 2 + row];
    return -upper_half(word) * static_cast<float>(bytes >> (half * 16 + row * 8) & 255);
  }
  if (HAS_HALF_MIN) {
    u32 a[2];
    select_half(unit + MIN_AT, strip * 2 + half, group, lane, a);
    return lower_half(a[row]);
  }
  return FORMAT == F16 ? 0.0f : -ZERO_POINT * SCALE_UNIT * group_scale(s, row, group, step);
}

extern "C" __global__ void __launch_bounds__(256) expand_kernel(const u8* units, const float* row_scale, u16* out, int num_chunks, int out_stride) {
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, half = warp & 1;
  const u8* unit = units + static_cast<u64>(blockIdx.x) * UNIT_BYTES;
  const int tile = blockIdx.x / num_chunks, chunk = blockIdx.x % num_chunks;
  for (int m = 0; m < 2; m++) {
    const int strip = (warp >> 1) * 2 + m;
    const Scales scales = load_scales(unit, strip, half, lane);
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      u32 a[2][4];
      load_operands(unit, scales, strip, half, group, lane, a);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = tile * ROWS + strip * 16 + (lane >> 2) + r * 8;
        const float unscale = FORMAT == F16 ? 1.0f : 1.0f / row_scale[row];
        u16* to = out + static_cast<u64>(row) * out_stride + chunk * COLS + half * HALF_COLS + group * 32 + (lane & 3) * 4;
#pragma unroll
        for (int step = 0; step < 2; step++) {
          const float scale = group_scale(scales, r, group, step) * SCALE_UNIT;
          const float offset = group_offset(unit, scales, strip, half, r, group, step, lane);
          u32 h[2] = {0, 0};
          for (int i = 0; i < 4; i++) {
            const float q = operand_value(a[step][(i >> 1) * 2 + r], i & 1, i >> 1);
            h[i >> 1] |= static_cast<u32>(to_half((q * scale + offset) * unscale)) << (i & 1) * 16;
          }
          *reinterpret_cast<uint2*>(to + step * 16) = make_uint2(h[0], h[1]);
        }
      }
    }
  }
}

// out[token][row] (+)= product * scales (+ bias), for a slab of rows that the vendor matmul has just made.
extern "C" __global__ void rescale_kernel(const float* product, const float* row_scale, const float* token_scale, const float* bias,
                                          float* out, int slab_rows, int num_rows, int out_stride, int add_to_out) {
  const int row = blockIdx.x * blockDim.x + threadIdx.x, token = blockIdx.y;
  if (row >= num_rows) return;
  float* to = out + static_cast<u64>(token) * out_stride + row;
  float y = product[static_cast<u64>(token) * slab_rows + row] * row_scale[row] * token_scale[token];
  if (bias) y += bias[row];
  if (add_to_out) y += *to;
  *to = y;
}
