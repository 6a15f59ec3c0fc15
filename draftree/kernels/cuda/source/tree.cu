// The draft tree of decode/tree.py, node for node: what was looked up, then always the most probable node that is not there
// yet. One warp grows it; costs are sums in the same order and precision as on the host.
// With HAS_EDGES each candidate of a position has a row of those after it (edges.cu); else all share the position's row.
constexpr int THREADS = 64;  // a thread a node when the arrays are written
static_assert(MAX_NODES <= THREADS, "a thread has one node");

constexpr int ROOM = MAX_NODES * MAX_CANDIDATES;  // for log-probabilities; what is more stays where it is

struct Growth {
  float log_probs[ROOM];
  u8 picks[HAS_EDGES ? ROOM : 16];
  // Nodes; the root is 0.
  int parents[MAX_NODES], depths[MAX_NODES], ranks[MAX_NODES];
  int pick_of[MAX_NODES];  // where ids have the node; with edges alone, as its rank says it otherwise
  int sizes[MAX_NODES], before[MAX_NODES];
  int num_nodes;
  // What was looked up: node i is token i - 1 of it. The draft's first choices share so many of them.
  int looked[MAX_LOOKED], num_looked, num_shared;
  // Candidates for the next node, at most one more than nodes have been taken: where and which, and costs of the paths.
  int places[MAX_NODES], depth[MAX_NODES], rank[MAX_NODES];
  double costs[MAX_NODES], place_costs[MAX_NODES];
};
static_assert(sizeof(Growth) <= GROWTH_BYTES, "as in tree.py");

// A row has num_candidates of at most `stride`, best first. picks: where ids have each of them.
struct Rows {
  const int* ids;  // [positions][stride]
  const float* log_probs;  // [positions][stride], with edges [positions][stride of the position before][stride]
  const u8* picks;
  int num_positions, num_candidates, stride;
  DEV_MEMBER int at(int depth, int before, int rank) const {
    return (HAS_EDGES ? depth * stride + (depth ? before : 0) : depth) * stride + rank;
  }
  DEV_MEMBER int pick(int at, int rank) const { return HAS_EDGES ? picks[at] : rank; }
  DEV_MEMBER int token(int depth, int pick) const { return ids[depth * stride + pick]; }
};

// Smaller costs are smaller words; all ones stands for no candidate.
DEV u64 ordered_cost(double cost) {
  const u64 bits = __double_as_longlong(__dadd_rn(cost, 0.0));  // no negative zero
  return bits >> 63 ? ~bits : bits | 1ull << 63;
}

// The rank that a candidate's path has at a depth.
DEV int rank_at(const Growth& g, int slot, int depth) {
  if (depth == g.depth[slot]) return g.rank[slot];
  int node = g.places[slot];
  while (g.depths[node] > depth + 1) node = g.parents[node];
  return g.ranks[node];
}

// Whether the ranks on the way to a come before those of b. Neither is a continuation of the other.
DEV bool comes_first(const Growth& g, int a, int b) {
  for (int depth = 0; depth <= g.depth[a] && depth <= g.depth[b]; depth++) {
    const int rank_a = rank_at(g, a, depth), rank_b = rank_at(g, b, depth);
    if (rank_a != rank_b) return rank_a < rank_b;
  }
  return false;
}

// The slot with the least cost; a lane looks after slots lane and lane + 32. -1 if there is none.
DEV int least_slot(const Growth& g, u64 low, u64 high) {
  const u64 own = min(low, high);
  const u32 upper = __reduce_min_sync(~0u, static_cast<u32>(own >> 32));
  const u32 lower = __reduce_min_sync(~0u, own >> 32 == upper ? static_cast<u32>(own) : ~0u);
  const u64 least = static_cast<u64>(upper) << 32 | lower;
  if (least == ~0ull) return -1;
  const u32 low_slots = __ballot_sync(~0u, low == least), high_slots = __ballot_sync(~0u, high == least);
  u64 slots = static_cast<u64>(high_slots) << 32 | low_slots;
  int slot = __ffsll(slots) - 1;
  for (slots &= slots - 1; slots; slots &= slots - 1)
    if (comes_first(g, __ffsll(slots) - 1, slot)) slot = __ffsll(slots) - 1;
  return slot;
}

// The first nodes: what was looked up. By all threads.
DEV void begin_growth(Growth& g) {
  const int node = threadIdx.x;
  if (node >= MAX_NODES) return;
  g.parents[node] = node - 1, g.depths[node] = node, g.ranks[node] = 0;
}

