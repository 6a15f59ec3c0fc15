// Cached rows as half floats, for attention over long prompts: a warp a key and value of a head, values rotated back.
constexpr int WARPS = 8;

// keys, values: [kv_heads][count][HEAD_DIM]; slots first … first + count - 1.
KERNEL void LAUNCH_BOUNDS(WARPS * 32)
    kv_expand_kernel(u8* pool, const int* pages, int page_bytes, int kv_heads, int key_bytes, int value_bytes, int first,
                     int count, uint4* keys, uint4* values) {
  const Cache cache = {pool, pages, page_bytes, kv_heads, key_bytes, value_bytes};
  const int at = blockIdx.x * WARPS + threadIdx.x / 32, head = blockIdx.y, lane = threadIdx.x & 31;
  let_later_grids_start();
  wait_for_earlier_grids();
  if (at >= count) return;
  const u8 *key = cache.row(first + at, false, head), *value = cache.row(first + at, true, head);
  const u64 row = (static_cast<u64>(head) * count + at) * (HEAD_DIM / 8);
  for (int chunk = lane; chunk < HEAD_DIM / 8; chunk += 32) keys[row + chunk] = decode_eight<KEY_CODE, HEAD_DIM>(key, chunk);
  if constexpr (VALUES_ROTATED) {
    const bool is_inside = lane * 8 < HEAD_DIM;
    const uint4 v = is_inside ? decode_eight<VALUE_CODE, HEAD_DIM>(value, lane) : make_uint4(0, 0, 0, 0);
    float x[8] = {lower_half(v.x), upper_half(v.x), lower_half(v.y), upper_half(v.y),
                  lower_half(v.z), upper_half(v.z), lower_half(v.w), upper_half(v.w)};
    rotate_back<8, HEAD_DIM>(x);
    if (is_inside) values[row + lane] = pack_eight(x);
  } else {
    for (int chunk = lane; chunk < HEAD_DIM / 8; chunk += 32)
      values[row + chunk] = decode_eight<VALUE_CODE, HEAD_DIM>(value, chunk);
  }
}
