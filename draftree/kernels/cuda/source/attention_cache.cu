// Where rows go in a cache of keys and values, and moving an accepted path to its place.
// A cache is [keys, values][kv_heads][capacity][head_dim] halves; slot = position for committed tokens, a tree's
// nodes take the slots after them in node order.
constexpr int NUM_TOKENS = 0, COMMITTED = 1, IS_TREE = 2, PATH_LEN = 3;  // words of control
constexpr int BATCH = 8;  // rows under way at once

DEV float clamp_half(float v) { return fminf(fmaxf(v, -65504.0f), 65504.0f); }
DEV u32 pack_halves(float even, float odd) {
  return to_half(clamp_half(even)) | static_cast<u32>(to_half(clamp_half(odd))) << 16;
}

DEV uint4 pack_eight(const float* from) {
  const float4 a = reinterpret_cast<const float4*>(from)[0], b = reinterpret_cast<const float4*>(from)[1];
  return make_uint4(pack_halves(a.x, a.y), pack_halves(a.z, a.w), pack_halves(b.x, b.y), pack_halves(b.z, b.w));
}

DEV int cache_slot(const int* control, const int* positions, int row) {
  return control[IS_TREE] ? control[COMMITTED] + row : positions[row];
}

struct CacheEntry {
  uint4* cache;
  int planes, chunks;
};

// Node path[d] goes to slot committed + d, in every cache of the table. A node never lies before its place on the
// path, so a batch that is read before it is written loses nothing that later ones need.
extern "C" __global__ void kv_commit_kernel(const int* control, const int* path, const CacheEntry* table, int capacity) {
  let_later_grids_start();
  wait_for_earlier_grids();
  const CacheEntry entry = table[blockIdx.y];
  const int at = blockIdx.x * blockDim.x + threadIdx.x, count = control[NUM_TOKENS] ? control[PATH_LEN] : 0;
  if (at >= entry.planes * entry.chunks) return;
  const u64 slot = static_cast<u64>(at / entry.chunks) * capacity + control[COMMITTED];
  uint4* first = entry.cache + slot * entry.chunks + at % entry.chunks;
  for (int begin = 0; begin < count; begin += BATCH) {
    uint4 found[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (begin + i < count) found[i] = first[path[begin + i] * entry.chunks];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (begin + i < count && path[begin + i] != begin + i) first[(begin + i) * entry.chunks] = found[i];
  }
}
