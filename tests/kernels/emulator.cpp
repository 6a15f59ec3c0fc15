// What emulated kernels have in common, compiled once and linked to each: fibers, barriers, blocks, matrix instructions.
// Included behind the headers.
extern "C" char __start_cuda_shared[] __attribute__((weak, visibility("hidden")));
extern "C" char __stop_cuda_shared[] __attribute__((weak, visibility("hidden")));
uint3 threadIdx, blockIdx, blockDim, gridDim;

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
Fiber fibers[MAX_THREADS];
Warp warps[MAX_THREADS / 32];
u32 current;
alignas(1024) char dynamic_shared[SHARED_BYTES + MARGIN];
static Barrier barriers[NUM_BARRIERS];
static u32 num_threads, num_live;
static bool has_failed, has_moved, is_reversed;
static void* scheduler;
static char message[512];
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

void leave() {
  has_moved = true;
  pass_on();
}

void note(const char* format, ...) {
  const int used = snprintf(message, sizeof message, "block (%u, %u, %u), thread %u: ", blockIdx.x, blockIdx.y, blockIdx.z, current);
  va_list values;
  va_start(values, format);
  vsnprintf(message + used, sizeof message - used, format, values);
  va_end(values);
  has_failed = true;
}

[[noreturn]] void stop() {
  leave();
  __builtin_trap();
}

static void wake(u32 thread) {
  fibers[thread].state = READY;
  warps[thread / 32].waiting &= ~(1u << thread % 32);
  if (thread != current) warps[thread / 32].ready |= 1u << thread % 32;
}

void spin() {
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

int meet(u32 id, u32 count, Vote vote, bool value) {
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
  warp.waiting &= ~lanes;
  warp.ready |= current / 32 == warp_index ? lanes & ~(1u << current % 32) : lanes;
}

const u32* operate(u32 mask, Operation operation) {
  Fiber& f = fibers[current];
  Warp& warp = warps[current / 32];
  const u32 lane = 1u << current % 32;
  if (!(mask & lane)) fail("lane %u is not in its own mask %08x", current % 32, mask);
  f.mask = mask, f.operation = operation;
  warp.waiting |= lane;
  if (!(mask & warp.live & ~warp.waiting)) finish_operation(current / 32, mask);
  if (warp.waiting & lane) leave();
  return f.out;
}

void shuffle_lanes(u32 lanes, Fiber* warp) {
  EACH_LANE(lane) {
    Shuffled mine, other;
    memcpy(&mine, warp[lane].in, sizeof mine);
    memcpy(&other, warp[mine.source].in, sizeof other);
    if (!(lanes >> mine.source & 1)) other.value = ~0ull;
    memcpy(warp[lane].out, &other.value, 8);
  }
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
  constexpr u32 IN_WARP = DONE + 1;
  u32 count[IN_WARP + 1] = {}, first[IN_WARP + 1] = {};
  for (u32 thread = num_threads; thread-- > 0;) {
    const u32 state = warps[thread / 32].waiting >> thread % 32 & 1 ? IN_WARP : fibers[thread].state;
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
  for (bool is_first = true; num_running && !has_failed; is_first = false) {
    bool has_gone_on = false;
    for (u32 x = 0; x < num_blocks && !has_failed; x++) {
      if (!is_first && !blocks[x].num_live) continue;
      blockIdx = {x, 0, 0};
      if (is_first)
        begin_block(stacks + x * block_stacks, stack_bytes, shared_bytes);
      else
        park(blocks[x], shared_bytes, false);
      do {
        run_ready_threads();
        has_gone_on |= has_moved;
      } while (has_moved && num_live && !has_failed);
      blocks[x].num_live = num_live;
      if (!num_live) num_running--, end_block(stacks + x * block_stacks, stack_bytes, shared_bytes);
      if (!has_failed && ++idle > MAX_IDLE_PASSES) report_deadlock();
      if (num_live) park(blocks[x], shared_bytes, true);
    }
    if (has_gone_on) idle = 0;
  }
}

const char* launch(void (*run)(), const u32* grid, u32 threads, u32 shared_bytes, bool is_cooperative, char* stacks, u64 stack_bytes) {
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

// Eight halves as floats, each in a word of its own; an exponent that is all ones stays so.
typedef u32 Words __attribute__((vector_size(32)));
typedef float Row __attribute__((vector_size(32)));
static inline Row widen_row(const u32* halves) {
  Words h;
  memcpy(&h, halves, sizeof h);
  const Words scaled = (Words)((Row)((h & 0x7FFF) << 13) * 0x1p112f);
  return (Row)(scaled | (h & 0x8000) << 16 | ((Words)((h & 0x7C00) == 0x7C00) & 0x7F800000));
}

// in: a (K / 4 words), b (K / 8 words), c (4 floats). Sums run along k, in float32; products are exact.
template <int K>
void multiply_tiles(u32 lanes, Fiber* warp) {
  if (lanes != ~0u) fail("a matrix instruction needs all 32 lanes, not %08x", lanes);
  u32 a_halves[16][K], b_halves[K][8];
  float c[16][8];
  for (int lane = 0; lane < 32; lane++) {
    const u32* in = warp[lane].in;
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < K / 4; i++)
      for (int side = 0; side < 2; side++) a_halves[g + i % 2 * 8][i / 2 * 8 + t * 2 + side] = in[i] >> side * 16 & 0xFFFF;
    for (int i = 0; i < K / 8; i++)
      for (int side = 0; side < 2; side++) b_halves[i * 8 + t * 2 + side][g] = in[K / 4 + i] >> side * 16 & 0xFFFF;
    memcpy(&c[g][t * 2], in + K / 4 + K / 8, 8), memcpy(&c[g + 8][t * 2], in + K / 4 + K / 8 + 2, 8);
  }
  Row b[K];
  for (int k = 0; k < K; k++) b[k] = widen_row(b_halves[k]);
  for (int row = 0; row < 16; row++) {
    float a[K];
    for (int k = 0; k < K; k += 8) {
      const Row eight = widen_row(a_halves[row] + k);
      memcpy(a + k, &eight, sizeof eight);
    }
    Row sum;
    memcpy(&sum, c[row], sizeof sum);
    for (int k = 0; k < K; k++) sum += a[k] * b[k];
    memcpy(c[row], &sum, sizeof sum);
  }
  for (int lane = 0; lane < 32; lane++) {
    const int g = lane / 4, t = lane % 4;
    memcpy(warp[lane].out, &c[g][t * 2], 8), memcpy(warp[lane].out + 2, &c[g + 8][t * 2], 8);
  }
}

// Matrices of 8 rows of 16 bytes; lane 8 i + r names row r of matrix i.
template <int COUNT, bool IS_TRANSPOSED>
void load_matrices(u32 lanes, Fiber* warp) {
  if (lanes != ~0u) fail("loading matrices needs all 32 lanes, not %08x", lanes);
  for (u32 lane = 0; lane < 32; lane++)
    for (u32 i = 0; i < COUNT; i++) {
      u32 word = 0;
      for (u32 side = 0; side < 2; side++) {
        const u32 pair = lane % 4 * 2 + side;
        const u32 row = IS_TRANSPOSED ? pair : lane / 4, column = IS_TRANSPOSED ? lane / 4 : pair;
        const char* from;
        memcpy(&from, warp[i * 8 + row].in, sizeof from);
        if (reinterpret_cast<u64>(from) % 16) fail("row %u of matrix %u is not aligned to 16 bytes", row, i);
        unsigned short half;
        memcpy(&half, from + column * 2, 2);
        word |= static_cast<u32>(half) << side * 16;
      }
      warp[lane].out[i] = word;
    }
}

void copy_later(void* to, const void* from, u32 bytes) {
  if ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) % bytes) fail("a copy of %u bytes is not aligned", bytes);
  Fiber& f = fibers[current];
  f.copies.push_back({to, from, bytes, f.copy_group});
}

