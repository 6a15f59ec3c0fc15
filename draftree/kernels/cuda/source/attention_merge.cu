// Merges the partial results of a row's head in the order of positions: segments of a span, then the spans. Results of
// rotated values are rotated back.
constexpr int QUADS = DIM / 4;
constexpr int ROUND = 32;  // spans between two meetings

DEV void add(float4& state, Factors by, float4 part) {
  state.x = __fmaf_rn(part.x, by.part, __fmul_rn(state.x, by.state));
  state.y = __fmaf_rn(part.y, by.part, __fmul_rn(state.y, by.state));
  state.z = __fmaf_rn(part.z, by.part, __fmul_rn(state.z, by.state));
  state.w = __fmaf_rn(part.w, by.part, __fmul_rn(state.w, by.state));
}

struct State {
  float2 stats;
  float4 sums;
};

// A thread's four dimensions of a span, of which the row sees segments first to last.
DEV State merge_span(const Plan& plan, const float4* partial, const float2* stats, int span, int first, int last, int heads,
                     int column, int quad) {
  const bool is_folded = span >= plan.fold_begin && span < plan.fold_end;
  float2 part_stats[SPAN];
  float4 part[SPAN];
  bool is_seen[SPAN];
#pragma unroll
  for (int i = 0; i < SPAN; i++) {
    const int segment = span * SPAN + i;
    is_seen[i] = is_folded ? i == 0 : plan.is_seen(segment, first, last);
    if (!is_seen[i]) continue;
    const int entry = plan.slot_of(segment) * plan.live * heads + column;
    part_stats[i] = __ldcg(stats + entry);
    part[i] = __ldcg(partial + static_cast<u64>(entry) * QUADS + quad);
  }
  State state = {make_float2(LOWEST, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
#pragma unroll
  for (int i = 0; i < SPAN; i++)
    if (is_seen[i]) add(state.sums, merge(state.stats, part_stats[i]), part[i]);
  return state;
}

// A block a row and head; the threads are groups of QUADS, which share out the spans.
KERNEL void LAUNCH_BOUNDS(1024)
    attention_merge_kernel(const int* control, const int* positions, const float4* partial, const float2* stats, float* out,
                           int out_row, int out_head, int first_row, int num_rows, int kv_heads, int group, int head_dim,
                           int window, int is_bidirectional, int num_blocks) {
  DYNAMIC_SHARED(shared);
  float4* sums = reinterpret_cast<float4*>(shared);  // [ROUND][QUADS]
  __shared__ float2 span_stats[ROUND];
  let_later_grids_start();
  wait_for_earlier_grids();
  const Shape shape = {kv_heads, group, head_dim, window, is_bidirectional};
  const Plan plan = make_plan(control, first_row, num_rows, shape, num_blocks);
  const int row = blockIdx.x, head = blockIdx.y, heads = kv_heads * group;
  if (row >= plan.live) return;
  const int quad = threadIdx.x % QUADS, helper = threadIdx.x / QUADS, num_helpers = blockDim.x / QUADS;
  const int position = positions[row];
  const bool is_whole = !window || (plan.sinks && !plan.sink_segments);  // from the first position on
  const int first = segment_of(max(plan.first, is_whole ? 0 : position - window + 1));
  const int last = segment_of(is_bidirectional ? plan.end - 1 : position);
  const int sink_spans = (plan.sink_segments + SPAN - 1) / SPAN, skipped = max(0, first / SPAN - sink_spans);
  const int num_spans = last / SPAN + 1 - skipped;
  State state = {make_float2(LOWEST, 0.0f), make_float4(0.0f, 0.0f, 0.0f, 0.0f)};
  for (int begin = 0; begin < num_spans; begin += ROUND) {
    const int count = min(ROUND, num_spans - begin);
    for (int i = helper; i < count; i += num_helpers) {
      const int span = begin + i + (begin + i < sink_spans ? 0 : skipped);
      const State found = merge_span(plan, partial, stats, span, first, last, heads, row * heads + head, quad);
      sums[i * QUADS + quad] = found.sums;
      if (quad == 0) span_stats[i] = found.stats;
    }
    __syncthreads();
    if (helper == 0)
      for (int i = 0; i < count; i++) add(state.sums, merge(state.stats, span_stats[i]), sums[i * QUADS + quad]);
    __syncthreads();
  }
  const float sum = state.stats.y;
  float v[4] = {__fdiv_rn(state.sums.x, sum), __fdiv_rn(state.sums.y, sum), __fdiv_rn(state.sums.z, sum),
                __fdiv_rn(state.sums.w, sum)};
  if constexpr (VALUES_ROTATED) rotate_back<4, DIM>(v);
  if (helper || quad * 4 >= head_dim) return;
  *reinterpret_cast<float4*>(out + static_cast<u64>(row) * out_row + head * out_head + quad * 4) =
      make_float4(v[0], v[1], v[2], v[3]);
}
