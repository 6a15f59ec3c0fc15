// The gated delta rule, token by token. Per value head a state S of HEAD_DIM columns with HEAD_DIM keys each:
//   d = beta (v - decay k S),  out = decay q S + (q k) d,  S = decay S + k d.
// Columns do not touch each other. q, k and v come from gated_delta_rows.cu.
// A chain is walked in order and leaves its last state. A tree is walked depth-first, smaller subtrees first: then a
// state must be kept only at nodes with several children that have children of their own, and few at a time
// (num_slots in gated_delta.py). Leaves do not change the state. Per node, k, d and decay remain, and a commit
// repeats the third line with them alone: the same numbers in the same order, so the same bits.

// A visit: the node in the low bits, what is done with the state, and two slots.
constexpr int NODE = 255, KEEPS = 256, SAVES = 512, LOADS = 1024, RELOADS = 2048;
DEV int saved_slot(int visit) { return visit >> 12 & 15; }
DEV int loaded_slot(int visit) { return visit >> 16; }

// The order of a tree, by one warp. KEEPS: a leaf, the state stays its parent's. LOADS, RELOADS: starts from a slot or
// from the committed state instead of the state at hand.
DEV void plan_tree(const int* parents, int max_nodes, int live, int* visits) {
  __shared__ int2 nodes[MAX_ROWS];  // parent, size of the subtree
  __shared__ int ahead[MAX_ROWS], waits[MAX_ROWS], flags[MAX_ROWS];
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int n = lane; n < MAX_ROWS; n += 32) nodes[n] = make_int2(parents[min(n, max_nodes - 1)], 1), flags[n] = 0;
  __syncwarp();
#pragma unroll 1
  for (int n = lane; n < live; n += 32)
    for (int a = nodes[n].x; a >= 0; a = nodes[a].x) atomicAdd(&nodes[a].y, 1);
  __syncwarp();
#pragma unroll 1
  for (int n = lane; n < live; n += 32) {
    const int2 own = nodes[n];
    int before = 0, inner_before = 0, inner_after = 0;  // nodes of siblings' trees; those with more than one, in two parts
#pragma unroll 4
    for (int i = 0; i < live; i++) {
      const int2 other = nodes[i];
      const bool is_sibling = other.x == own.x, is_before = other.y < own.y || (other.y == own.y && i < n);
      before += is_sibling && is_before ? other.y : 0;
      inner_before += is_sibling && is_before && other.y > 1;
      inner_after += is_sibling && !is_before && i != n && other.y > 1;
    }
    const bool is_leaf = own.y == 1;
    ahead[n] = before + 1;
    waits[n] = !is_leaf && inner_after && own.x >= 0;  // the parent's state is needed again after this subtree
    if (waits[n]) atomicOr(flags + own.x, SAVES);
    if (is_leaf) atomicOr(flags + n, KEEPS);
    if (!is_leaf && inner_before) atomicOr(flags + n, own.x < 0 ? RELOADS : LOADS);
  }
  __syncwarp();
#pragma unroll 1
  for (int n = lane; n < live; n += 32) {
    int at = -1, slot = 0;
    for (int a = n; a >= 0; a = nodes[a].x) at += ahead[a], slot += waits[a];
    visits[at] = n | flags[n] | slot << 12 | (slot - waits[n]) << 16;
  }
}

