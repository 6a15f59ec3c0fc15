// The gated delta rule, token by token. Per value head a state S of HEAD_DIM columns with HEAD_DIM keys each:
//   d = beta (v - decay k S),  out = decay q S + (q k) d,  S = decay S + k d.
// Columns do not touch each other. A block has COLS columns of a head, a lane KEYS keys of two columns, in registers.
// A chain is walked in order and leaves its last state. A tree is walked depth-first, smaller subtrees first: then a
// state must be kept only at nodes with several children that have children of their own, and few at a time
// (num_slots in gated_delta.py). Leaves do not change the state. Per node, k, d and decay remain, and a commit
// repeats the third line with them alone: the same numbers in the same order, so the same bits.
constexpr int KEY_LANES = HEAD_DIM < 32 ? HEAD_DIM / LANE_KEYS : 8;  // lanes that share a column
constexpr int PIECES = HEAD_DIM / (LANE_KEYS * KEY_LANES);           // vectors of 4 keys that a lane has
constexpr int KEYS = PIECES * LANE_KEYS;
constexpr int WARP_COLS = 2 * 32 / KEY_LANES;
constexpr int WARPS = COLS / WARP_COLS;
constexpr int THREADS = WARPS * 32;
constexpr int READERS = WARPS > 1 ? WARPS - 1 : 1;  // warps that read keys, while the last one plans the walk
constexpr int MAX_ROWS = 64;
constexpr int NUM_TOKENS = 0, IS_TREE = 2, PATH_LEN = 3;  // words of control

struct Columns {
  float s[2][KEYS];
};

// Where a thread's keys of its two columns are: piece p of column c at + c HEAD_DIM + p LANE_KEYS KEY_LANES.
DEV int first_column() { return threadIdx.x / 32 * WARP_COLS + threadIdx.x % 32 / KEY_LANES * 2; }
DEV int first_key() { return threadIdx.x % KEY_LANES * LANE_KEYS; }

DEV void load_pieces(const float* from, float* to) {
#pragma unroll
  for (int p = 0; p < PIECES; p++) {
    const float4 v = *reinterpret_cast<const float4*>(from + p * LANE_KEYS * KEY_LANES);
    to[4 * p] = v.x, to[4 * p + 1] = v.y, to[4 * p + 2] = v.z, to[4 * p + 3] = v.w;
  }
}

DEV void load_state(const float* from, Columns& columns) {
  load_pieces(from, columns.s[0]);
  load_pieces(from + HEAD_DIM, columns.s[1]);
}

DEV void store_state(const Columns& columns, float* to) {
#pragma unroll
  for (int c = 0; c < 2; c++)
#pragma unroll
    for (int p = 0; p < PIECES; p++) {
      const float* s = columns.s[c] + 4 * p;
      *reinterpret_cast<float4*>(to + c * HEAD_DIM + p * LANE_KEYS * KEY_LANES) = make_float4(s[0], s[1], s[2], s[3]);
    }
}

// Slots in shared memory: [slot][vector][thread].
DEV void save_slot(const Columns& columns, float4* slots, int slot) {
#pragma unroll
  for (int i = 0; i < 2 * PIECES; i++) {
    const float* s = columns.s[i / PIECES] + i % PIECES * 4;
    slots[(slot * 2 * PIECES + i) * THREADS + threadIdx.x] = make_float4(s[0], s[1], s[2], s[3]);
  }
}

DEV void load_slot(const float4* slots, int slot, Columns& columns) {
#pragma unroll
  for (int i = 0; i < 2 * PIECES; i++) {
    const float4 v = slots[(slot * 2 * PIECES + i) * THREADS + threadIdx.x];
    float* s = columns.s[i / PIECES] + i % PIECES * 4;
    s[0] = v.x, s[1] = v.y, s[2] = v.z, s[3] = v.w;
  }
}

DEV float dot_keys(const float* s, const float* k) {
  float sum = 0.0f;
#pragma unroll
  for (int i = 0; i < KEYS; i++) sum = __fmaf_rn(k[i], s[i], sum);
  return sum;
}

