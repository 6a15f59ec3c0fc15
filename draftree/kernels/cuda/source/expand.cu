// Units back to rows of 16-bit floats for cuBLAS, each row divided by its row_scale.
DEV float operand_value(u32 pair, int side, int odd) {
  const float v = side ? upper_half(pair) : lower_half(pair);
  return BITS == 16 ? v * (odd ? 1.0f : 16.0f) : v * (odd ? 0x1p20f : 0x1p24f);
}

// What is added to scale * quant. Lane t has the minima of group t.
DEV float group_offset(const u8* unit, const Scales& s, const Supers& super, int strip, int half, int row, int group, int step, int lane) {
  const Place there = place_in_unit(strip, half, (lane & 28) + group);
  if (HAS_SUPER_MIN) {
    const u32 bytes = *reinterpret_cast<const u32*>(unit + there.min);
    return -super.min[row] * static_cast<float>(bytes >> (half * 16 + row * 8) & 255);
  }
  if (HAS_HALF_MIN) {
    u32 a[4];
    load_min_operands(unit, there, group, a);
    return lower_half(a[half * 2 + row]);
  }
  return FORMAT == F16 ? 0.0f : -ZERO_POINT * group_scale(s, super.scale[row], row, group, step);
}

// A row of half a unit in shared memory; the padding keeps stores of a quarter warp in different banks.
constexpr int LINE = HALF_COLS + 16;

// A block a unit, a warp two strips of one half, by way of shared memory so that whole lines are written.
KERNEL void LAUNCH_BOUNDS(256) expand_kernel(const u8* units, const float* row_scale, u16* out, int num_chunks, int out_stride) {
  __shared__ __align__(16) u16 lines[8][16 * LINE];
  const int lane = threadIdx.x & 31, warp = threadIdx.x >> 5, half = warp & 1;
  const u8* unit = units + static_cast<u64>(blockIdx.x) * UNIT_BYTES;
  const int tile = blockIdx.x / BAND / num_chunks * BAND + blockIdx.x % BAND, chunk = blockIdx.x / BAND % num_chunks;
  for (int m = 0; m < 2; m++) {
    const int strip = (warp >> 1) * 2 + m, first_row = tile * ROWS + strip * 16;
    const Place place = place_in_unit(strip, half, lane);
    const Scales scales = load_scales(unit, place);
    const Supers supers = load_supers(unit, place);
    __syncwarp();
#pragma unroll
    for (int group = 0; group < GROUPS; group++) {
      u32 a[2][4];
      load_operands(unit, place, scales, group, a);
#pragma unroll
      for (int r = 0; r < 2; r++) {
        const int row = (lane >> 2) + r * 8;
        const float unscale = 1.0f / row_scale[first_row + row];
        u16* to = lines[warp] + row * LINE + group * 32 + (lane & 3) * 4;
#pragma unroll
        for (int step = 0; step < 2; step++) {
          const float scale = group_scale(scales, supers.scale[r], r, group, step) * (FORMAT == F16 ? 1.0f : unscale);
          const float offset = group_offset(unit, scales, supers, strip, half, r, group, step, lane) * unscale;
          u32 h[2] = {0, 0};
          for (int i = 0; i < 4; i++) {
            const float q = operand_value(a[step][(i >> 1) * 2 + r], i & 1, i >> 1);
            h[i >> 1] |= static_cast<u32>(to_half(__fmaf_rn(q, scale, offset))) << (i & 1) * 16;
          }
          *reinterpret_cast<uint2*>(to + step * 16) = make_uint2(h[0], h[1]);
        }
      }
    }
    __syncwarp();
    constexpr int LANES = HALF_COLS / 8;  // a row
    u16* to = out + static_cast<u64>(first_row + lane / LANES) * out_stride + chunk * COLS + half * HALF_COLS + lane % LANES * 8;
    for (int row = lane / LANES; row < 16; row += 32 / LANES, to += static_cast<u64>(32 / LANES) * out_stride)
      *reinterpret_cast<uint4*>(to) = *reinterpret_cast<const uint4*>(lines[warp] + row * LINE + lane % LANES * 8);
  }
}

// out[token][row] (+)= product * scales (+ bias), for a slab of rows that cuBLAS has just made. Where product
// is null, out itself is scaled, or with add_to_out divided by the scales, since a product without them is going to be
// added; nothing is done where all scales are 1. `width` threads have a token: a warp or a block.
KERNEL void LAUNCH_BOUNDS(256)
    rescale_kernel(const float* product, const float* row_scale, const float* token_scale, const float* bias, const int* is_plain,
                   float* out, int num_tokens, int width, int slab_rows, int num_rows, int out_stride, int add_to_out) {
  const int token = (blockIdx.x * 256 + threadIdx.x) / width;
  if (token >= num_tokens) return;
  const float scale = token_scale[token];
  if (!product && scale == 1.0f && *is_plain) return;
  float* to = out + static_cast<u64>(token) * out_stride;
  const float* from = product ? product + static_cast<u64>(token) * slab_rows : to;
  for (int row = threadIdx.x % width; row < num_rows; row += width) {
    float y = !product && add_to_out ? from[row] / (row_scale[row] * scale) : from[row] * row_scale[row] * scale;
    if (bias) y += bias[row];
    if (product && add_to_out) y += to[row];
    to[row] = y;
  }
}
