// Where a pass's rows go in the cache, and moving an accepted path to its place.
constexpr int NUM_TOKENS = 0, COMMITTED = 1, IS_TREE = 2, PATH_LEN = 3;  // words of control
constexpr int BATCH = 8;  // rows under way at once

DEV int cache_slot(const int* control, const int* positions, int row) {
  return control[IS_TREE] ? control[COMMITTED] + row : positions[row];
}

struct CacheEntry {
  u8* pool;
  int page_bytes, kv_heads, key_bytes, value_bytes;
};

// Node path[d] goes to slot committed + d, in every cache of the list, 16 bytes a thread. A node never lies before its
// place on the path, so a batch that is read before it is written loses nothing that later ones need.
KERNEL void kv_commit_kernel(const int* control, const int* path, const CacheEntry* caches, const int* table) {
  let_later_grids_start();
  wait_for_earlier_grids();
  const CacheEntry entry = caches[blockIdx.y];
  const Cache cache = {entry.pool, table, entry.page_bytes, entry.kv_heads, entry.key_bytes, entry.value_bytes};
  int at = (blockIdx.x * blockDim.x + threadIdx.x) * 16;
  const int count = control[NUM_TOKENS] ? control[PATH_LEN] : 0, committed = control[COMMITTED];
  const int all_keys = cache.kv_heads * cache.key_bytes, all = all_keys + cache.kv_heads * cache.value_bytes;
  if (at >= all) return;
  const bool is_value = at >= all_keys;
  at -= is_value ? all_keys : 0;
  const int head = at / cache.row_bytes(is_value), offset = at % cache.row_bytes(is_value);
  for (int begin = 0; begin < count; begin += BATCH) {
    uint4 found[BATCH];
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (begin + i < count)
        found[i] = *reinterpret_cast<const uint4*>(cache.row(committed + path[begin + i], is_value, head) + offset);
#pragma unroll
    for (int i = 0; i < BATCH; i++)
      if (begin + i < count && path[begin + i] != begin + i)
        *reinterpret_cast<uint4*>(cache.row(committed + begin + i, is_value, head) + offset) = found[i];
  }
}
