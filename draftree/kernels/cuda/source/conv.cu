// Causal convolution of every channel over TAPS tokens, then SiLU. A thread takes four channels through CHUNK rows.
// window: the last TAPS - 1 committed inputs, oldest first. The first chunk's threads alone read and write it.
constexpr int HISTORY = TAPS - 1;
static_assert(HISTORY <= CHUNK, "the second chunk would read the window too");

struct Taps {
  float w[TAPS][4];
};

DEV Taps load_taps(const float* weight, int vector) {  // weight: [channels][TAPS]
  Taps taps;
#pragma unroll
  for (int i = 0; i < 4 * TAPS; i++) taps.w[i % TAPS][i / TAPS] = weight[vector * 4 * TAPS + i];
  return taps;
}

DEV float4 convolve(const Taps& taps, const float4* in) {
  float4 sum = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#pragma unroll
  for (int t = 0; t < TAPS; t++) {
    sum.x = __fmaf_rn(taps.w[t][0], in[t].x, sum.x), sum.y = __fmaf_rn(taps.w[t][1], in[t].y, sum.y);
    sum.z = __fmaf_rn(taps.w[t][2], in[t].z, sum.z), sum.w = __fmaf_rn(taps.w[t][3], in[t].w, sum.w);
  }
  return make_float4(silu(sum.x), silu(sum.y), silu(sum.z), silu(sum.w));
}

// Row i of four channels.
DEV float4* at(const float* base, int i, int stride, int vector) {
  return const_cast<float4*>(reinterpret_cast<const float4*>(base + static_cast<u64>(i) * stride)) + vector;
}

// A chain that is kept: its rows follow the window, and the window moves on.
DEV void conv_chain(const Taps& taps, const float* x, float* window, float* out, int first, int live, int x_stride, int out_stride,
                    int channels, int vector) {
  float4 in[HISTORY + CHUNK];
#pragma unroll
  for (int i = 0; i < HISTORY + CHUNK; i++) {
    const int row = min(first - HISTORY + i, live - 1);
    in[i] = row >= 0 ? *at(x, row, x_stride, vector) : *at(window, HISTORY + row, channels, vector);
  }
#pragma unroll
  for (int r = 0; r < CHUNK; r++)
    if (first + r < live) *at(out, first + r, out_stride, vector) = convolve(taps, in + r);
  if (first) return;
  float4 after[HISTORY];
#pragma unroll
  for (int i = 0; i < HISTORY; i++) {
    const int row = live - HISTORY + i;
    after[i] = row >= 0 ? *at(x, row, x_stride, vector) : *at(window, HISTORY + row, channels, vector);
  }
#pragma unroll
  for (int i = 0; i < HISTORY; i++) *at(window, i, channels, vector) = after[i];
}

// A tree: a node follows its ancestors, which follow the window; stash keeps the nodes' inputs for a commit.
DEV void conv_tree(const Taps& taps, const float* x, const float* window, float* stash, float* out, const int* depths,
                   const int* ancestors, int first, int live, int x_stride, int out_stride, int channels, int max_nodes, int vector) {
  float4 in[CHUNK][TAPS];
#pragma unroll
  for (int r = 0; r < CHUNK; r++) {
    const int row = min(first + r, live - 1), depth = depths[row];
#pragma unroll
    for (int t = 0; t < TAPS; t++) {
      const int before = depth - HISTORY + t;  // below 0 lies the window
      in[r][t] = before >= 0 ? *at(x, ancestors[row * max_nodes + before], x_stride, vector)
                             : *at(window, HISTORY + before, channels, vector);
    }
  }
#pragma unroll
  for (int r = 0; r < CHUNK; r++) {
    if (first + r >= live) return;
    *at(out, first + r, out_stride, vector) = convolve(taps, in[r]);
    *at(stash, first + r, channels, vector) = in[r][HISTORY];
  }
}

extern "C" __global__ void __launch_bounds__(128)
    conv_kernel(const float* x, const float* weight, float* window, float* stash, float* out, const int* num_tokens, const int* is_tree,
                const int* depths, const int* ancestors, int channels, int x_stride, int out_stride, int max_nodes) {
  const int vector = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * CHUNK;
  let_later_grids_start();
  if (vector * 4 >= channels) return;
  const Taps taps = load_taps(weight, vector);
  wait_for_earlier_grids();
  const int live = *num_tokens;
  if (first >= live) return;
  if (MAY_BE_TREE && *is_tree)
    conv_tree(taps, x, window, stash, out, depths, ancestors, first, live, x_stride, out_stride, channels, max_nodes, vector);
  else
    conv_chain(taps, x, window, out, first, live, x_stride, out_stride, channels, vector);
}

// Moves the window of every layer along the path. states: [layers] address of window and of stash.
extern "C" __global__ void __launch_bounds__(128)
    conv_commit_kernel(float* const* states, const int* num_tokens, const int* path_len, const int* path, int channels) {
  const int vector = blockIdx.x * blockDim.x + threadIdx.x;
  let_later_grids_start();
  if (vector * 4 >= channels) return;
  float* window = states[blockIdx.y * 2];
  const float* stash = states[blockIdx.y * 2 + 1];
  wait_for_earlier_grids();
  const int length = *num_tokens ? *path_len : 0;
  if (length == 0) return;
  float4 after[HISTORY];
#pragma unroll
  for (int i = 0; i < HISTORY; i++) {
    const int node = length - HISTORY + i;
    after[i] = node >= 0 ? *at(stash, path[node], channels, vector) : *at(window, HISTORY + node, channels, vector);
  }
#pragma unroll
  for (int i = 0; i < HISTORY; i++) *at(window, i, channels, vector) = after[i];
}
