// The loop of a persistent kernel over its operations (machine.cu).
#undef blockIdx
#undef gridDim
#undef blockDim
#undef __syncthreads
constexpr int OPERATION_VECTORS = sizeof(Operation) / 16;

DEV void run_blocks(const Operation& op) {
  if (threadIdx.x >= op.num_threads) return;
  const int num_blocks = op.grid_x * op.grid_y;
#pragma unroll 1
  for (int block = real_block(); block < num_blocks; block += gridDim.x) {
    meet_some(0, op.num_threads);  // the block before is done with its shared memory
    if (threadIdx.x == 0) machine.block = {static_cast<u32>(block % op.grid_x), static_cast<u32>(block / op.grid_x), 0u};
    meet_some(0, op.num_threads);
    run_kind(op.kind, op.words);
  }
}

// done: a counter for each operation, and one more; zero between launches. The first operation only asks for weights.
// times: null, or three numbers for each operation and block, zero before.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, 1)
    persistent_kernel(const Operation* operations, u32* done, u64* times, int num_operations) {
  __shared__ bool is_last;
  uint4* const places = reinterpret_cast<uint4*>(machine.operations);
  const int thread = threadIdx.x;
  const uint4* list = reinterpret_cast<const uint4*>(operations);
  if (thread < OPERATION_VECTORS) places[thread] = list[thread];
  if (thread == 0) {
    machine.turn = 0;
    for (int i = 0; BULK && i < MOST_STAGES; i++) init_barrier(machine.barriers + i, 1);
  }
  meet_some(EVERYONE, BLOCK_THREADS);
#pragma unroll 1
  for (int number = 0; number < num_operations; number++) {
    const Operation& op = machine.operations[number & 1];
    const bool fetches = thread < OPERATION_VECTORS && number + 1 < num_operations;
    uint4 next = make_uint4(0, 0, 0, 0);
    if (fetches) next = list[(number + 1) * OPERATION_VECTORS + thread];
    if (thread == 0) {
      machine.turn = number & 1, machine.done = done + number - 1;
      machine.grid = {static_cast<u32>(op.grid_x), static_cast<u32>(op.grid_y), 1u};
      machine.times = times ? times + (number * gridDim.x + real_block()) * 3 : nullptr;
      if (times) machine.times[0] = cycles();
    }
    if (real_block() < op.num_workers) run_blocks(op);
    if (fetches) places[(number + 1 & 1) * OPERATION_VECTORS + thread] = next;
    const bool has_worked = real_block() < op.num_workers, has_next = op.has_next;
    const Stream stream = op.next;
    meet_some(EVERYONE, BLOCK_THREADS);
    if (thread == 0 && times) machine.times[2] = cycles();
    if (thread == 0 && has_worked) add_release(done + number);
    if (has_next) prefetch_weights(stream);
  }
  // The last block to end knows that nobody waits any more.
  if (thread == 0) is_last = count_last(done + num_operations) + 1 == gridDim.x;
  meet_some(EVERYONE, BLOCK_THREADS);
  for (int i = thread; is_last && i <= num_operations; i += BLOCK_THREADS) done[i] = 0;
}
