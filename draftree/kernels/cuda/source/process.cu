// Logits as a request wants them, in place: bias, penalties, then minus infinity for what its grammar forbids.
constexpr int THREADS = 256;

// The arithmetic of kernels/cpu/select.py, operation by operation.
DEV float penalized(float value, int seen, const int* words) {
  if (!seen) return value;
  const float factor = __int_as_float(words[REPETITION]), count = seen & (SEEN - 1);
  value = value > 0.0f ? __fdiv_rn(value, factor) : __fmul_rn(value, factor);
  if (count == 0.0f) return value;
  const float less = __fadd_rn(__int_as_float(words[PRESENCE]), __fmul_rn(__int_as_float(words[FREQUENCY]), count));
  return __fsub_rn(value, less);
}

// Blocks [slices, rows]; what is not wanted is null. Row i is that of node rows[i], which sees what was counted and, if
// there are depths, the tokens on its way from the root. bias, counts: by token, 0 where there is nothing to do, as long as all slices together.
// masks: [nodes][mask_stride], a bit a token.
KERNEL void LAUNCH_BOUNDS(THREADS)
    process_kernel(float* logits, const int* control, const int* words, const float* bias, const int* counts, const int* masks,
                   const int* rows, const int* tokens, const int* depths, const int* ancestors, int max_nodes, int mask_stride,
                   int stride, int vocab) {
  __shared__ int way[MAX_NODES];
  let_later_grids_start();
  wait_for_earlier_grids();
  if (blockIdx.y >= control[NUM_ROWS]) return;
  const int first = blockIdx.x * SLICE, last = min(first + SLICE, vocab), thread = threadIdx.x;
  const int node = rows[blockIdx.y], depth = counts && depths ? depths[node] : 0;
  float* row = logits + static_cast<u64>(blockIdx.y) * stride;
  if (thread < depth) way[thread] = tokens[ancestors[node * max_nodes + thread + 1]];
  __syncthreads();
  // A thread looks after a token on the way, with all that are like it; the others leave those alone at the end.
  int own = -1, more = 0;
  float value = 0.0f;
  if (thread < depth && first <= way[thread] && way[thread] < last) {
    own = way[thread];
    for (int i = 0; i < depth; i++) more += way[i] == own;
    for (int i = 0; i < thread; i++)
      if (way[i] == way[thread]) own = -1;
    if (own >= 0) value = penalized(__fadd_rn(row[own], bias[own]), (counts[own] | SEEN) + more, words);
  }
  __syncthreads();
  if (bias)
    for (int i = first + 4 * thread; i < last; i += 4 * THREADS) {
      const float4 add = *reinterpret_cast<const float4*>(bias + i);
      const int4 seen = counts ? *reinterpret_cast<const int4*>(counts + i) : make_int4(0, 0, 0, 0);
      if (add.x != 0.0f || seen.x) row[i] = penalized(__fadd_rn(row[i], add.x), seen.x, words);
      if (add.y != 0.0f || seen.y) row[i + 1] = penalized(__fadd_rn(row[i + 1], add.y), seen.y, words);
      if (add.z != 0.0f || seen.z) row[i + 2] = penalized(__fadd_rn(row[i + 2], add.z), seen.z, words);
      if (add.w != 0.0f || seen.w) row[i + 3] = penalized(__fadd_rn(row[i + 3], add.w), seen.w, words);
    }
  __syncthreads();
  if (own >= 0) row[own] = value;
  if (!masks) return;
  __syncthreads();
  masks += static_cast<u64>(node) * mask_stride;
  for (int i = first + thread; i < last; i += THREADS)
    if (!(masks[i >> 5] >> (i & 31) & 1)) row[i] = __int_as_float(0xFF800000);
}
