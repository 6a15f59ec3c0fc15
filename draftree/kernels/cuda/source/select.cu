// The best few of many: scores and tokens as one word each. A larger word is a larger score or, with equal scores,
// a lower token, so no two are alike and the result does not depend on the order in which threads come. 0 is no key.
constexpr int THREADS = 256;
constexpr int GROUP = 4;  // threads that share a candidate for the floor
constexpr int GROUPS = THREADS / GROUP;
constexpr int ROOM = 1024;  // keys that can be listed
static_assert(MAX_TOP_K <= GROUPS, "the floor is found among the groups");

DEV float minus_infinity() { return __int_as_float(0xFF800000); }

DEV u32 ordered(float score) {
  const u32 bits = __float_as_uint(__fadd_rn(score, 0.0f));  // no negative zero
  return bits >> 31 ? ~bits : bits | 0x80000000u;
}

DEV u64 lowest_key(float score) { return static_cast<u64>(ordered(score)) << 32; }
DEV u64 key_of(float score, int token) { return lowest_key(score) | static_cast<u32>(~token); }
DEV int token_of(u64 key) { return ~static_cast<u32>(key); }

DEV float score_of(u64 key) {
  const u32 bits = key >> 32;
  return __uint_as_float(bits >> 31 ? bits ^ 0x80000000u : ~bits);
}

struct Best {
  u64 groups[GROUPS];
  u64 keys[ROOM];
  u64 sorted[MAX_TOP_K];
  u64 floor;
  int num_keys;
  int is_last;
};

// Keys is what threads bring, `num` each: score(i), which is cheap, and key(i), which is 0 where there is none.

// Lists the keys from floor on; returns how many there are, in the list or beyond it.
template <class Keys>
DEV int list_keys(const Keys& keys, int num, u64 floor, Best* best) {
  const float lowest = score_of(floor);  // not a number if everything counts
  if (threadIdx.x == 0) best->num_keys = 0;
  __syncthreads();
#pragma unroll 2
  for (int i = 0; i < num; i++) {
    if (keys.score(i) < lowest) continue;
    const u64 key = keys.key(i);
    if (key < floor) continue;
    const int at = atomicAdd(&best->num_keys, 1);
    if (at < ROOM) best->keys[at] = key;
  }
  __syncthreads();
  const int num_keys = best->num_keys;
  __syncthreads();
  return num_keys;
}

// A floor that `count` groups of threads reach: few keys more than that are above it.
template <class Keys>
DEV u64 guess_floor(const Keys& keys, int num, int count, Best* best) {
  float top = minus_infinity();
  int place_of_top = -1;
#pragma unroll 8
  for (int i = 0; i < num; i++) {
    const float score = keys.score(i);
    if (score > top) top = score, place_of_top = i;
  }
  u64 largest = place_of_top < 0 ? 0 : keys.key(place_of_top);
  for (int d = 1; d < GROUP; d *= 2) largest = max(largest, __shfl_xor_sync(~0u, largest, d));
  const int part = threadIdx.x % GROUP;
  if (part == 0) best->groups[threadIdx.x / GROUP] = largest;
  if (threadIdx.x == 0) best->floor = 1;
  __syncthreads();
  int above = 0;
  for (int i = part; i < GROUPS; i += GROUP) above += best->groups[i] > largest;
  for (int d = 1; d < GROUP; d *= 2) above += __shfl_xor_sync(~0u, above, d);
  if (part == 0 && above == count - 1 && largest) best->floor = largest;
  __syncthreads();
  return best->floor;
}

// Lists at least the `count` best keys, or all if there are fewer, and all whose score is at most slack below the last
// of those. Returns how many, or more than ROOM if these did not fit, which without slack cannot be.
template <class Keys>
DEV int list_best(const Keys& keys, int num, int count, float slack, Best* best) {
  u64 floor = guess_floor(keys, num, count, best), low = floor, high = ~0ull;
  int num_keys = list_keys(keys, num, floor, best);
  while (num_keys > ROOM) {  // many large ones in few groups
    const u64 middle = low + (high - low) / 2;
    const int above = list_keys(keys, num, middle, best);
    if (above < count)
      high = middle;
    else
      low = floor = middle, num_keys = above;
  }
  if (slack == 0.0f || floor == 1) return num_keys;
  const float score = score_of(floor);
  return list_keys(keys, num, max(1ull, lowest_key(score - slack - 1e-6f * fabsf(score))), best);
}

// The `count` best of those listed, in order; where there are fewer, 0.
DEV void sort_listed(int num_keys, int count, Best* best) {
  if (threadIdx.x < count) best->sorted[threadIdx.x] = 0;
  __syncthreads();
  for (int i = threadIdx.x; i < num_keys; i += THREADS) {
    const u64 key = best->keys[i];
    int above = 0;
    for (int j = 0; j < num_keys; j++) above += best->keys[j] > key;
    if (above < count) best->sorted[above] = key;
  }
  __syncthreads();
}

// Whether this is the last of num_blocks blocks to come here; it then sees what the others have written.
DEV bool is_last_block(int* arrived, int num_blocks, Best* best) {
  __threadfence();
  __syncthreads();
  if (threadIdx.x == 0) {
    best->is_last = atomicAdd(arrived, 1) == num_blocks - 1;
    if (best->is_last) *arrived = 0;
    __threadfence();
  }
  __syncthreads();
  return best->is_last;
}

template <class T>
DEV T block_sum(T value, T* parts) {
  for (int d = 16; d; d >>= 1) value += __shfl_xor_sync(~0u, value, d);
  if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = value;
  __syncthreads();
  value = parts[0];
  for (int i = 1; i < THREADS / 32; i++) value += parts[i];
  __syncthreads();
  return value;
}
