// The functions that CUDA brings along, for emulator.h: warp operations, atomics, intrinsics.
namespace emulator {
template <class T, class F>
T bit_cast(F from) {
  static_assert(sizeof(T) == sizeof(F));
  T to;
  memcpy(&to, &from, sizeof to);
  return to;
}

// As the chip converts; in C++ what does not fit is undefined.
template <class T>
T saturate(double value) {
  constexpr double low = std::is_signed_v<T> ? -0x1p31 : 0.0, high = std::is_signed_v<T> ? 0x1p31 - 1 : 0x1p32 - 1;
  return std::isnan(value) ? T(0) : static_cast<T>(std::fmin(std::fmax(value, low), high));
}

#define EACH_LANE(lane) \
  for (u32 rest = lanes, lane; rest && (lane = __builtin_ctz(rest), true); rest &= rest - 1)

static void meet_lanes(u32, Fiber*) {}

struct Shuffled {
  u64 value;
  u32 source;
};

LINKED void shuffle_lanes(u32 lanes, Fiber* warp);

template <class T>
T shuffle(u32 mask, T value, u32 source) {
  static_assert(sizeof(T) <= 8);
  Shuffled in = {0, source};
  memcpy(&in.value, &value, sizeof value);
  memcpy(&value, operate(mask, shuffle_lanes, &in), sizeof value);
  return value;
}

static void vote_lanes(u32 lanes, Fiber* warp) {
  u32 bits = 0;
  EACH_LANE(lane) bits |= (warp[lane].in[0] != 0) << lane;
  EACH_LANE(lane) warp[lane].out[0] = bits, warp[lane].out[1] = lanes;
}

static const u32* vote(u32 mask, bool value) {
  const u32 in = value;
  return operate(mask, vote_lanes, &in);
}

static void match_lanes(u32 lanes, Fiber* warp) {
  EACH_LANE(lane) {
    const u32 mine = lane;
    u32 equal = 0;
    EACH_LANE(other) equal |= (memcmp(warp[mine].in, warp[other].in, 8) == 0) << other;
    warp[mine].out[0] = equal;
  }
}

struct Add { template <class T> T operator()(T a, T b) const { return a + b; } };
struct Min { template <class T> T operator()(T a, T b) const { return b < a ? b : a; } };
struct Max { template <class T> T operator()(T a, T b) const { return a < b ? b : a; } };
struct And { template <class T> T operator()(T a, T b) const { return a & b; } };
struct Or { template <class T> T operator()(T a, T b) const { return a | b; } };
struct Xor { template <class T> T operator()(T a, T b) const { return a ^ b; } };

template <class T, class F>
void reduce_lanes(u32 lanes, Fiber* warp) {
  T result = bit_cast<T>(warp[__builtin_ctz(lanes)].in[0]);
  u32 first = 1;
  EACH_LANE(lane) {
    if (!first) result = F()(result, bit_cast<T>(warp[lane].in[0]));
    first = 0;
  }
  EACH_LANE(lane) warp[lane].out[0] = bit_cast<u32>(result);
}

template <class F, class T>
T reduce(u32 mask, T value) {
  static_assert(sizeof(T) == 4);
  return bit_cast<T>(operate(mask, reduce_lanes<T, F>, &value)[0]);
}

template <class F, class T>
T modify(T* at, T value) {
  const T old = *at;
  *at = F()(old, value);
  return old;
}
}  // namespace emulator

template <class A, class B>
std::common_type_t<A, B> max(A a, B b) {
  typedef std::common_type_t<A, B> T;
  if constexpr (std::is_floating_point_v<T>) return std::fmax(T(a), T(b));
  else return emulator::Max()(T(a), T(b));
}
template <class A, class B>
std::common_type_t<A, B> min(A a, B b) {
  typedef std::common_type_t<A, B> T;
  if constexpr (std::is_floating_point_v<T>) return std::fmin(T(a), T(b));
  else return emulator::Min()(T(a), T(b));
}
using std::abs;
using std::isfinite;
using std::isinf;
using std::isnan;

static inline void __syncthreads() { emulator::meet(0, 0, emulator::SYNC, false); }
static inline int __syncthreads_and(int v) { return emulator::meet(0, 0, emulator::AND, v); }
static inline int __syncthreads_or(int v) { return emulator::meet(0, 0, emulator::OR, v); }
static inline int __syncthreads_count(int v) { return emulator::meet(0, 0, emulator::COUNT, v); }
static inline void __syncwarp(unsigned mask = ~0u) { emulator::operate(mask, emulator::meet_lanes, &mask); }
static inline void __threadfence() {}
static inline void __threadfence_block() {}
static inline void __threadfence_system() {}
static inline void __nanosleep(unsigned) { emulator::spin(); }
static inline void __trap() { emulator::fail("a trap"); }
static inline void __builtin_assume(bool) {}
static inline long long clock64() { return 0; }
static inline unsigned __activemask() { return emulator::warps[emulator::current / 32].live; }

