// The chance of each candidate after each candidate of the position before (Sampler.rank_edges): its logit plus
// <before[parent] * hidden, after[candidate]>, while all of a position keep their chance. The order of sums is fixed.
constexpr int THREADS = 256, WARPS = THREADS / 32;

// A table's row of a token; the last one stands for tokens after it. row_of: where not every token has a row.
DEV const u8* find_row(const u8* table, int token, const int* row_of, int num_tokens, int num_rows, int width) {
  const int row = row_of ? row_of[min(token, num_tokens - 1)] : token;
  return table + static_cast<u64>(min(row, num_rows - 1)) * (width / BLOCK_LEN * BLOCK_BYTES);
}

DEV float value_at(const u8* row, int i) { return raw_value(row + i / BLOCK_LEN * BLOCK_BYTES, i % BLOCK_LEN); }

DEV float log_sum(const float* values, int count) {
  float top = values[0], total = 0.0f;
  for (int i = 1; i < count; i++) top = fmaxf(top, values[i]);
  for (int i = 0; i < count; i++) total = __fadd_rn(total, expf(values[i] - top));
  return top + logf(total);
}

// Blocks [positions, parents], the anchor alone at the first position; control counts the positions. hidden: a row for
// each. edges, picks: [position][parent][candidate], best first: log-probabilities, and where ids have each candidate.
KERNEL void LAUNCH_BOUNDS(THREADS)
    edges_kernel(const int* ids, const float* log_probs, const int* words, const int* control, const float* hidden,
                 const u8* before, const u8* after, const int* row_of, float* edges, u8* picks, int num_tokens,
                 int num_before, int num_after, int width, int hidden_stride, int count, float later_logits) {
  DYNAMIC_SHARED(memory);
  float* const context = reinterpret_cast<float*>(memory);
  __shared__ float own[MAX_CANDIDATES], scores[MAX_CANDIDATES];
  let_later_grids_start();
  wait_for_earlier_grids();
  const int position = blockIdx.x, parent = blockIdx.y, thread = threadIdx.x;
  if (position >= control[NUM_ROWS] || (position == 0 && parent > 0)) return;
  const int token = position ? ids[(position - 1) * count + parent] : words[ANCHOR];
  const u8* const parent_row = find_row(before, token, row_of, num_tokens, num_before, width);
  for (int i = thread; i < width; i += THREADS)
    context[i] = __fmul_rn(value_at(parent_row, i), hidden[static_cast<u64>(position) * hidden_stride + i]);
  if (thread < count) own[thread] = log_probs[position * count + thread];
  __syncthreads();
  const float weight = position && temperature_of(words) > 0.0f ? later_logits : 1.0f;  // of logits, as in rank.cu
  for (int child = thread / 32; child < count; child += WARPS) {
    const u8* const row = find_row(after, ids[position * count + child], row_of, num_tokens, num_after, width);
    float sum = 0.0f;
    for (int i = thread % 32; i < width; i += 32) sum = __fmaf_rn(context[i], value_at(row, i), sum);
    for (int d = 16; d; d >>= 1) sum = __fadd_rn(sum, __shfl_xor_sync(~0u, sum, d));
    if (thread % 32 == 0) scores[child] = __fmaf_rn(weight, sum, own[child]);
  }
  __syncthreads();
  if (thread >= count) return;
  const float shift = log_sum(own, count) - log_sum(scores, count), score = __fadd_rn(scores[thread], shift);
  int place = 0;  // equal ones stay in the order of ids
  for (int i = 0; i < count; i++) {
    const float other = __fadd_rn(scores[i], shift);
    place += other > score || (other == score && i < thread);
  }
  const int at = (position * count + parent) * count + place;
  edges[at] = score, picks[at] = thread;
}
