// CUDA C++ on the host: what a kernel's source expects of the compiler and the chip, spelled in C++17.
//
// The threads of a block are fibers of one OS thread, blocks run one after another, or together if they were launched
// so. A fiber runs until it meets
// others (a barrier, a warp operation) or spins; then the next one runs. Shared memory is full of NaN when a block
// starts, asynchronous copies arrive only when they are waited for, and the order of warps and lanes turns around at
// every barrier, so that forgotten barriers show. Included before the source, which sits in an unnamed namespace.
#include <cmath>
#include <cstdarg>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <type_traits>
#include <utility>
#include <vector>
#undef INFINITY
#undef NAN
#undef assert
#define EMULATED 1
#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __noinline__ __attribute__((noinline))
#define __constant__ static
#define __grid_constant__
#define __launch_bounds__(...)
#define SHARED_MEMORY(name) unsigned char* const name = reinterpret_cast<unsigned char*>(emulator::dynamic_shared)
#define __align__(n) __attribute__((aligned(n)))
#ifdef __ELF__
#define __shared__ static __attribute__((section("cuda_shared")))
extern "C" char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));
#else
#define __shared__ static
#endif
#define assert(ok) ((ok) ? (void)0 : emulator::fail("an assertion failed: %s", #ok))

#define VECTORS(T, NAME)                                                            \
  struct alignas(2 * sizeof(T)) NAME##2 { T x, y; };                                \
  struct NAME##3 { T x, y, z; };                                                    \
  struct alignas(4 * sizeof(T)) NAME##4 { T x, y, z, w; };                          \
  static inline NAME##2 make_##NAME##2(T x, T y) { return {x, y}; }                 \
  static inline NAME##3 make_##NAME##3(T x, T y, T z) { return {x, y, z}; }         \
  static inline NAME##4 make_##NAME##4(T x, T y, T z, T w) { return {x, y, z, w}; }
VECTORS(float, float)
VECTORS(int, int)
VECTORS(unsigned, uint)
VECTORS(unsigned char, uchar)
VECTORS(unsigned short, ushort)
#undef VECTORS
struct alignas(16) double2 { double x, y; };
struct alignas(16) longlong2 { long long x, y; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };

static uint3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

extern "C" void emulator_switch(void** saved, void* next);
#if defined(__APPLE__)
#define EMULATOR_SWITCH "_emulator_switch"
#else
#define EMULATOR_SWITCH "emulator_switch"
#endif
#if defined(__x86_64__)
asm(".text\n.p2align 4\n" EMULATOR_SWITCH ":\n"
    "pushq %rbp\npushq %rbx\npushq %r12\npushq %r13\npushq %r14\npushq %r15\n"
    "movq %rsp, (%rdi)\nmovq %rsi, %rsp\n"
    "popq %r15\npopq %r14\npopq %r13\npopq %r12\npopq %rbx\npopq %rbp\nret\n");
constexpr int SAVED_WORDS = 8, ENTRY_WORD = 6;  // six registers, the return address, one word to keep calls aligned
#elif defined(__aarch64__)
asm(".text\n.p2align 4\n" EMULATOR_SWITCH ":\n"
    "sub sp, sp, #160\n"
    "stp x19, x20, [sp]\nstp x21, x22, [sp, #16]\nstp x23, x24, [sp, #32]\nstp x25, x26, [sp, #48]\n"
    "stp x27, x28, [sp, #64]\nstp x29, x30, [sp, #80]\n"
    "stp d8, d9, [sp, #96]\nstp d10, d11, [sp, #112]\nstp d12, d13, [sp, #128]\nstp d14, d15, [sp, #144]\n"
    "mov x2, sp\nstr x2, [x0]\nmov sp, x1\n"
    "ldp x19, x20, [sp]\nldp x21, x22, [sp, #16]\nldp x23, x24, [sp, #32]\nldp x25, x26, [sp, #48]\n"
    "ldp x27, x28, [sp, #64]\nldp x29, x30, [sp, #80]\n"
    "ldp d8, d9, [sp, #96]\nldp d10, d11, [sp, #112]\nldp d12, d13, [sp, #128]\nldp d14, d15, [sp, #144]\n"
    "add sp, sp, #160\nret\n");
