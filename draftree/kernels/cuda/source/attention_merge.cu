// Merges the partial results of a row's head in the order of positions: segments of a span, then the spans. Results of
// rotated values are rotated back.
#if FOLDS
using Part = float4;
#else
using Part = uint4;
#endif
constexpr int WIDTH = FOLDS ? 4 : 8, PLACES = DIM / WIDTH;  // dimensions of a thread
constexpr int ROUND = 32;  // spans between two meetings

DEV void unpack(float4 part, float* v) { v[0] = part.x, v[1] = part.y, v[2] = part.z, v[3] = part.w; }
DEV void unpack(uint4 part, float* v) {
  const u32 pairs[4] = {part.x, part.y, part.z, part.w};
#pragma unroll
  for (int i = 0; i < 4; i++) v[2 * i] = lower_half(pairs[i]), v[2 * i + 1] = upper_half(pairs[i]);
}

struct State {
  float2 stats;
  float sums[WIDTH];

  DEV_MEMBER void clear() {
    stats = make_float2(LOWEST, 0.0f);
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sums[i] = 0.0f;
  }
  DEV_MEMBER void add(Factors by, const float* part) {
#pragma unroll
    for (int i = 0; i < WIDTH; i++) sums[i] = __fmaf_rn(part[i], by.part, __fmul_rn(sums[i], by.state));
  }
};

// A thread's dimensions of a span, of which the row sees segments first to last.
DEV State merge_span(const Plan& plan, const Part* partial, const float2* stats, int span, int first, int last, int heads,
                     int column, int place) {
  const bool is_folded = span >= plan.fold_begin && span < plan.fold_end;
  float2 part_stats[SPAN];
  Part part[SPAN];
  bool is_seen[SPAN];
#pragma unroll
  for (int i = 0; i < SPAN; i++) {
    const int segment = span * SPAN + i;
    is_seen[i] = is_folded ? i == 0 : plan.is_seen(segment, first, last);
    if (!is_seen[i]) continue;
    const int entry = plan.slot_of(segment) * plan.live * heads + column;
    part_stats[i] = __ldcg(stats + entry);
    part[i] = __ldcg(partial + static_cast<u64>(entry) * PLACES + place);
  }
  State state;
  state.clear();
#pragma unroll
  for (int i = 0; i < SPAN; i++) {
    if (!is_seen[i]) continue;
    float v[WIDTH];
    unpack(part[i], v);
    Factors by = merge(state.stats, part_stats[i]);
    if (!FOLDS) by.part = __fmul_rn(by.part, part_stats[i].y);
    state.add(by, v);
  }
  return state;
}

// A block a row and head; the threads are groups of PLACES, which share out the spans.
KERNEL void LAUNCH_BOUNDS(1024)
    attention_merge_kernel(const int* control, const int* positions, const Part* partial, const float2* stats, float* out,
                           int out_row, int out_head, int first_row, int num_rows, int kv_heads, int group, int head_dim,
                           int window, int is_bidirectional, int num_blocks) {
  DYNAMIC_SHARED(shared);
  float* sums = reinterpret_cast<float*>(shared);  // [ROUND][DIM]
  __shared__ float2 span_stats[ROUND];
  let_later_grids_start();
  wait_for_earlier_grids();
  const Shape shape = {kv_heads, group, head_dim, window, is_bidirectional};
  const Plan plan = make_plan(control, first_row, num_rows, shape, num_blocks);
  const int row = blockIdx.x, head = blockIdx.y, heads = kv_heads * group;
  if (row >= plan.live) return;
  const int place = threadIdx.x % PLACES, helper = threadIdx.x / PLACES, num_helpers = blockDim.x / PLACES;
  const int position = positions[row];
  const bool is_whole = !window || (plan.sinks && !plan.sink_segments);  // from the first position on
  const int first = segment_of(max(plan.first, is_whole ? 0 : position - window + 1));
  const int last = segment_of(is_bidirectional ? plan.end - 1 : position);
  const int sink_spans = (plan.sink_segments + SPAN - 1) / SPAN, skipped = max(0, first / SPAN - sink_spans);
  const int num_spans = last / SPAN + 1 - skipped;
  State state;
  state.clear();
  for (int begin = 0; begin < num_spans; begin += ROUND) {
    const int count = min(ROUND, num_spans - begin);
    for (int i = helper; i < count; i += num_helpers) {
      const int span = begin + i + (begin + i < sink_spans ? 0 : skipped);
      const State found = merge_span(plan, partial, stats, span, first, last, heads, row * heads + head, place);
      float4* to = reinterpret_cast<float4*>(sums + i * DIM + place * WIDTH);
#pragma unroll
      for (int j = 0; j < WIDTH / 4; j++)
        to[j] = make_float4(found.sums[4 * j], found.sums[4 * j + 1], found.sums[4 * j + 2], found.sums[4 * j + 3]);
      if (place == 0) span_stats[i] = found.stats;
    }
    __syncthreads();
    if (helper == 0)
      for (int i = 0; i < count; i++) state.add(merge(state.stats, span_stats[i]), sums + i * DIM + place * WIDTH);
    __syncthreads();
  }
  const float sum = state.stats.y;
  float* v = state.sums;
#pragma unroll
  for (int i = 0; i < WIDTH; i++) v[i] = __fdiv_rn(v[i], sum);
  if constexpr (VALUES_ROTATED) rotate_back<WIDTH, DIM>(v);
  if (helper) return;
  float* to = out + static_cast<u64>(row) * out_row + head * out_head + place * WIDTH;
#pragma unroll
  for (int j = 0; j < WIDTH; j += 4)
    if (place * WIDTH + j < head_dim) *reinterpret_cast<float4*>(to + j) = make_float4(v[j], v[j + 1], v[j + 2], v[j + 3]);
}