// By one warp, with the first nodes in place.
DEV void grow(Growth& g, const Rows& rows, int budget) {
  const int lane = threadIdx.x;
  int num_nodes = g.num_looked + 1, num_slots = 1, num_shared = 0;
  u64 low = ~0ull, high = ~0ull;
  if (lane == 0) {
    g.places[0] = g.depth[0] = g.rank[0] = 0;
    g.place_costs[0] = 0.0, g.costs[0] = -static_cast<double>(rows.log_probs[0]);
    low = ordered_cost(g.costs[0]);
  }
  __syncwarp();
  while (num_nodes <= budget) {
    const int slot = least_slot(g, low, high);
    if (slot < 0) break;
    const int place = g.places[slot], depth = g.depth[slot], rank = g.rank[slot];
    const int at = rows.at(depth, HAS_EDGES ? g.pick_of[place] : 0, rank), pick = rows.pick(at, rank);
    const double cost = g.costs[slot], place_cost = g.place_costs[slot];
    // A looked-up node is numbered by its depth.
    const bool is_looked = depth < g.num_looked && place == depth && rows.token(depth, pick) == g.looked[depth];
    const int node = is_looked ? depth + 1 : num_nodes++;
    num_shared += is_looked && rank == 0 && depth == num_shared;
    const bool has_sibling = rank + 1 < rows.num_candidates, has_child = depth + 1 < rows.num_positions;
    const double beside = has_sibling ? __dadd_rn(place_cost, -static_cast<double>(rows.log_probs[at + 1])) : 0.0;
    const double below = has_child ? __dadd_rn(cost, -static_cast<double>(rows.log_probs[rows.at(depth + 1, pick, 0)])) : 0.0;
    __syncwarp();
    if (lane == 0) {
      g.parents[node] = place, g.depths[node] = depth + 1, g.ranks[node] = rank;
      if (HAS_EDGES) g.pick_of[node] = pick;
      g.rank[slot] = rank + 1, g.costs[slot] = beside;  // the sibling takes the slot over
      if (has_child) {
        g.places[num_slots] = node, g.depth[num_slots] = depth + 1, g.rank[num_slots] = 0;
        g.place_costs[num_slots] = cost, g.costs[num_slots] = below;
      }
    }
    const u64 beside_word = has_sibling ? ordered_cost(beside) : ~0ull, below_word = ordered_cost(below);
    if (lane == slot) low = beside_word;
    if (lane + 32 == slot) high = beside_word;
    if (has_child) {
      if (lane == num_slots) low = below_word;
      if (lane + 32 == num_slots) high = below_word;
      num_slots++;
    }
    __syncwarp();
  }
  if (lane == 0) g.num_nodes = num_nodes, g.num_shared = num_shared;
}

// Where a node stands when the tree is walked depth first, children in the order of their numbers.
DEV int find_place(Growth& g, int node) {
  const bool is_node = node < g.num_nodes;
  g.sizes[node] = 0;
  __syncthreads();
  if (is_node)
    for (int a = node; a >= 0; a = g.parents[a]) atomicAdd(&g.sizes[a], 1);
  __syncthreads();
  int before = 0;
  for (int other = 1; is_node && other < node; other++)
    if (g.parents[other] == g.parents[node]) before += g.sizes[other];
  g.before[node] = before;
  __syncthreads();
  int place = is_node ? g.depths[node] : 0;
  for (int a = node; is_node && a > 0; a = g.parents[a]) place += g.before[a];
  return place;
}

// The step becomes a speculative pass over the nodes, of which each thread has one.
DEV void write_pass(Growth& g, int num_nodes, int token, int* control, int* tokens, int* positions, int* parents, int* depths,
                    int* order, int* rows, int* ancestors, int max_nodes) {
  const int node = threadIdx.x, place = find_place(g, node);
  if (node == 0) {
    control[NUM_TOKENS] = control[NUM_ROWS] = num_nodes;
    control[IS_TREE] = 1, control[PATH_LEN] = 0;
  }
  if (node >= num_nodes) return;
  const int depth = g.depths[node];
  tokens[node] = token;
  positions[node] = control[COMMITTED] + depth;
  parents[node] = g.parents[node], depths[node] = depth;
  order[place] = node, rows[node] = node;
  for (int a = node; a >= 0; a = g.parents[a]) ancestors[node * max_nodes + g.depths[a]] = a;
}

