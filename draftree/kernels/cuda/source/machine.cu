// A persistent kernel: its blocks stay on the chip and work through a list of operations, each of which is a kernel
// elsewhere. Here is what the operations see: the one at hand, its grid, how blocks wait for the operation before, and
// the weights of the next product, which are asked for as soon as the ring is free.
constexpr int MOST_WORDS = 27, MOST_STAGES = 16, EVERYONE = 15;  // EVERYONE: the barrier of all threads of a block

// The weights of a product, as linear.cu streams them.
struct Stream {
  const u8* weights;
  int step_bytes, num_steps, num_shares, stage_bytes, num_stages, x_bytes;
};

struct Operation {
  int kind, num_threads, grid_x, grid_y;
  int num_workers;   // blocks that have a part in it
  int num_before;    // those of the operation before
  int shared_offset;
  int is_prefetched;  // its first weights were asked for by an operation before
  int has_next, unused;
  Stream next;       // what is to be asked for at its end
  u64 words[MOST_WORDS];
};
static_assert(sizeof(Operation) == 288, "as in persistent.py");

struct Machine {
  Operation operations[2];  // the one at hand and the next
  u64 barriers[MOST_STAGES];
  const u32* done;          // how many workers have ended the operation before
  u64* times;               // where the block notes when it began the operation, had waited and had ended; or null
  int turn;
  uint3 block, grid;
};
__shared__ __align__(16) Machine machine;

DEV const Operation& at_hand() { return machine.operations[machine.turn]; }
DEV int real_block() { return blockIdx.x; }

DEV u8* own_memory() {
  SHARED_MEMORY(memory);
  return memory + at_hand().shared_offset;
}

#ifndef EMULATED
DEV u32 load_acquire(const u32* p) {
  u32 v;
  asm volatile("ld.acquire.gpu.global.u32 %0, [%1];" : "=r"(v) : "l"(p) : "memory");
  return v;
}

DEV void add_release(u32* p) { asm volatile("red.release.gpu.global.add.u32 [%0], 1;" ::"l"(p) : "memory"); }

DEV u32 count_last(u32* p) {
  u32 before;
  asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(p) : "memory");
  return before;
}

// Between what threads wrote or read and what copies in the background read or write.
DEV void order_copies() {
#if __CUDA_ARCH__ >= 900
  asm volatile("fence.proxy.async;" ::: "memory");
#endif
}

DEV u64 cycles() { return clock64(); }

DEV void forget_barrier(u64* barrier) { asm volatile("mbarrier.inval.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory"); }
#else
DEV u32 load_acquire(const u32* p) {
  emulator::spin();
  return *p;
}
DEV void add_release(u32* p) { ++*p; }
DEV u32 count_last(u32* p) { return (*p)++; }
DEV void order_copies() {}
DEV void forget_barrier(u64* barrier) {}
DEV u64 cycles() { return 1; }
#endif

// All threads of the operation call.
DEV void wait_for_earlier_grids() {
  if (threadIdx.x == 0) {
    while (at_hand().num_before && load_acquire(machine.done) < at_hand().num_before) {}
    if (machine.times && !machine.times[1]) machine.times[1] = cycles();
  }
  meet_some(0, at_hand().num_threads);
  order_copies();
}

// Of barriers that nobody waits for.
DEV void init_barriers(u64* barriers, int count) {
  order_copies();
  for (int i = 0; i < count; i++) forget_barrier(barriers + i), init_barrier(barriers + i, 1);
  publish_barriers();
}

#define RING_BARRIERS(name) u64* const name = machine.barriers

DEV bool is_prefetched() { return at_hand().is_prefetched && machine.block.x == real_block(); }

// Fills the ring with a product's first weights, while others work on.
DEV void prefetch_weights(const Stream& next) {
  const u32 block = real_block(), num_steps = next.num_steps, num_shares = next.num_shares;
  if (block >= num_shares) return;
  const u32 begin = block * num_steps / num_shares, count = (block + 1) * num_steps / num_shares - begin;
  SHARED_MEMORY(stages);
  if (BULK) {
    if (threadIdx.x != 32) return;
    init_barriers(machine.barriers, next.num_stages);
  }
  for (u32 i = 0; i < min(static_cast<u32>(next.num_stages), count); i++) {
    expect_bytes(machine.barriers + i, next.step_bytes + next.x_bytes);
    copy_async<true>(stages + i * next.stage_bytes, next.weights + static_cast<u64>(begin + i) * next.step_bytes, next.step_bytes,
                     machine.barriers + i);
  }
}

// Calls a kernel with arguments that lie in words of 64 bits.
template <int... I>
struct Numbers {};
template <int N, int... I>
struct Count : Count<N - 1, N - 1, I...> {};
template <int... I>
struct Count<0, I...> {
  typedef Numbers<I...> type;
};

template <class T>
DEV T argument(const u64& word) {
  return *reinterpret_cast<const T*>(&word);
}

template <auto KERNEL_FUNCTION>
struct Call;
template <class... A, void (*FUNCTION)(A...)>
struct Call<FUNCTION> {
  template <int... I>
  DEV_MEMBER static void run(const u64* words, Numbers<I...>) { FUNCTION(argument<A>(words[I])...); }
  __device__ __noinline__ static void run(const u64* words) { run(words, typename Count<sizeof...(A)>::type()); }
};

// From here to persistent.cu, what kernels know of their grid is what the operation says. Each kernel has a namespace of
// its own, in which OP_THREADS and op_threads are defined (persistent.py).
#define blockIdx machine.block
#define gridDim machine.grid
#define blockDim op_threads
#define __syncthreads() meet_some(0, OP_THREADS)
