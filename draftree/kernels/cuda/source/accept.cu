// The accept walk of decode/accept.py: all nodes at once, since a node is on the path exactly if every step to it is the
// target's choice. Leaves the path, the next anchor, what is left of the request, and a record for the host.
constexpr int THREADS = 64;
static_assert(MAX_NODES <= THREADS, "a thread has one node");

DEV bool has_bit(const int* bits, int token) { return bits[token >> 5] >> (token & 31) & 1; }

// One block. stops: a bit a token. counts, if there are: of tokens in the text, by token. ends, if there are: [nodes]
// [end_stride], whose last word says that the path does not go on to the node. text, if there is: by position. records: [num_records][RECORD_LEN], see
// kernels/cuda/accept.py; they may lie in the host's memory, as chosen and ends.
KERNEL void LAUNCH_BOUNDS(THREADS)
    accept_kernel(const int* chosen, int* words, int* control, const int* tokens, const int* parents, const int* depths,
                  int* path, const int* stops, int* counts, const int* ends, int end_stride, int* text, int* records,
                  int num_records) {
  __shared__ int from[MAX_NODES], follows[MAX_NODES], on_path[MAX_NODES], path_len;
  let_later_grids_start();
  wait_for_earlier_grids();
  const int num_nodes = control[NUM_TOKENS], node = threadIdx.x;
  if (node == 0) path_len = 1, on_path[0] = 0;
  if (num_nodes == 0) {
    if (node == 0) control[PATH_LEN] = 0;
    return;
  }
  const bool is_node = node < num_nodes;
  const int token = is_node ? tokens[node] : -1, parent = is_node && node ? parents[node] : -1;
  const int depth = parent >= 0 ? depths[node] : 0;
  if (is_node) {
    from[node] = parent;
    const bool is_end = has_bit(stops, token) || (ends && ends[(node + 1) * end_stride - 1]);
    follows[node] = parent < 0 || (chosen[parent] == token && !is_end && depth < words[TOKENS_LEFT]);
  }
  __syncthreads();
  bool is_accepted = is_node;
  for (int a = node; is_accepted && a > 0; a = from[a]) is_accepted = follows[a];
  if (is_accepted && node) on_path[depth] = node, atomicMax(&path_len, depth + 1);
  __syncthreads();
  const int length = path_len, bonus = chosen[on_path[length - 1]];
  const int number = words[NUM_ROUNDS] + 1, left = words[TOKENS_LEFT] - length;
  const int ended = has_bit(stops, bonus) ? ENDED_BY_STOP : left <= 0 ? ENDED_BY_LENGTH : ENDED_BY_RUNNING;
  int* record = records + (number - 1) % num_records * RECORD_LEN;
  if (counts && node < length) {  // the root has been counted before
    int* count = counts + (node ? tokens[on_path[node]] : bonus);
    atomicAdd(count, 1), atomicOr(count, SEEN);
  }
  if (text && node < length) text[control[COMMITTED] + node + 1] = node + 1 < length ? tokens[on_path[node + 1]] : bonus;
  if (node < length) path[node] = record[HEADER_LEN + 2 * MAX_NODES + node] = on_path[node];
  if (is_node) record[HEADER_LEN + node] = token, record[HEADER_LEN + MAX_NODES + node] = parent;
  __threadfence_system();
  __syncthreads();
  if (node) return;
  control[PATH_LEN] = length;
  words[ANCHOR] = bonus, words[TOKENS_LEFT] = left, words[ENDED] = ended, words[NUM_ROUNDS] = number;
  record[1] = num_nodes, record[2] = length, record[3] = bonus, record[4] = ended;
  record[5] = min(words[NUM_LOOKED], num_nodes - 1), record[6] = words[NUM_SHARED];
  __threadfence_system();
  *static_cast<volatile int*>(record) = number;  // last: the host takes it as a sign that the rest is there
}