static inline unsigned emulator_lane() { return emulator::current % 32; }
template <class T>
T __shfl_sync(unsigned mask, T v, int source, int width = 32) {
  return emulator::shuffle(mask, v, (emulator_lane() & ~(width - 1)) | (source & (width - 1)));
}
template <class T>
T __shfl_up_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  const unsigned lane = emulator_lane();
  return emulator::shuffle(mask, v, (lane & (width - 1)) >= delta ? lane - delta : lane);
}
template <class T>
T __shfl_down_sync(unsigned mask, T v, unsigned delta, int width = 32) {
  const unsigned lane = emulator_lane();
  return emulator::shuffle(mask, v, (lane & (width - 1)) + delta < width ? lane + delta : lane);
}
template <class T>
T __shfl_xor_sync(unsigned mask, T v, int turn, int width = 32) {
  const unsigned lane = emulator_lane(), source = lane ^ turn;
  return emulator::shuffle(mask, v, source <= (lane | (width - 1)) ? source : lane);
}
static inline unsigned __ballot_sync(unsigned mask, int v) { return emulator::vote(mask, v)[0]; }
static inline int __any_sync(unsigned mask, int v) { return emulator::vote(mask, v)[0] != 0; }
static inline int __all_sync(unsigned mask, int v) {
  const unsigned* r = emulator::vote(mask, v);
  return r[0] == r[1];
}
template <class T>
unsigned __match_any_sync(unsigned mask, T v) {
  unsigned long long word = 0;
  memcpy(&word, &v, sizeof v);
  return emulator::operate(mask, emulator::match_lanes, &word)[0];
}
template <class T> T __reduce_add_sync(unsigned mask, T v) { return emulator::reduce<emulator::Add>(mask, v); }
template <class T> T __reduce_min_sync(unsigned mask, T v) { return emulator::reduce<emulator::Min>(mask, v); }
template <class T> T __reduce_max_sync(unsigned mask, T v) { return emulator::reduce<emulator::Max>(mask, v); }
template <class T> T __reduce_and_sync(unsigned mask, T v) { return emulator::reduce<emulator::And>(mask, v); }
template <class T> T __reduce_or_sync(unsigned mask, T v) { return emulator::reduce<emulator::Or>(mask, v); }
template <class T> T __reduce_xor_sync(unsigned mask, T v) { return emulator::reduce<emulator::Xor>(mask, v); }

// Where others may change memory between two tries, they get the chance to.
template <class T> T atomicAdd(T* p, std::common_type_t<T> v) { return emulator::modify<emulator::Add>(p, v); }
template <class T> T atomicSub(T* p, std::common_type_t<T> v) { return emulator::modify<emulator::Add>(p, T(-v)); }
template <class T> T atomicMax(T* p, std::common_type_t<T> v) { return emulator::modify<emulator::Max>(p, v); }
template <class T> T atomicMin(T* p, std::common_type_t<T> v) { return emulator::modify<emulator::Min>(p, v); }
template <class T> T atomicAnd(T* p, std::common_type_t<T> v) { return emulator::modify<emulator::And>(p, v); }
template <class T> T atomicOr(T* p, std::common_type_t<T> v) { return emulator::modify<emulator::Or>(p, v); }
template <class T> T atomicXor(T* p, std::common_type_t<T> v) { return emulator::modify<emulator::Xor>(p, v); }
template <class T>
T atomicExch(T* p, std::common_type_t<T> v) {
  emulator::spin();
  const T old = *p;
  *p = v;
  return old;
}
template <class T>
T atomicCAS(T* p, std::common_type_t<T> expected, std::common_type_t<T> v) {
  emulator::spin();
  const T old = *p;
  if (old == expected) *p = v;
  return old;
}
static inline unsigned atomicInc(unsigned* p, unsigned limit) {
  const unsigned old = *p;
  *p = old >= limit ? 0 : old + 1;
  return old;
}

template <class T> T __ldg(const T* p) { return *p; }
template <class T> T __ldca(const T* p) { return *p; }
template <class T> T __ldcg(const T* p) { return *p; }
template <class T> T __ldcs(const T* p) { return *p; }
template <class T> T __ldlu(const T* p) { return *p; }
template <class T>
T __ldcv(const T* p) {
  emulator::spin();
  return *p;
}
template <class T> void __stcg(T* p, std::common_type_t<T> v) { *p = v; }
template <class T> void __stcs(T* p, std::common_type_t<T> v) { *p = v; }
template <class T> void __stwb(T* p, std::common_type_t<T> v) { *p = v; }
template <class T> void __stwt(T* p, std::common_type_t<T> v) { *p = v; }