void finish_copies(u32 num_pending) {
  Fiber& f = fibers[current];
  size_t done = 0;
  while (done < f.copies.size() && f.copies[done].group + num_pending < f.copy_group) {
    memcpy(f.copies[done].to, f.copies[done].from, f.copies[done].bytes);
    done++;
  }
  f.copies.erase(f.copies.begin(), f.copies.begin() + done);
}

// in: a (4 words), b (2 words), c (4 floats). The chip ignores the 13 low bits of a and b.
void multiply_tf32(u32 lanes, Fiber* warp) {
  if (lanes != ~0u) fail("a matrix instruction needs all 32 lanes, not %08x", lanes);
  float a[16][8], b[8][8];
  for (int lane = 0; lane < 32; lane++) {
    const u32* in = warp[lane].in;
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < 4; i++) a[g + i % 2 * 8][t + i / 2 * 4] = bit_cast<float>(in[i] & ~0x1FFFu);
    for (int i = 0; i < 2; i++) b[t + i * 4][g] = bit_cast<float>(in[4 + i] & ~0x1FFFu);
  }
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++) {
      float sum = bit_cast<float>(warp[lane].in[6 + i]);
      for (int k = 0; k < 8; k++) sum += a[lane / 4 + i / 2 * 8][k] * b[k][lane % 4 * 2 + i % 2];
      warp[lane].out[i] = bit_cast<u32>(sum);
    }
}

template __attribute__((visibility("hidden"))) void multiply_tiles<8>(u32, Fiber*);
template __attribute__((visibility("hidden"))) void multiply_tiles<16>(u32, Fiber*);
template __attribute__((visibility("hidden"))) void load_matrices<2, false>(u32, Fiber*);
template __attribute__((visibility("hidden"))) void load_matrices<4, false>(u32, Fiber*);
template __attribute__((visibility("hidden"))) void load_matrices<2, true>(u32, Fiber*);
template __attribute__((visibility("hidden"))) void load_matrices<4, true>(u32, Fiber*);
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
