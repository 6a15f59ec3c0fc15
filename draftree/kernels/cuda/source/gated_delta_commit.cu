// A path of the last tree goes into the states: what gated_delta.cu kept of its nodes, with the same arithmetic.
// All layers at once; addresses: [layers] state, node keys, node corrections, node decays.
KERNEL void LAUNCH_BOUNDS(THREADS, 768 / THREADS)
    delta_commit_kernel(const u64* addresses, const int* control, const int* path, int key_heads, int value_heads) {
  constexpr int KEY_VECTORS = HEAD_DIM / 4, COLUMN_VECTORS = COLS / 4;
  DYNAMIC_SHARED(memory);  // of GROUP nodes, which are read at once
  float *keys = reinterpret_cast<float*>(memory), *corrections = keys + GROUP * HEAD_DIM;
  __shared__ float decays[GROUP];
  const int slice = blockIdx.x, head = slice / (HEAD_DIM / COLS), column = slice % (HEAD_DIM / COLS) * COLS;
  const u64* layer = addresses + 4 * blockIdx.y;
  let_later_grids_start();
  float* own_state = reinterpret_cast<float*>(layer[0]) + (head * HEAD_DIM + column + first_column()) * HEAD_DIM + first_key();
  const float* node_keys = reinterpret_cast<const float*>(layer[1]) + head % key_heads * HEAD_DIM;
  const float* node_corrections = reinterpret_cast<const float*>(layer[2]) + head * HEAD_DIM + column;
  const float* node_decays = reinterpret_cast<const float*>(layer[3]) + head;
  wait_for_earlier_grids();
  const int path_len = control[PATH_LEN];
  if (path_len <= 0 || control[NUM_TOKENS] <= 0) return;
  Columns columns;
  load_state(own_state, columns);
  for (int first = 0; first < path_len; first += GROUP) {
    const int count = min(GROUP, path_len - first);
    if (first) __syncthreads();
    for (int i = threadIdx.x; i < count * KEY_VECTORS; i += THREADS) {
      const float* from = node_keys + path[first + i / KEY_VECTORS] * key_heads * HEAD_DIM;
      reinterpret_cast<float4*>(keys)[i] = reinterpret_cast<const float4*>(from)[i % KEY_VECTORS];
    }
    for (int i = threadIdx.x; i < count * COLUMN_VECTORS; i += THREADS) {
      const float* from = node_corrections + path[first + i / COLUMN_VECTORS] * value_heads * HEAD_DIM;
      reinterpret_cast<float4*>(corrections)[i] = reinterpret_cast<const float4*>(from)[i % COLUMN_VECTORS];
    }
    if (threadIdx.x < count) decays[threadIdx.x] = node_decays[path[first + threadIdx.x] * value_heads];
    __syncthreads();
#pragma unroll 1
    for (int n = 0; n < count; n++) {
      float k[KEYS];
      load_pieces(keys + n * HEAD_DIM + first_key(), k);
      advance(columns, k, decays[n], *reinterpret_cast<const float2*>(corrections + n * COLS + first_column()));
    }
  }
  store_state(columns, own_state);
}