DEV void advance(Columns& columns, const float* k, float decay, float2 d) {
#pragma unroll
  for (int i = 0; i < KEYS; i++) {
    columns.s[0][i] = __fmaf_rn(k[i], d.x, __fmul_rn(decay, columns.s[0][i]));
    columns.s[1][i] = __fmaf_rn(k[i], d.y, __fmul_rn(decay, columns.s[1][i]));
  }
}

struct Layer {
  const float* qkv;                 // [rows][qkv_stride]: queries, keys, values
  const float *alpha, *beta;        // [rows][value heads], own strides
  const float *decay, *decay_bias;  // [value heads]
  float* state;                     // [value heads][column][key]
  float* node_keys;                 // [max nodes][key heads][HEAD_DIM]
  float* node_corrections;          // [max nodes][value heads][HEAD_DIM]
  float* node_decays;               // [max nodes][value heads]
  float* out;                       // [rows][out_stride]
  int key_heads, value_heads, qkv_stride, alpha_stride, beta_stride, out_stride;
};

// What a block needs of every row, in shared memory.
struct Rows {
  float *keys, *queries;  // [rows][HEAD_DIM], unit vectors, queries scaled
  float* values;          // [rows][COLS]
  float4* gates;          // [rows] decay, beta, q k
  float4* slots;
};

struct Place {
  int head, column;  // of the block
};

// Rows that are not live are read, too: how many are, is not known yet.
DEV void read_keys(const Layer& p, const Rows& rows, Place place, int max_rows, int num_kept) {
  constexpr int BATCH = 5;  // rows that a warp asks for at once
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, head = place.head % p.key_heads;
  if (warp >= READERS) return;
#pragma unroll 1
  for (int first = 0; first < max_rows; first += READERS * BATCH) {
    float4 q[BATCH], k[BATCH];
    float sums[3 * BATCH];
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const int row = first + b * READERS + warp;
      const float* from = p.qkv + static_cast<u64>(row) * p.qkv_stride + head * HEAD_DIM;
      q[b] = load_lane(from, lane, row < max_rows);
      k[b] = load_lane(from + p.key_heads * HEAD_DIM, lane, row < max_rows);
      sums[3 * b] = dot4(q[b], q[b]), sums[3 * b + 1] = dot4(k[b], k[b]), sums[3 * b + 2] = dot4(q[b], k[b]);
    }
    sum_lanes<32, 3 * BATCH>(sums);
#pragma unroll
    for (int b = 0; b < BATCH; b++) {
      const int row = first + b * READERS + warp;
      const float q_factor = __fmul_rn(query_scale(), unit_factor(sums[3 * b])), k_factor = unit_factor(sums[3 * b + 1]);
      const float4 key = scaled(k[b], k_factor);
      if (row >= max_rows) continue;
      if (lane == 0) rows.gates[row].z = __fmul_rn(__fmul_rn(sums[3 * b + 2], q_factor), k_factor);
      if (lane * LANE_KEYS >= HEAD_DIM) continue;
      reinterpret_cast<float4*>(rows.keys + row * HEAD_DIM)[lane] = key;
      reinterpret_cast<float4*>(rows.queries + row * HEAD_DIM)[lane] = scaled(q[b], q_factor);
      if (row < num_kept) reinterpret_cast<float4*>(p.node_keys + (row * p.key_heads + head) * HEAD_DIM)[lane] = key;
    }
  }
}

DEV void ask_for_values(const Layer& p, const Rows& rows, Place place, int max_rows) {
  const float* values = p.qkv + (2 * p.key_heads + place.head) * HEAD_DIM + place.column;
#pragma unroll 1
  for (int i = threadIdx.x; i < max_rows * (COLS / 4); i += THREADS)
    copy16_async(rows.values + 4 * i, values + static_cast<u64>(i / (COLS / 4)) * p.qkv_stride + i % (COLS / 4) * 4);
  commit_copies();
}

// What a thread asks for of its rows before it is needed.
struct Early {
  float alpha, beta;
};
constexpr int OWN_ROWS = (MAX_ROWS + THREADS - 1) / THREADS;