constexpr int SAVED_WORDS = 20, ENTRY_WORD = 11;
#else
#error "fibers are written for x86-64 and arm64 only"
#endif

namespace emulator {
typedef unsigned int u32;
typedef unsigned long long u64;
constexpr int MAX_THREADS = 1024, NUM_BARRIERS = 16, SHARED_BYTES = 256 * 1024, MARGIN = 1024;
constexpr u32 MAX_IDLE_PASSES = 20000;
constexpr u64 STACK_MARK = 0x5AFE57AC5AFE57ACull;

enum State : u32 { READY, AT_BARRIER, IN_WARP, DONE };
enum Vote : u32 { SYNC, AND, OR, COUNT };
struct Fiber;
typedef void (*Operation)(u32 lanes, Fiber* warp);

struct Copy {
  void* to;
  const void* from;
  u32 bytes, group;
};

struct Fiber {
  void* stack;
  State state;
  u32 in[16], out[4];         // operands and results of a warp operation
  u32 mask;                   // lanes of the warp operation
  Operation operation;
  u32 barrier, vote;          // the barrier waited at
  u32 copy_group;
  std::vector<Copy> copies;   // asked for, not yet arrived
};

struct Warp {
  u32 live, ready, spinning, waiting;  // lanes
};

struct Barrier {
  u32 num_threads, arrived, votes;  // num_threads is 0 for all of the block
};

static Fiber fibers[MAX_THREADS];
static Warp warps[MAX_THREADS / 32];
static Barrier barriers[NUM_BARRIERS];
static u32 current, num_threads, num_live;
static bool has_failed, has_moved, is_reversed;
static void* scheduler;
static char message[512];
alignas(1024) static char dynamic_shared[SHARED_BYTES + MARGIN];
static void (*run_thread)();

// Takes the next lane of the warp that can go on; none: false.
static inline bool take_lane(u32 warp_index) {
  Warp& warp = warps[warp_index];
  if (!warp.ready || has_failed) return false;
  const u32 lane = is_reversed ? 31 - __builtin_clz(warp.ready) : __builtin_ctz(warp.ready);
  warp.ready &= ~(1u << lane);
  current = warp_index * 32 + lane, threadIdx = {current, 0, 0};
  return true;
}

static __attribute__((noinline)) void pass_on() {
  Fiber& f = fibers[current];
  const bool has_next = take_lane(current / 32);
  emulator_switch(&f.stack, has_next ? fibers[current].stack : scheduler);
}

static void leave() {
  has_moved = true;
  pass_on();
}

// Takes note of an error; the launch ends at the next chance.
static __attribute__((noinline)) void note(const char* format, ...) {
  const int used = snprintf(message, sizeof message, "block (%u, %u, %u), thread %u: ", blockIdx.x, blockIdx.y, blockIdx.z, current);
  va_list values;
  va_start(values, format);
  vsnprintf(message + used, sizeof message - used, format, values);
  va_end(values);
  has_failed = true;
}

[[noreturn]] static void stop() {
  leave();
  __builtin_trap();
}

template <class... A>
[[noreturn]] static void fail(const char* format, A... values) {
  note(format, values...);
  stop();
}

static void wake(u32 thread) {
  fibers[thread].state = READY;
  warps[thread / 32].waiting &= ~(1u << thread % 32);
  if (thread != current) warps[thread / 32].ready |= 1u << thread % 32;
}

// Lets the others run; for loops that wait until another thread has changed memory.
static void spin() {
  warps[current / 32].spinning |= 1u << current % 32;
  pass_on();
}

static void finish_barrier(u32 id) {
  Barrier& b = barriers[id];
  if (!b.arrived || b.arrived < (b.num_threads ? b.num_threads : num_live)) return;
  const Barrier done = b;
  b = {};
  is_reversed = !is_reversed;
  for (u32 thread = 0; thread < num_threads; thread++) {
    Fiber& f = fibers[thread];
    if (f.state != AT_BARRIER || f.barrier != id) continue;
    f.out[0] = f.vote == AND ? done.votes == done.arrived : f.vote == OR ? done.votes > 0 : done.votes;
    wake(thread);
  }
}

static int meet(u32 id, u32 count, Vote vote, bool value) {
  Fiber& f = fibers[current];
  if (id >= NUM_BARRIERS || count % 32 || count > num_threads) fail("there is no barrier %u of %u threads", id, count);
  Barrier& b = barriers[id];
  if (b.arrived && b.num_threads != count) fail("barrier %u is used for %u and %u threads at once", id, b.num_threads, count);
  b.num_threads = count, b.arrived++, b.votes += value;
  if (count && b.arrived > count) fail("more than %u threads at barrier %u", count, id);
  f.state = AT_BARRIER, f.barrier = id, f.vote = vote;
  finish_barrier(id);
  if (f.state != READY) leave();
  return f.out[0];
}

static void finish_operation(u32 warp_index, u32 mask) {
  Warp& warp = warps[warp_index];
  const u32 lanes = mask & warp.live;
  if (lanes & ~warp.waiting) return;
  Fiber* warp_fibers = fibers + warp_index * 32;
  Operation operation = nullptr;
  for (u32 rest = lanes; rest; rest &= rest - 1) {
    const Fiber& f = warp_fibers[__builtin_ctz(rest)];
    if (f.mask != mask) return;
    if (operation && f.operation != operation) fail("lanes of warp %u meet in different operations", warp_index);
    operation = f.operation;
  }
  if (!operation) return;
  operation(lanes, warp_fibers);
  for (u32 rest = lanes; rest; rest &= rest - 1) warp_fibers[__builtin_ctz(rest)].state = READY;
  warp.waiting &= ~lanes;
  warp.ready |= current / 32 == warp_index ? lanes & ~(1u << current % 32) : lanes;
}

// All live lanes of the mask come together; the last one computes the results of all.
template <class T>
const u32* operate(u32 mask, Operation operation, const T* in) {
  Fiber& f = fibers[current];
  if (!(mask >> current % 32 & 1)) fail("lane %u is not in its own mask %08x", current % 32, mask);
  memcpy(f.in, in, sizeof *in);
  f.mask = mask, f.operation = operation, f.state = IN_WARP;
  warps[current / 32].waiting |= 1u << current % 32;
  finish_operation(current / 32, mask);
  if (f.state != READY) leave();
  return f.out;
}

static void end_thread() {
  Fiber& f = fibers[current];
  Warp& warp = warps[current / 32];
  f.state = DONE, warp.live &= ~(1u << current % 32), num_live--;
  for (u32 id = 0; id < NUM_BARRIERS; id++)
    if (barriers[id].arrived && !barriers[id].num_threads) finish_barrier(id);
  for (u32 rest = warp.waiting; rest; rest &= rest - 1) {
    const u32 lane = __builtin_ctz(rest);
    if (warp.waiting >> lane & 1) finish_operation(current / 32, fibers[current / 32 * 32 + lane].mask);
  }
}

static void enter_thread() {
  run_thread();
  end_thread();
  stop();
}

static void report_deadlock() {
  u32 count[4] = {}, first[4] = {};
  for (u32 thread = num_threads; thread-- > 0;) {
    const State state = fibers[thread].state;
    count[state]++, first[state] = thread;
  }
  note(
      "no thread can go on: %u wait at a barrier (first %u, barrier %u), %u for lanes of a warp operation (first %u, mask %08x), %u spin (first "
      "%u; another block cannot help), %u have returned",
      count[AT_BARRIER], first[AT_BARRIER], fibers[first[AT_BARRIER]].barrier, count[IN_WARP], first[IN_WARP],
      fibers[first[IN_WARP]].mask, count[READY], first[READY], count[DONE]);
}

static void start_fiber(u32 thread, char* stacks, u64 stack_bytes) {
  Fiber& f = fibers[thread];
  char* bottom = stacks + thread * stack_bytes;
  memcpy(bottom, &STACK_MARK, 8);
  // Not all at the same distance, or they would share a few lines of the caches.
  u64* top = reinterpret_cast<u64*>(bottom + stack_bytes - thread % 61 * 192) - SAVED_WORDS;
  memset(top, 0, SAVED_WORDS * 8);
  top[ENTRY_WORD] = reinterpret_cast<u64>(&enter_thread);
  f.stack = top, f.state = READY, f.copy_group = 0;
  f.copies.clear();
}

// One turn of every thread that can go on; whether there was any.
static bool run_ready_threads() {
  bool has_run = false;
  has_moved = false;
  const u32 num_warps = (num_threads + 31) / 32;
  const bool is_backward = is_reversed;
  for (u32 w = 0; w < num_warps; w++) {
    const u32 index = is_backward ? num_warps - 1 - w : w;
    while (take_lane(index)) {
      emulator_switch(&scheduler, fibers[current].stack);
      has_run = true;
    }
  }
  for (u32 w = 0; w < num_warps; w++) {
    warps[w].ready |= warps[w].spinning;
    warps[w].spinning = 0;
  }
  return has_run;
}

static void begin_block(char* stacks, u64 stack_bytes, u32 shared_bytes) {
#ifdef __ELF__
  if (__start_cuda_shared) memset(__start_cuda_shared, 0xFF, __stop_cuda_shared - __start_cuda_shared);
#endif
  memset(dynamic_shared, 0xFF, shared_bytes + MARGIN);
  memset(barriers, 0, sizeof barriers);
  num_live = num_threads, is_reversed = (blockIdx.x + blockIdx.y + blockIdx.z) & 1;
  for (u32 thread = 0; thread < num_threads; thread++) start_fiber(thread, stacks, stack_bytes);
  for (u32 w = 0; w * 32 < num_threads; w++) {
    const u32 lanes = num_threads - w * 32 < 32 ? (1u << num_threads % 32) - 1 : ~0u;
    warps[w] = {lanes, lanes, 0, 0};
  }
}

static void end_block(char* stacks, u64 stack_bytes, u32 shared_bytes) {
  for (u32 i = 0; i < MARGIN && !has_failed; i++)
    if (dynamic_shared[shared_bytes + i] != '\xFF') note("wrote behind the %u bytes of shared memory", shared_bytes);
  for (u32 thread = 0; thread < num_threads && !has_failed; thread++)
    if (memcmp(stacks + thread * stack_bytes, &STACK_MARK, 8)) note("the stack of thread %u overflowed", thread);
}

static void run_block(char* stacks, u64 stack_bytes, u32 shared_bytes) {
  begin_block(stacks, stack_bytes, shared_bytes);
  u32 idle = 0;
  while (num_live && !has_failed) {
    const bool has_run = run_ready_threads();
    idle = has_moved ? 0 : idle + 1;
    if (!has_failed && num_live && (!has_run || idle > MAX_IDLE_PASSES)) report_deadlock();
  }
  end_block(stacks, stack_bytes, shared_bytes);
}

// A block that does not run now: what a chip has in one multiprocessor.
struct Parked {
  std::vector<Fiber> fibers;
  std::vector<char> shared;
  Warp warps[MAX_THREADS / 32];
  Barrier barriers[NUM_BARRIERS];
  u32 num_live;
  bool is_reversed;
};

static void park(Parked& block, u32 shared_bytes, bool is_leaving) {
  const u32 dynamic_bytes = shared_bytes + MARGIN;
  u32 static_bytes = 0;
  char* statics = nullptr;
#ifdef __ELF__
  if (__start_cuda_shared) statics = __start_cuda_shared, static_bytes = __stop_cuda_shared - __start_cuda_shared;
#endif
  block.shared.resize(dynamic_bytes + static_bytes), block.fibers.resize(num_threads);
  char* kept = block.shared.data();
  const auto copy = [&](void* here, void* there, size_t bytes) { is_leaving ? memcpy(there, here, bytes) : memcpy(here, there, bytes); };
  copy(dynamic_shared, kept, dynamic_bytes), copy(statics, kept + dynamic_bytes, static_bytes);
  copy(warps, block.warps, sizeof warps), copy(barriers, block.barriers, sizeof barriers);
  copy(&num_live, &block.num_live, sizeof num_live), copy(&is_reversed, &block.is_reversed, sizeof is_reversed);
  for (u32 thread = 0; thread < num_threads; thread++) std::swap(fibers[thread], block.fibers[thread]);
}

// Blocks that wait for each other: each runs until it can only wait, then the next one does.
static void run_together(u32 num_blocks, char* stacks, u64 stack_bytes, u32 shared_bytes) {
  std::vector<Parked> blocks(num_blocks);
  const u64 block_stacks = num_threads * stack_bytes;
  u32 num_running = num_blocks, idle = 0;
  for (u32 x = 0; x < num_blocks; x++) {
    blockIdx = {x, 0, 0};
    begin_block(stacks + x * block_stacks, stack_bytes, shared_bytes);
    park(blocks[x], shared_bytes, true);
  }
  while (num_running && !has_failed) {
    bool has_gone_on = false;
    for (u32 x = 0; x < num_blocks && !has_failed; x++) {
      if (!blocks[x].num_live) continue;
      blockIdx = {x, 0, 0};
      park(blocks[x], shared_bytes, false);
      do {
        run_ready_threads();
        has_gone_on |= has_moved;
      } while (has_moved && num_live && !has_failed);
      if (!num_live) num_running--, end_block(stacks + x * block_stacks, stack_bytes, shared_bytes);
      if (!has_failed && ++idle > MAX_IDLE_PASSES) report_deadlock();
      park(blocks[x], shared_bytes, true);
    }
    if (has_gone_on) idle = 0;
  }
}

// A null pointer, or what went wrong. is_cooperative: blocks wait for each other.
static const char* launch(void (*run)(), const u32* grid, u32 threads, u32 shared_bytes, bool is_cooperative, char* stacks, u64 stack_bytes) {
  run_thread = run, num_threads = threads, has_failed = false;
  blockDim = {threads, 1, 1}, gridDim = {grid[0], grid[1], grid[2]};
  if (is_cooperative) {
    run_together(grid[0], stacks, stack_bytes, shared_bytes);
    return has_failed ? message : nullptr;
  }
  for (u32 z = 0; z < grid[2]; z++)
    for (u32 y = 0; y < grid[1]; y++)
      for (u32 x = 0; x < grid[0]; x++) {
        blockIdx = {x, y, z};
        run_block(stacks, stack_bytes, shared_bytes);
        if (has_failed) return message;
      }
  return nullptr;
}

// Calling a kernel with arguments that lie in words of 64 bits: p pointer, i 32-bit integer, f float.
template <class T>
constexpr char kind_of() {
  static_assert(std::is_pointer_v<T> || sizeof(T) == 4, "kernels take pointers, 32-bit integers and floats");
  return std::is_pointer_v<T> ? 'p' : std::is_floating_point_v<T> ? 'f' : 'i';
}

template <class... A>
const char* signature(void (*)(A...)) {
  static const char kinds[] = {kind_of<A>()..., 0};
  return kinds;
}

template <class T>
T argument(const u64& word) {
  T value;
  memcpy(&value, &word, sizeof value);
  return value;
}

template <class... A, size_t... I>
void call_with(void (*kernel)(A...), const u64* words, std::index_sequence<I...>) {
  kernel(argument<A>(words[I])...);
}

template <class... A>
void call(void (*kernel)(A...), const u64* words) {
  call_with(kernel, words, std::index_sequence_for<A...>());
}
}  // namespace emulator

// The sanitizers' calls. Both kinds of data start with the place in the source.
struct EmulatorPlace {
  const char* file;
  unsigned line, column;
};
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_type_mismatch_v1_abort(EmulatorPlace* at, void* address) {
  emulator::fail("%s:%u: the address %p is not aligned", at->file, at->line, address);
}
extern "C" __attribute__((visibility("hidden"))) void __ubsan_handle_out_of_bounds_abort(EmulatorPlace* at, void* index) {
  emulator::fail("%s:%u: the index %lld is outside the array", at->file, at->line, (long long)index);
}
