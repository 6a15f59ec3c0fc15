// Queries in place, keys and values into a cache: the norm of every query and key, then the turn of its first 2 * half
// values by the row's position; values go as they are. Keys are rotated where KEYS_ROTATED, and queries with them,
// values where VALUES_ROTATED. Where CENTRED, a centre is taken from keys before they turn, and queries leave what turns
// it back into scores (kv_cache.py).
// A warp a head of HEAD_DIM numbers: the queries come first, then the planes of the cache.
constexpr int WARPS = 8;
constexpr int NUMBERS = (HEAD_DIM + 31) / 32;  // of a lane

// A lane's eight dimensions of a row in shared memory.
DEV void load_eight(const float* row, float* x) {
  const int lane = threadIdx.x & 31;
#pragma unroll
  for (int i = 0; i < 8; i++) x[i] = lane * 8 < HEAD_DIM ? row[lane * 8 + i] : 0.0f;
}

template <int CODE, bool IS_ROTATED>
DEV void put(const float* row, u8* to) {
  if constexpr (CODE == HALF) {
    for (int i = threadIdx.x & 31; i < HEAD_DIM / 8; i += 32) reinterpret_cast<uint4*>(to)[i] = pack_eight(row + i * 8);
  } else {
    float x[8];
    load_eight(row, x);
    if constexpr (IS_ROTATED) rotate<8, HEAD_DIM>(x);
    store_row<CODE, HEAD_DIM>(x, to);
  }
}

// table: [positions][half] cosine and sine, or none: no turn. A norm is a weight [HEAD_DIM], or none.
KERNEL void LAUNCH_BOUNDS(WARPS * 32)
    rotary_kernel(const int* control, const int* positions, float* q, const float* q_norm, float q_eps, int q_heads,
                  int q_stride, const float* k, const float* k_norm, float k_eps, int k_stride, const float* v,
                  int v_stride, u8* pool, const int* pages, int page_bytes, int kv_heads, int key_bytes,
                  int value_bytes, const float2* table, int half, int is_interleaved, const float* centre, float* folded,
                  int folded_stride) {
  DYNAMIC_SHARED(shared);  // [WARPS][HEAD_DIM]
  const int row = blockIdx.x, lane = threadIdx.x & 31;
  const int head = blockIdx.y * WARPS + (threadIdx.x >> 5), plane = head - q_heads;
  const bool is_query = plane < 0, is_value = plane >= kv_heads;
  let_later_grids_start();
  const float* norm = is_query ? q_norm : is_value ? nullptr : k_norm;
  float w[NUMBERS], x[NUMBERS], squares = 0.0f;
#pragma unroll
  for (int j = 0; j < NUMBERS; j++) w[j] = norm && lane + j * 32 < HEAD_DIM ? norm[lane + j * 32] : 0.0f;
  wait_for_earlier_grids();
  if (plane >= 2 * kv_heads) return;
  const int num_live = control[NUM_TOKENS], position = positions[row], slot = cache_slot(control, positions, row);
  const float* from = is_query ? q : is_value ? v : k;
  from += static_cast<u64>(row) * (is_query ? q_stride : is_value ? v_stride : k_stride);
  from += (is_query ? head : is_value ? plane - kv_heads : plane) * HEAD_DIM;
#pragma unroll
  for (int j = 0; j < NUMBERS; j++) x[j] = lane + j * 32 < HEAD_DIM ? from[lane + j * 32] : 0.0f;
#pragma unroll
  for (int j = 0; j < NUMBERS; j++) squares = __fmaf_rn(x[j], x[j], squares);
  for (int d = 16; d; d >>= 1) squares = __fadd_rn(squares, __shfl_xor_sync(~0u, squares, d));
  if (row >= num_live) return;
  const float mean = squares / static_cast<float>(HEAD_DIM);
  const float factor = 1.0f / sqrtf(__fadd_rn(mean, is_query ? q_eps : k_eps));
  float* turned = reinterpret_cast<float*>(shared) + (threadIdx.x >> 5) * HEAD_DIM;
#pragma unroll
  for (int j = 0; j < NUMBERS; j++) {
    if (norm) x[j] = __fmul_rn(__fmul_rn(x[j], factor), w[j]);
    if (CENTRED && plane >= 0 && !is_value && lane + j * 32 < HEAD_DIM)
      x[j] = __fsub_rn(x[j], centre[plane * HEAD_DIM + lane + j * 32]);
    if (lane + j * 32 < HEAD_DIM) turned[lane + j * 32] = x[j];
  }
  __syncwarp();
  for (int i = lane; i < half && !is_value; i += 32) {
    const int at = is_interleaved ? 2 * i : i, beside = is_interleaved ? at + 1 : at + half;
    const float2 angle = table[static_cast<u64>(position) * half + i];
    const float a = turned[at], b = turned[beside];
    turned[at] = __fmaf_rn(a, angle.x, -__fmul_rn(b, angle.y));
    turned[beside] = __fmaf_rn(b, angle.x, __fmul_rn(a, angle.y));
  }
  __syncwarp();
  const Cache cache = {pool, pages, page_bytes, kv_heads, key_bytes, value_bytes};
  if (CENTRED && is_query) {
    const float* c = centre + head / (q_heads / kv_heads) * HEAD_DIM;
    float* to = folded + static_cast<u64>(row) * folded_stride + head * HEAD_DIM;
    for (int i = lane; i < half; i += 32) {
      const int at = is_interleaved ? 2 * i : i, beside = is_interleaved ? at + 1 : at + half;
      to[i] = __fmaf_rn(turned[at], c[at], __fmul_rn(turned[beside], c[beside]));
      to[half + i] = __fmaf_rn(turned[beside], c[at], -__fmul_rn(turned[at], c[beside]));
    }
  }
  if (is_query) {
    float4* to = reinterpret_cast<float4*>(q + static_cast<u64>(row) * q_stride + head * HEAD_DIM);
    if constexpr (KEYS_ROTATED) {
      float y[8];
      load_eight(turned, y);
      rotate<8, HEAD_DIM>(y);
      if (lane * 8 >= HEAD_DIM) return;
      to[2 * lane] = make_float4(y[0], y[1], y[2], y[3]), to[2 * lane + 1] = make_float4(y[4], y[5], y[6], y[7]);
    } else {
      for (int i = lane; i < HEAD_DIM / 4; i += 32) to[i] = reinterpret_cast<const float4*>(turned)[i];
    }
  } else if (is_value) {
    put<VALUE_CODE, VALUES_ROTATED>(turned, cache.row(slot, true, plane - kv_heads));
  } else {
    put<KEY_CODE, KEYS_ROTATED>(turned, cache.row(slot, false, plane));
  }
}
