// Passes set up on the device, one block each: a plain step, a draft's block, a draft's context, and the end of a pass.
constexpr int THREADS = 64;

// A committed pass over the anchor alone.
KERNEL void plan_plain_kernel(const int* words, int* control, int* tokens, int* positions, int* parents,
                                             int* depths, int* order, int* rows, int* ancestors) {
  let_later_grids_start();
  wait_for_earlier_grids();
  if (threadIdx.x) return;
  control[NUM_TOKENS] = control[NUM_ROWS] = is_running(words);
  control[IS_TREE] = control[PATH_LEN] = 0;
  tokens[0] = words[ANCHOR], positions[0] = control[COMMITTED];
  parents[0] = -1, depths[0] = order[0] = rows[0] = ancestors[0] = 0;
}

// The anchor and masks behind the draft's context; the rows of the masks are wanted.
KERNEL void plan_block_kernel(const int* words, int* control, int* tokens, int* positions, int* rows,
                                             int mask_token, int block_len) {
  let_later_grids_start();
  wait_for_earlier_grids();
  const bool is_live = is_running(words);
  for (int i = threadIdx.x; i < block_len; i += THREADS) {
    tokens[i] = i ? mask_token : words[ANCHOR];
    positions[i] = control[COMMITTED] + i;
    if (i) rows[i - 1] = i;
  }
  if (threadIdx.x) return;
  control[NUM_TOKENS] = is_live ? block_len : 0;
  control[NUM_ROWS] = is_live ? block_len - 1 : 0;
  control[IS_TREE] = control[PATH_LEN] = 0;
}

// A committed pass over the target's accepted path, behind the draft's context.
KERNEL void plan_context_kernel(const int* control, const int* tokens, const int* path, int* draft_control,
                                               int* draft_tokens, int* draft_positions, int* draft_path) {
  let_later_grids_start();
  wait_for_earlier_grids();
  const int path_len = control[PATH_LEN];
  for (int i = threadIdx.x; i < path_len; i += THREADS) {
    draft_tokens[i] = tokens[path[i]];
    draft_positions[i] = draft_control[COMMITTED] + i;
    draft_path[i] = i;
  }
  if (threadIdx.x) return;
  draft_control[NUM_TOKENS] = draft_control[PATH_LEN] = path_len;
  draft_control[NUM_ROWS] = draft_control[IS_TREE] = 0;
}

// The path is part of the text from now on.
KERNEL void advance_kernel(int* control) {
  let_later_grids_start();
  wait_for_earlier_grids();
  if (threadIdx.x) return;
  control[COMMITTED] += control[PATH_LEN];
  control[PATH_LEN] = 0;
}
