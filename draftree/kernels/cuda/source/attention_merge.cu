// Merges the partial results of a row's head in the order of positions: segments of a span, then the spans. Results of
// rotated values are rotated back.
//
// Each row's head, in pieces of PIECE dimensions, is some block's, which waits for its parts when its own items are done:
// all blocks are on the chip. What a part's weights come to tells by itself that the part has come.
#if FOLDS
using Part = float4;
#else
using Part = uint4;
#endif
constexpr int PIECE = DIM < 128 ? DIM : 128, PIECES = DIM / PIECE;
constexpr int WIDTH = FOLDS ? 4 : 8, PLACES = PIECE / WIDTH;  // dimensions of a thread
constexpr int ROOM = FOLDS ? 64 : 128;                        // spans between two meetings, of all that are merged at once
constexpr u64 NOT_YET = ~0ull;                                // what stats hold until they come, and after that again

#ifndef EMULATED
DEV void leave_stats(float2* to, float2 v) {
  const u64 bits = static_cast<u64>(__float_as_uint(v.y)) << 32 | __float_as_uint(v.x);
  asm volatile("st.release.gpu.global.u64 [%0], %1;" ::"l"(to), "l"(bits) : "memory");
}
DEV u64 look_for_stats(const float2* from) {
  u64 v;
  asm volatile("ld.acquire.gpu.global.u64 %0, [%1];" : "=l"(v) : "l"(from) : "memory");
  return v;
}
#else
DEV void leave_stats(float2* to, float2 v) { *to = v; }
DEV u64 look_for_stats(const float2* from) {
  emulator::spin();
  return *reinterpret_cast<const u64*>(from);
}
#endif

// Waits for a part, which nobody else reads.
DEV float2 take_stats(float2* from) {
  u64 v;
  while ((v = look_for_stats(from)) == NOT_YET) {
  }
  *reinterpret_cast<u64*>(from) = NOT_YET;
  return make_float2(__uint_as_float(static_cast<u32>(v)), __uint_as_float(static_cast<u32>(v >> 32)));
}

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

// What the threads that merge tell each other.
struct Merged {
  float4 sums[ROOM][PIECE / 4];
  float2 stats[ROOM][SPAN], of_spans[ROOM];
};

// The spans that have parts: those of sinks, then those of the pass's windows, or of all.
struct Spans {
  const Plan& plan;
  int of_sinks, skipped, count;

  DEV_MEMBER explicit Spans(const Plan& plan) : plan(plan) {
    of_sinks = (plan.sink_segments + SPAN - 1) / SPAN;
    skipped = max(0, plan.first_segment / SPAN - of_sinks);
    count = plan.last_segment / SPAN + 1 - skipped;
  }
  DEV_MEMBER int at(int index) const { return index + (index < of_sinks ? 0 : skipped); }
  DEV_MEMBER bool is_folded(int span) const { return span >= plan.fold_begin && span < plan.fold_end; }
  DEV_MEMBER bool has_part(int span, int i) const {
    return is_folded(span) ? i == 0 : plan.is_seen(span * SPAN + i, plan.first_segment, plan.last_segment);
  }
};

// A piece of a row's head: index is counted over all.
struct Output {
  int column, row, head, piece;

  DEV_MEMBER Output(int index, int heads) : column(index / PIECES), piece(index % PIECES) {
    row = divide(column, heads), head = column - row * heads;
  }
};

// A thread's dimensions of a span, of which the row sees segments first to last.
DEV State merge_span(const Spans& spans, const Part* partial, const float2* stats, int span, int first, int last, int heads) {
  const Plan& plan = spans.plan;
  Part part[SPAN];
  bool is_seen[SPAN];
#pragma unroll
  for (int i = 0; i < SPAN; i++) {
    const int segment = span * SPAN + i;
    is_seen[i] = spans.has_part(span, i) && (spans.is_folded(span) || plan.is_seen(segment, first, last));
    if (is_seen[i]) part[i] = __ldcg(partial + static_cast<u64>(plan.slot_of(segment) * plan.live * heads) * (DIM / WIDTH));
  }
  State state;
  state.clear();
#pragma unroll
  for (int i = 0; i < SPAN; i++) {
    if (!is_seen[i]) continue;
    float v[WIDTH];
    unpack(part[i], v);
    Factors by = merge(state.stats, stats[i]);
    if (!FOLDS) by.part = __fmul_rn(by.part, stats[i].y);
    state.add(by, v);
  }
  return state;
}

