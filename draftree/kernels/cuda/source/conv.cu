// Causal convolution of every channel over TAPS tokens, then SiLU. A thread takes four channels through CHUNK rows.
// A layer has two windows of HISTORY committed inputs each, oldest first: the second one counts when exactly second_at
// tokens are committed, the first one otherwise. So who moves on can leave alone what others still read: a short pass
// (gated_delta_rows.cu) writes the window that does not count. Here a thread alone has its channels, and may write the first.
constexpr int HISTORY = TAPS - 1;
constexpr int CHUNK = 16;
constexpr int NUM_TOKENS = 0, COMMITTED = 1, PATH_LEN = 3;  // words of control
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

// The window that counts.
DEV const float* find_window(const float* windows, const int* second_at, const int* control, int channels) {
  return windows + (*second_at == control[COMMITTED] ? HISTORY * channels : 0);
}

// A chain that is kept: its rows follow the window, and the window moves on.
KERNEL void LAUNCH_BOUNDS(128)
    conv_kernel(const int* control, const float* x, const float* weight, float* windows, const int* second_at, float* out, int channels,
                int x_stride, int out_stride) {
  const int vector = blockIdx.x * blockDim.x + threadIdx.x, first = blockIdx.y * CHUNK;
  let_later_grids_start();
  const Taps taps = load_taps(weight, min(vector, channels / 4 - 1));
  wait_for_earlier_grids();
  if (vector * 4 >= channels) return;
  const int live = control[NUM_TOKENS];
  if (first >= live) return;
  const float* window = find_window(windows, second_at, control, channels);
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
  for (int i = 0; i < HISTORY; i++) *at(windows, i, channels, vector) = after[i];
}

struct ConvEntry {
  float *windows, *stash;
  const int* second_at;
};

// Moves the window of every layer along the path; stash: what the last tree kept of its nodes.
KERNEL void LAUNCH_BOUNDS(128)
    conv_commit_kernel(const ConvEntry* layers, const int* control, const int* path, int channels) {
  const int vector = blockIdx.x * blockDim.x + threadIdx.x;
  let_later_grids_start();
  const ConvEntry layer = layers[blockIdx.y];
  wait_for_earlier_grids();
  if (vector * 4 >= channels) return;
  const int length = control[NUM_TOKENS] ? control[PATH_LEN] : 0;
  if (length == 0) return;
  const float* window = find_window(layer.windows, layer.second_at, control, channels);
  float4 after[HISTORY];
#pragma unroll
  for (int i = 0; i < HISTORY; i++) {
    const int node = length - HISTORY + i;
    after[i] = node >= 0 ? *at(layer.stash, path[node], channels, vector) : *at(window, HISTORY + node, channels, vector);
  }
#pragma unroll
  for (int i = 0; i < HISTORY; i++) *at(layer.windows, i, channels, vector) = after[i];
}
