// Where the end of the text occurred before, as drafts/lookup.py finds it: the longest run, and of those the newest.
constexpr int THREADS = 256;

// match = the length of the run << 32 | the position after it; it was 0 before.
KERNEL void LAUNCH_BOUNDS(THREADS)
    lookup_kernel(const int* text, const int* control, const int* words, u64* match) {
  let_later_grids_start();
  wait_for_earlier_grids();
  if (!is_running(words)) return;
  const int length = control[COMMITTED] + 1;  // with the anchor
  u64 best = 0;
  for (int end = blockIdx.x * THREADS + threadIdx.x; end < length; end += gridDim.x * THREADS) {
    int count = 0;
    while (count < MAX_MATCH && count < end && text[end - 1 - count] == text[length - 1 - count]) count++;
    if (count >= LONG_MATCH) best = max(best, static_cast<u64>(count) << 32 | end);
  }
  if (best) atomicMax(match, best);
}