static inline float __fadd_rn(float a, float b) { return a + b; }
static inline float __fsub_rn(float a, float b) { return a - b; }
static inline float __fmul_rn(float a, float b) { return a * b; }
static inline float __fdiv_rn(float a, float b) { return a / b; }
static inline float __fdividef(float a, float b) { return a / b; }
static inline float __frcp_rn(float a) { return 1.0f / a; }
static inline float __fsqrt_rn(float a) { return std::sqrt(a); }
static inline float __frsqrt_rn(float a) { return static_cast<float>(1.0 / std::sqrt(static_cast<double>(a))); }
static inline float __fmaf_rn(float a, float b, float c) { return std::fma(a, b, c); }
static inline float rsqrtf(float a) { return __frsqrt_rn(a); }
static inline float __saturatef(float a) { return std::fmin(std::fmax(a, 0.0f), 1.0f); }
static inline double __fma_rn(double a, double b, double c) { return std::fma(a, b, c); }
static inline double __dadd_rn(double a, double b) { return a + b; }
static inline double __dmul_rn(double a, double b) { return a * b; }
#define __expf expf
#define __exp10f exp10f
#define __logf logf
#define __log2f log2f
#define __log10f log10f
#define __powf powf
#define __sinf sinf
#define __cosf cosf

static inline int __float_as_int(float v) { return emulator::bit_cast<int>(v); }
static inline unsigned __float_as_uint(float v) { return emulator::bit_cast<unsigned>(v); }
static inline float __int_as_float(int v) { return emulator::bit_cast<float>(v); }
static inline float __uint_as_float(unsigned v) { return emulator::bit_cast<float>(v); }
static inline long long __double_as_longlong(double v) { return emulator::bit_cast<long long>(v); }
static inline double __longlong_as_double(long long v) { return emulator::bit_cast<double>(v); }
static inline int __float2int_rn(float v) { return emulator::saturate<int>(std::nearbyint(v)); }
static inline int __float2int_rz(float v) { return emulator::saturate<int>(std::trunc(v)); }
static inline int __float2int_rd(float v) { return emulator::saturate<int>(std::floor(v)); }
static inline int __float2int_ru(float v) { return emulator::saturate<int>(std::ceil(v)); }
static inline unsigned __float2uint_rn(float v) { return emulator::saturate<unsigned>(std::nearbyint(v)); }
static inline unsigned __float2uint_rz(float v) { return emulator::saturate<unsigned>(std::trunc(v)); }
static inline float __int2float_rn(int v) { return static_cast<float>(v); }
static inline float __uint2float_rn(unsigned v) { return static_cast<float>(v); }

static inline unsigned __byte_perm(unsigned a, unsigned b, unsigned pick) {
  const unsigned long long both = static_cast<unsigned long long>(b) << 32 | a;
  unsigned r = 0;
  for (int i = 0; i < 4; i++) {
    const unsigned p = pick >> 4 * i & 15, byte = both >> (p & 7) * 8 & 255;
    r |= (p & 8 ? (byte & 128 ? 255u : 0u) : byte) << 8 * i;
  }
  return r;
}
static inline unsigned __funnelshift_r(unsigned low, unsigned high, unsigned n) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) >> (n & 31));
}
static inline unsigned __funnelshift_l(unsigned low, unsigned high, unsigned n) {
  return static_cast<unsigned>((static_cast<unsigned long long>(high) << 32 | low) << (n & 31) >> 32);
}
static inline int __popc(unsigned v) { return __builtin_popcount(v); }
static inline int __popcll(unsigned long long v) { return __builtin_popcountll(v); }
static inline int __clz(int v) { return v ? __builtin_clz(v) : 32; }
static inline int __clzll(long long v) { return v ? __builtin_clzll(v) : 64; }
static inline int __ffs(int v) { return __builtin_ffs(v); }
static inline int __ffsll(long long v) { return __builtin_ffsll(v); }
static inline unsigned __brev(unsigned v) {
  unsigned r = 0;
  for (int i = 0; i < 32; i++) r |= (v >> i & 1) << (31 - i);
  return r;
}
static inline unsigned __umulhi(unsigned a, unsigned b) { return static_cast<unsigned long long>(a) * b >> 32; }
static inline int __mulhi(int a, int b) { return static_cast<long long>(a) * b >> 32; }
static inline unsigned long long __umul64hi(unsigned long long a, unsigned long long b) {
  return static_cast<unsigned __int128>(a) * b >> 64;
}
static inline int __dp4a(int a, int b, int c) {
  for (int i = 0; i < 4; i++) c += static_cast<signed char>(a >> 8 * i) * static_cast<signed char>(b >> 8 * i);
  return c;
}