// By all threads that `meet` holds together: groups of PLACES share out spans, of several outputs where there is room.
// Results are so many floats apart, row by row and head by head. Blocks without items begin.
template <class Meet>
DEV void merge_outputs(const Pass& pass, const Plan& plan, const Shape& shape, float* out, int out_row, int out_head,
                       u8* shared, int thread, int num_threads, Meet meet) {
  Merged& merged = *reinterpret_cast<Merged*>(shared);
  const int heads = shape.kv_heads * shape.group, num_outputs = plan.live * heads * PIECES, num_blocks = gridDim.x;
  const int place = thread % PLACES, helper = thread / PLACES, num_helpers = num_threads / PLACES;
  const Spans spans(plan);
  const int most_spans = min(spans.count, ROOM), at_once = min(num_helpers, divide(ROOM, most_spans));
  const bool is_whole = !shape.window || (plan.sinks && !plan.sink_segments);  // from the first position on
  for (int begin = num_blocks - 1 - blockIdx.x; begin < num_outputs; begin += num_blocks * at_once) {
    const int num_here = min(at_once, ceil_div(num_outputs - begin, num_blocks));
    State state;
    state.clear();
    for (int first_span = 0; first_span < spans.count; first_span += most_spans) {
      const int count = min(most_spans, spans.count - first_span);
      meet();  // what is shared has been read
      for (int i = thread; i < num_here * count * SPAN; i += num_threads) {
        const int at = i / SPAN, number = divide(at, count), span = spans.at(first_span + at - number * count);
        if (!spans.has_part(span, i % SPAN)) continue;
        const Output output(begin + number * num_blocks, heads);
        const int entry = plan.slot_of(span * SPAN + i % SPAN) * plan.live * heads + output.column;
        merged.stats[at][i % SPAN] = take_stats(pass.stats + entry * PIECES + output.piece);
      }
      meet();
      for (int at = helper; at < num_here * count; at += num_helpers) {
        const int number = divide(at, count), span = spans.at(first_span + at - number * count);
        const Output output(begin + number * num_blocks, heads);
        const int position = pass.positions[output.row];
        const int first = segment_of(max(plan.first, is_whole ? 0 : position - shape.window + 1));
        const int last = segment_of(shape.is_bidirectional ? plan.end - 1 : position);
        const Part* partial = reinterpret_cast<const Part*>(pass.partial) + output.column * (DIM / WIDTH) + output.piece * PLACES + place;
        const State found = merge_span(spans, partial, merged.stats[at], span, first, last, heads);
#pragma unroll
        for (int j = 0; j < WIDTH; j += 4)
          merged.sums[at][(place * WIDTH + j) / 4] = make_float4(found.sums[j], found.sums[j + 1], found.sums[j + 2], found.sums[j + 3]);
        if (place == 0) merged.of_spans[at] = found.stats;
      }
      meet();
      if (helper < num_here)
        for (int at = helper * count; at < (helper + 1) * count; at++)
          state.add(merge(state.stats, merged.of_spans[at]), reinterpret_cast<const float*>(merged.sums[at]) + place * WIDTH);
    }
    float* v = state.sums;
#pragma unroll
    for (int i = 0; i < WIDTH; i++) v[i] = __fdiv_rn(v[i], state.stats.y);
    if constexpr (VALUES_ROTATED) rotate_back<WIDTH, DIM>(v);
    if (helper >= num_here) continue;
    const Output output(begin + helper * num_blocks, heads);
    const int dim = output.piece * PIECE + place * WIDTH;
    float* to = out + static_cast<u64>(output.row) * out_row + output.head * out_head + dim;
#pragma unroll
    for (int j = 0; j < WIDTH; j += 4)
      if (dim + j < shape.head_dim) *reinterpret_cast<float4*>(to + j) = make_float4(v[j], v[j + 1], v[j + 2], v[j + 3]);
  }
}