DEV void compute_gates(const Layer& p, const Rows& rows, Place place, const Early* early, int max_rows, int num_kept) {
  const float rate = p.decay[place.head], bias = p.decay_bias[place.head];
#pragma unroll 1
  for (int j = 0; j < OWN_ROWS; j++) {
    const int row = threadIdx.x + j * THREADS;
    if (row >= max_rows) return;
    const float decay = expf(log_decay(early[j].alpha, rate, bias));
    rows.gates[row].x = decay, rows.gates[row].y = sigmoid(early[j].beta);
    if (row < num_kept) p.node_decays[row * p.value_heads + place.head] = decay;
  }
}

// A visit: the node in the low bits, what is done with the state, and two slots.
constexpr int NODE = 255, KEEPS = 256, SAVES = 512, LOADS = 1024, RELOADS = 2048;
DEV int saved_slot(int visit) { return visit >> 12 & 15; }
DEV int loaded_slot(int visit) { return visit >> 16; }

// The order of a tree, by one warp. KEEPS: a leaf, the state stays its parent's. LOADS, RELOADS: starts from a slot or
// from the committed state instead of the state at hand.
DEV void plan_tree(const int* parents, int live, int* visits) {
  __shared__ int2 nodes[MAX_ROWS];  // parent, size of the subtree
  __shared__ int ahead[MAX_ROWS], waits[MAX_ROWS], flags[MAX_ROWS];
  const int lane = threadIdx.x % 32;
#pragma unroll
  for (int j = 0; j < MAX_ROWS / 32; j++) nodes[lane + j * 32] = make_int2(parents[j], 1), flags[lane + j * 32] = 0;
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

DEV void walk(const Layer& p, const Rows& rows, Place place, const int* visits, int live, bool is_tree, Columns& columns,
              const float* committed) {
  const int key = first_key(), column = first_column(), key_lane = threadIdx.x % KEY_LANES;
  const bool is_odd = key_lane & 1;
  float* out = p.out + place.head * HEAD_DIM + place.column + column + is_odd;
  float* corrections = p.node_corrections + place.head * HEAD_DIM + place.column + column;
  int next = visits[0];
#pragma unroll 1
  for (int i = 0; i < live; i++) {
    const int visit = next, node = visit & NODE;
    next = visits[min(i + 1, live - 1)];
    if (visit & LOADS) load_slot(rows.slots, loaded_slot(visit), columns);
    if (visit & RELOADS) load_state(committed, columns);
    float k[KEYS], q[KEYS];
    load_pieces(rows.keys + node * HEAD_DIM + key, k);
    load_pieces(rows.queries + node * HEAD_DIM + key, q);
    const float4 gate = rows.gates[node];
    const float2 v = *reinterpret_cast<const float2*>(rows.values + node * COLS + column);
    float ks[2] = {dot_keys(columns.s[0], k), dot_keys(columns.s[1], k)};
    const float qs[2] = {dot_keys(columns.s[0], q), dot_keys(columns.s[1], q)};
    // Lanes need both sums with k; even ones take the first with q, odd ones the second.
    float q_sum = __fadd_rn(is_odd ? qs[1] : qs[0], __shfl_xor_sync(~0u, is_odd ? qs[0] : qs[1], 1));
    sum_lanes<KEY_LANES, 2>(ks);
#pragma unroll
    for (int l = 2; l < KEY_LANES; l *= 2) q_sum = __fadd_rn(q_sum, __shfl_xor_sync(~0u, q_sum, l));
    const float2 d = make_float2(__fmul_rn(gate.y, __fsub_rn(v.x, __fmul_rn(gate.x, ks[0]))),
                                 __fmul_rn(gate.y, __fsub_rn(v.y, __fmul_rn(gate.x, ks[1]))));
    if (!(visit & KEEPS)) advance(columns, k, gate.x, d);
    if (visit & SAVES) save_slot(columns, rows.slots, saved_slot(visit));
    if (key_lane < 2)
      out[static_cast<u64>(node) * p.out_stride] = __fmaf_rn(gate.z, is_odd ? d.y : d.x, __fmul_rn(gate.x, q_sum));
    if (is_tree && key_lane == 2) *reinterpret_cast<float2*>(corrections + node * p.value_heads * HEAD_DIM) = d;
  }
}

extern "C" __global__ void __launch_bounds__(THREADS)
    gated_delta_kernel(const int* control, const int* parents, const float* qkv, const float* alpha, const float* beta,
                       const float* decay, const float* decay_bias, float* state, float* node_keys, float* node_corrections,
                       float* node_decays, float* out, int key_heads, int value_heads, int qkv_stride, int alpha_stride,
                       int beta_stride, int out_stride, int max_rows, int max_nodes) {
  const Layer p = {qkv, alpha, beta, decay, decay_bias, state, node_keys, node_corrections, node_decays, out,
                   key_heads, value_heads, qkv_stride, alpha_stride, beta_stride, out_stride};
  extern __shared__ __align__(128) u8 memory[];
  __shared__ int visits[MAX_ROWS];
  const Place place = {static_cast<int>(blockIdx.x) / (HEAD_DIM / COLS), static_cast<int>(blockIdx.x) % (HEAD_DIM / COLS) * COLS};
  float* block_state = state + (static_cast<u64>(place.head) * HEAD_DIM + place.column) * HEAD_DIM;
  let_later_grids_start();
#pragma unroll
  for (int line = 0; line < COLS * HEAD_DIM / 32; line += THREADS)
    if (line + threadIdx.x < COLS * HEAD_DIM / 32) prefetch_line(block_state + (line + threadIdx.x) * 32);
  wait_for_earlier_grids();
  const int live = min(control[NUM_TOKENS], max_rows);
  const bool is_tree = control[IS_TREE] != 0;
  float* own_state = block_state + first_column() * HEAD_DIM + first_key();
  Columns columns;
  load_state(own_state, columns);
  Early early[OWN_ROWS];
#pragma unroll
  for (int j = 0; j < OWN_ROWS; j++) {
    const int row = min(static_cast<int>(threadIdx.x) + j * THREADS, max_rows - 1);
    early[j].alpha = alpha[static_cast<u64>(row) * alpha_stride + place.head];
    early[j].beta = beta[static_cast<u64>(row) * beta_stride + place.head];
  }
  int own_parents[MAX_ROWS / 32];
#pragma unroll
  for (int j = 0; j < MAX_ROWS / 32; j++) own_parents[j] = parents[min(static_cast<int>(threadIdx.x) % 32 + j * 32, max_nodes - 1)];
  Rows rows;
  rows.gates = reinterpret_cast<float4*>(memory);
  rows.keys = reinterpret_cast<float*>(rows.gates + max_rows);
  rows.queries = rows.keys + max_rows * HEAD_DIM;
  rows.values = rows.queries + max_rows * HEAD_DIM;
  rows.slots = reinterpret_cast<float4*>(rows.values + max_rows * COLS);
  ask_for_values(p, rows, place, max_rows);
  // The first slice of a head keeps its decays, and its keys where no head before it has the same.
  const int num_kept = is_tree && place.column == 0 ? live : 0;
  if (threadIdx.x / 32 == WARPS - 1) {
    if (is_tree)
      plan_tree(own_parents, live, visits);
    else
      for (int i = threadIdx.x % 32; i < live; i += 32) visits[i] = i;
  }
  read_keys(p, rows, place, max_rows, place.head < key_heads ? num_kept : 0);
  compute_gates(p, rows, place, early, max_rows, num_kept);
  wait_copies<0>();
  __syncthreads();
  walk(p, rows, place, visits, live, is_tree, columns, own_state);
  if (!is_tree && live > 0) store_state(columns, own_state);
}

// All layers at once; addresses: [layers] state, node keys, node corrections, node decays.
extern "C" __global__ void __launch_bounds__(THREADS, 768 / THREADS)
    delta_commit_kernel(const u64* addresses, const int* control, const int* path, int key_heads, int value_heads) {
  constexpr int GROUP = 8, KEY_VECTORS = HEAD_DIM / 4, COLUMN_VECTORS = COLS / 4;  // nodes read at once
  __shared__ __align__(16) float keys[GROUP * HEAD_DIM], corrections[GROUP * COLS], decays[GROUP];
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
