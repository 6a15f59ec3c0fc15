// Cached rows as half floats, for attention over long prompts: a warp a key and value of a head, values rotated back.
// Where CENTRED, keys get back what was taken from them.
constexpr int WARPS = 8;

DEV void to_floats(uint4 v, float* x) {
  x[0] = lower_half(v.x), x[1] = upper_half(v.x), x[2] = lower_half(v.y), x[3] = upper_half(v.y);
  x[4] = lower_half(v.z), x[5] = upper_half(v.z), x[6] = lower_half(v.w), x[7] = upper_half(v.w);
}

// A head's centre, turned by a position's angles: cosines, then sines.
DEV void turn_centre(const float* centre, const u16* angles, int half, int is_interleaved, float* x) {
#pragma unroll
  for (int i = 0; i < 8; i++) {
    const int dim = (threadIdx.x & 31) * 8 + i, pair = is_interleaved ? dim / 2 : dim % half;
    const bool is_second = is_interleaved ? dim & 1 : dim >= half;
    const int other = is_interleaved ? dim ^ 1 : is_second ? dim - half : dim + half;
    x[i] = 0.0f;
    if (dim >= 2 * half) continue;
    const float sine = from_half(angles[half + pair]);
    x[i] = __fmaf_rn(centre[dim], from_half(angles[pair]), __fmul_rn(centre[other], is_second ? sine : -sine));
  }
}

// keys, values: [kv_heads][count][HEAD_DIM]; slots first … first + count - 1.
KERNEL void LAUNCH_BOUNDS(WARPS * 32)
    kv_expand_kernel(u8* pool, const int* pages, int page_bytes, int kv_heads, int key_bytes, int value_bytes, int first,
                     int count, uint4* keys, uint4* values, const float* centre, const u16* angles, int half,
                     int is_interleaved) {
  const Cache cache = {pool, pages, page_bytes, kv_heads, key_bytes, value_bytes};
  const int at = blockIdx.x * WARPS + threadIdx.x / 32, head = blockIdx.y, lane = threadIdx.x & 31;
  let_later_grids_start();
  wait_for_earlier_grids();
  if (at >= count) return;
  const u8 *key = cache.row(first + at, false, head), *value = cache.row(first + at, true, head);
  const u64 row = (static_cast<u64>(head) * count + at) * (HEAD_DIM / 8);
  if constexpr (CENTRED) {
    float x[8], shared_by_all[8];
    turn_centre(centre + head * HEAD_DIM, angles + static_cast<u64>(first + at) * HEAD_DIM, half, is_interleaved, shared_by_all);
    if constexpr (KEYS_ROTATED) rotate<8, HEAD_DIM>(shared_by_all);
    if (lane * 8 < HEAD_DIM) {
      to_floats(decode_eight<KEY_CODE, HEAD_DIM>(key, lane), x);
#pragma unroll
      for (int i = 0; i < 8; i++) x[i] = __fadd_rn(x[i], shared_by_all[i]);
      keys[row + lane] = pack_eight(x);
    }
  } else {
    for (int chunk = lane; chunk < HEAD_DIM / 8; chunk += 32) keys[row + chunk] = decode_eight<KEY_CODE, HEAD_DIM>(key, chunk);
  }
  if constexpr (VALUES_ROTATED) {
    const bool is_inside = lane * 8 < HEAD_DIM;
    const uint4 v = is_inside ? decode_eight<VALUE_CODE, HEAD_DIM>(value, lane) : make_uint4(0, 0, 0, 0);
    float x[8];
    to_floats(v, x);
    rotate_back<8, HEAD_DIM>(x);
    if (is_inside) values[row + lane] = pack_eight(x);
  } else {
    for (int chunk = lane; chunk < HEAD_DIM / 8; chunk += 32)
      values[row + chunk] = decode_eight<VALUE_CODE, HEAD_DIM>(value, chunk);
  }
}