// The log-probabilities, and with edges what belongs to them, come closer where there is room. By all threads.
DEV Rows load_rows(Growth& g, const int* ids, const float* log_probs, const u8* picks, int num_positions, int num_candidates, int stride) {
  const int num_values = num_positions * stride * (HAS_EDGES ? stride : 1);
  const bool fits = !HAS_EDGES || num_values <= ROOM;
  if (!HAS_EDGES)
    for (int i = threadIdx.x; i < num_values; i += THREADS) g.log_probs[i] = log_probs[i];
  if (HAS_EDGES && fits) {  // whole vectors, the last of which may reach further
#pragma unroll 8
    for (int i = threadIdx.x; i * 4 < num_values; i += THREADS)
      reinterpret_cast<float4*>(g.log_probs)[i] = reinterpret_cast<const float4*>(log_probs)[i];
    for (int i = threadIdx.x; i * 16 < num_values; i += THREADS)
      reinterpret_cast<uint4*>(g.picks)[i] = reinterpret_cast<const uint4*>(picks)[i];
  }
  return {ids, fits ? g.log_probs : log_probs, fits ? g.picks : picks, num_positions, num_candidates, stride};
}

// One block. The step becomes a pass over the tree, or over nothing when the request has ended. match, text: where what
// follows was found, see lookup.cu, or null. drafted: if there is, it gets the tree instead: the number of nodes, tokens,
// parents; it may lie in the host's memory. Such a tree has more nodes than the budget, of which the host takes some.
KERNEL void LAUNCH_BOUNDS(THREADS)
    tree_kernel(const int* ids, const float* log_probs, const u8* picks, int* words, u64* match, const int* text, int* drafted, int* control,
                int* tokens, int* positions, int* parents, int* depths, int* order, int* rows, int* ancestors,
                int block_positions, int num_candidates, int width, int limit, int max_nodes) {
  DYNAMIC_SHARED(memory);
  Growth& g = *reinterpret_cast<Growth*>(memory);
  let_later_grids_start();
  wait_for_earlier_grids();
  const int node = threadIdx.x, committed = control[COMMITTED];
  const bool is_live = is_running(words);
  const int budget = min(words[BUDGET], limit - 1);
  const int room = min(min(words[TOKENS_LEFT] - 1, words[MAX_CTX] - committed - 1), budget);
  const int num_positions = max(0, min(room, block_positions)), from = match ? static_cast<u32>(*match) : 0;
  const int num_looked = from ? max(0, min(min(committed + 1 - from, room), min(words[LOOKED_LIMIT], MAX_LOOKED))) : 0;
  if (node < num_looked) g.looked[node] = text[from + node];
  if (node == 0) g.num_looked = words[NUM_LOOKED] = num_looked;
  const Rows candidates = load_rows(g, ids, log_probs, picks, num_positions, min(min(budget, width), num_candidates), num_candidates);
  __syncthreads();
  if (node == 0 && match) *match = 0;
  begin_growth(g);
  if (node == 0) g.num_nodes = num_looked + 1, g.num_shared = 0;
  __syncthreads();
  if (node < 32 && num_positions > 0 && is_live) grow(g, candidates, drafted ? limit - 1 : budget);
  __syncthreads();
  const int num_nodes = is_live ? g.num_nodes : 0, depth = g.depths[node];
  int token = words[ANCHOR];
  if (node && node < num_nodes) token = node > num_looked ? candidates.token(depth - 1, HAS_EDGES ? g.pick_of[node] : g.ranks[node]) : g.looked[node - 1];
  if (drafted) {
    if (node == 0) drafted[0] = num_nodes;
    if (node < num_nodes) drafted[1 + node] = token, drafted[1 + MAX_NODES + node] = g.parents[node];
    return;
  }
  if (node == 0) words[NUM_SHARED] = g.num_shared;
  write_pass(g, num_nodes, token, control, tokens, positions, parents, depths, order, rows, ancestors, max_nodes);
}

// One block. The same for a tree of the host: the number of nodes, tokens, parents.
KERNEL void LAUNCH_BOUNDS(THREADS)
    plan_tree_kernel(const int* tree, const int* words, int* control, int* tokens, int* positions, int* parents, int* depths,
                     int* order, int* rows, int* ancestors, int max_nodes) {
  DYNAMIC_SHARED(memory);
  Growth& g = *reinterpret_cast<Growth*>(memory);
  let_later_grids_start();
  wait_for_earlier_grids();
  const int node = threadIdx.x, num_nodes = is_running(words) ? tree[0] : 0;
  const int token = tree[1 + node];
  if (node == 0) g.num_nodes = num_nodes;
  g.parents[node] = node < num_nodes ? tree[1 + MAX_NODES + node] : -1;
  __syncthreads();
  int depth = 0;
  for (int a = g.parents[node]; a >= 0; a = g.parents[a]) depth++;
  g.depths[node] = depth;
  __syncthreads();
  write_pass(g, num_nodes, token, control, tokens, positions, parents, depths, order, rows, ancestors, max_nodes);
}