// What a step reads of a row is read on the way through the step before.
DEV void walk(const Layer& p, const Rows& rows, const Place& place, const int* visits, Pass pass, Columns& columns,
              const float* committed) {
  if (pass.live == 0) return;
  const int key_lane = threadIdx.x % KEY_LANES, column = place.head * HEAD_DIM + place.column + first_column();
  const bool is_odd = key_lane & 1;
  // Two lanes store results, the next two corrections.
  const bool has_result = key_lane < 2, stores = key_lane < (pass.is_tree ? 4 : 2);
  float* to = (has_result ? p.out : p.node_corrections) + column + is_odd;
  const int stride = has_result ? p.out_stride : p.value_heads * HEAD_DIM;
  const float *keys = rows.inputs + HEAD_DIM + first_key(), *values = rows.inputs + 2 * HEAD_DIM + first_column();
  const int last = pass.live - 1;
  int visit = visits[0], next = visits[min(1, last)], node = visit & NODE;
  float k[KEYS], q[KEYS];
  load_pieces(keys + node * WIDTH, k);
  load_pieces(keys + node * WIDTH - HEAD_DIM, q);
  float4 gate = rows.gates[node];
  float2 v = *reinterpret_cast<const float2*>(values + node * WIDTH);
#pragma unroll 1
  for (int i = 0; i <= last; i++) {
    const int after = visits[min(i + 2, last)], next_node = next & NODE;
    if (visit & (LOADS | RELOADS)) {
      if (visit & LOADS)
        load_slot(rows.slots, loaded_slot(visit), columns);
      else
        load_state(committed, columns);
    }
    float ks[2] = {dot_keys(columns.s[0], k), dot_keys(columns.s[1], k)};
    const float qs[2] = {dot_keys(columns.s[0], q), dot_keys(columns.s[1], q)};
    load_pieces(keys + next_node * WIDTH - HEAD_DIM, q);
    // Lanes need both sums with k; even ones take the first with q, odd ones the second.
    float q_sum = __fadd_rn(is_odd ? qs[1] : qs[0], __shfl_xor_sync(~0u, is_odd ? qs[0] : qs[1], 1));
    sum_lanes<KEY_LANES, 2>(ks);
#pragma unroll
    for (int l = 2; l < KEY_LANES; l *= 2) q_sum = __fadd_rn(q_sum, __shfl_xor_sync(~0u, q_sum, l));
    const float2 d = make_float2(__fmul_rn(gate.y, __fsub_rn(v.x, __fmul_rn(gate.x, ks[0]))),
                                 __fmul_rn(gate.y, __fsub_rn(v.y, __fmul_rn(gate.x, ks[1]))));
    if (!(visit & KEEPS)) advance(columns, k, gate.x, d);
    load_pieces(keys + next_node * WIDTH, k);
    if (visit & SAVES) save_slot(columns, rows.slots, saved_slot(visit));
    const float own = is_odd ? d.y : d.x;
    if (stores) to[node * stride] = has_result ? __fmaf_rn(gate.z, own, __fmul_rn(gate.x, q_sum)) : own;
    gate = rows.gates[next_node], v = *reinterpret_cast<const float2*>(values + next_node * WIDTH);
    visit = next, next = after, node = next_node;
  }
}

KERNEL void LAUNCH_BOUNDS(THREADS)
    gated_delta_kernel(const int* control, const int* parents, const float* qkv, const float* weight, float* windows, int* second_at,
                       float* stash, const float* alpha, const float* beta, const float* decay, const float* decay_bias, float* state,
                       float* node_keys, float* node_corrections, float* node_decays, float* out, int key_heads, int value_heads,
                       int qkv_stride, int alpha_stride, int beta_stride, int out_stride, int max_rows, int max_nodes) {
  const Layer p = {qkv, weight, windows, second_at, stash, alpha, beta, decay, decay_bias, state, node_keys, node_corrections,
                   node_decays, out, key_heads, value_heads, qkv_stride, alpha_stride, beta_stride, out_stride};
  DYNAMIC_SHARED(memory);
  __shared__ int visits[MAX_ROWS];
  __shared__ u32 origins[MAX_ROWS];
  const Place place = find_place(p);
  Rows rows;
  rows.gates = reinterpret_cast<float4*>(memory);
  rows.taps = reinterpret_cast<float*>(rows.gates + max_rows);
  rows.inputs = rows.taps + (TAPS + 2 * HISTORY) * WIDTH;
  rows.slots = reinterpret_cast<float4*>(rows.inputs + max_rows * WIDTH);
  rows.origins = origins;
  float* block_state = state + (static_cast<u64>(place.head) * HEAD_DIM + place.column) * HEAD_DIM;
  let_later_grids_start();
#pragma unroll
  for (int line = 0; line < COLS * HEAD_DIM / 32; line += THREADS)
    if (line + threadIdx.x < COLS * HEAD_DIM / 32) prefetch_line(block_state + (line + threadIdx.x) * 32);
  if (threadIdx.x < READER_THREADS) read_taps(p, rows, place);
  if (threadIdx.x == 0) prefetch_line(second_at), prefetch_line(decay + place.head), prefetch_line(decay_bias + place.head);
  wait_for_earlier_grids();
  const Pass pass = {min(control[NUM_TOKENS], max_rows), control[COMMITTED], control[IS_TREE] != 0, *second_at == control[COMMITTED]};
  float* own_state = block_state + first_column() * HEAD_DIM + first_key();
  if (threadIdx.x < READER_THREADS) ask_for_inputs(p, rows, place, max_rows);
  Columns columns;
  load_state(own_state, columns);
  if (threadIdx.x >= THREADS - 32) {
    compute_gates(p, rows, place, pass, max_rows);
    if (pass.is_tree)
      plan_tree(parents, max_nodes, pass.live, visits);
    else
      for (int i = threadIdx.x % 32; i < pass.live; i += 32) visits[i] = i;
  }
  if (threadIdx.x < READER_THREADS) {
    if (threadIdx.x < 32) find_origins(rows, pass, parents, max_nodes);
    wait_copies<0>();
    meet_some(1, READER_THREADS);
    if (!pass.is_tree && pass.live > 0) move_window(p, rows, place, pass);
    convolve_rows(p, rows, place, pass);
  }
  __syncthreads();
  walk(p, rows, place, visits, pass, columns, own_state);
  if (!pass.is_tree && pass.live > 0) store_state(columns, own_state);
}
