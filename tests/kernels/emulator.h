// CUDA C++ on the host: what a kernel's source expects of the compiler and the chip, spelled in C++17.
//
// The threads of a block are fibers of one OS thread, blocks run one after another, or together if they were launched
// so. A fiber runs until it meets
// others (a barrier, a warp operation) or spins; then the next one runs. Shared memory is full of NaN when a block
// starts, asynchronous copies arrive only when they are waited for, and the order of warps and lanes turns around at
// every barrier, so that forgotten barriers show. Included before the source, which sits in an unnamed namespace. What
// does not depend on a kernel is compiled once (emulator.cpp) and linked to each.
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

#define LINKED extern __attribute__((visibility("hidden")))
LINKED uint3 threadIdx, blockIdx, blockDim, gridDim;
constexpr int warpSize = 32;

namespace emulator {
typedef unsigned int u32;
typedef unsigned long long u64;
constexpr int MAX_THREADS = 1024, NUM_BARRIERS = 16, SHARED_BYTES = 256 * 1024, MARGIN = 1024;
constexpr u32 MAX_IDLE_PASSES = 20000;
constexpr u64 STACK_MARK = 0x5AFE57AC5AFE57ACull;

enum State : u32 { READY, AT_BARRIER, DONE };
enum Vote : u32 { SYNC, AND, OR, COUNT };
struct Fiber;
typedef void (*Operation)(u32 lanes, Fiber* warp);

struct Copy {
  void* to;
  const void* from;
  u32 bytes, group;
};

// What a switch and what a warp operation need lies in a line of the cache each.
struct alignas(64) Fiber {
  void* stack;
  Operation operation;
  u32 mask;                        // lanes of the warp operation
  State state;
  u32 barrier, vote;               // the barrier waited at
  u32 copy_group;
  alignas(8) u32 out[4];           // results of a warp operation
  alignas(64) u32 in[16];          // its operands
  alignas(64) std::vector<Copy> copies;  // asked for, not yet arrived
};

struct Warp {
  u32 live, ready, spinning, waiting;  // lanes
};

struct Barrier {
  u32 num_threads, arrived, votes;  // num_threads is 0 for all of the block
};

LINKED Fiber fibers[MAX_THREADS];
LINKED Warp warps[MAX_THREADS / 32];
LINKED u32 current;
alignas(1024) LINKED char dynamic_shared[SHARED_BYTES + MARGIN];

LINKED void leave();
// Takes note of an error; the launch ends at the next chance.
LINKED void note(const char* format, ...);
[[noreturn]] LINKED void stop();

template <class... A>
[[noreturn]] static void fail(const char* format, A... values) {
  note(format, values...);
  stop();
}

// Lets the others run; for loops that wait until another thread has changed memory.
LINKED void spin();
LINKED int meet(u32 id, u32 count, Vote vote, bool value);
// All live lanes of the mask come together; the last one computes the results of all.
LINKED const u32* operate(u32 mask, Operation operation);
// A null pointer, or what went wrong. is_cooperative: blocks wait for each other.
LINKED const char* launch(void (*run)(), const u32* grid, u32 threads, u32 shared_bytes, bool is_cooperative, char* stacks, u64 stack_bytes);

template <class T>
inline const u32* operate(u32 mask, Operation operation, const T* in) {
  memcpy(fibers[current].in, in, sizeof *in);
  return operate(mask, operation);
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
