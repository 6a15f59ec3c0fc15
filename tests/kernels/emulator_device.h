// The chip's functions and instructions for emulator.h: intrinsics, warp operations, atomics, and the twins of what
// source/bits.cu and source/ring.cu write in assembly.
namespace emulator {
template <class T, class F>
T bit_cast(F from) {
  static_assert(sizeof(T) == sizeof(F));
  T to;
  memcpy(&to, &from, sizeof to);
  return to;
}

static inline float widen(u32 half) {
  const u32 bits = (half & 0x7FFF) << 13;
  const u32 size = (half & 0x7C00) == 0x7C00 ? bits | 0x7F800000u : bit_cast<u32>(bit_cast<float>(bits) * 0x1p112f);
  return bit_cast<float>(size | (half & 0x8000) << 16);
}

static inline u32 round_to_half(float value) {
  u32 bits = bit_cast<u32>(value);
  const u32 sign = bits >> 16 & 0x8000;
  bits &= 0x7FFFFFFF;
  if (bits > 0x7F800000) return 0x7FFF;
  if (bits >= 0x477FF000) return sign | 0x7C00;
  // Below 2^-14 halves have steps of 2^-24, which are those of floats next to 0.5.
  if (bits < 0x38800000) return sign | (bit_cast<u32>(bit_cast<float>(bits) + 0.5f) - 0x3F000000);
  return sign | (bits + 0xFFF + (bits >> 13 & 1) - 0x38000000) >> 13;
}

// Rounded to odd on the way, so that the two roundings are one.
static inline u32 round_to_half(double value) {
  const float near = static_cast<float>(value);
  u32 bits = bit_cast<u32>(near);
  if (near != value && !(bits & 1) && std::isfinite(near)) bits += std::fabs(near) < std::fabs(value) ? 1 : -1;
  return round_to_half(bit_cast<float>(bits));
}

template <class F>
u32 on_halves(u32 a, u32 b, F f) {
  const u32 low = round_to_half(f(double(widen(a & 0xFFFF)), double(widen(b & 0xFFFF))));
  return low | round_to_half(f(double(widen(a >> 16)), double(widen(b >> 16)))) << 16;
}

#define EACH_LANE(lane) \
  for (u32 rest = lanes, lane; rest && (lane = __builtin_ctz(rest), true); rest &= rest - 1)

static void meet_lanes(u32, Fiber*) {}

struct Shuffled {
  u64 value;
  u32 source;
};

static void shuffle_lanes(u32 lanes, Fiber* warp) {
  EACH_LANE(lane) {
    Shuffled mine, other;
    memcpy(&mine, warp[lane].in, sizeof mine);
    memcpy(&other, warp[mine.source].in, sizeof other);
    if (!(lanes >> mine.source & 1)) other.value = ~0ull;
    memcpy(warp[lane].out, &other.value, 8);
  }
}

template <class T>
T shuffle(u32 mask, T value, u32 source) {
  static_assert(sizeof(T) <= 8);
  Shuffled in = {0, source};
  memcpy(&in.value, &value, sizeof value);
  memcpy(&value, operate(mask, shuffle_lanes, &in, sizeof in), sizeof value);
  return value;
}

static void vote_lanes(u32 lanes, Fiber* warp) {
  u32 bits = 0;
  EACH_LANE(lane) bits |= (warp[lane].in[0] != 0) << lane;
  EACH_LANE(lane) warp[lane].out[0] = bits, warp[lane].out[1] = lanes;
}

static const u32* vote(u32 mask, bool value) {
  const u32 in = value;
  return operate(mask, vote_lanes, &in, 4);
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
  return bit_cast<T>(operate(mask, reduce_lanes<T, F>, &value, 4)[0]);
}

template <class F, class T>
T modify(T* at, T value) {
  const T old = *at;
  *at = F()(old, value);
  return old;
}

// in: a (K / 4 words), b (K / 8 words), c (4 floats). Sums run along k, in float32; products are exact.
template <int K>
void multiply_tiles(u32 lanes, Fiber* warp) {
  if (lanes != ~0u) fail("a matrix instruction needs all 32 lanes, not %08x", lanes);
  typedef float Row __attribute__((vector_size(32)));
  float a[16][K];
  Row b[K], c[16];
  for (int lane = 0; lane < 32; lane++) {
    const u32* in = warp[lane].in;
    const int g = lane / 4, t = lane % 4;
    for (int i = 0; i < K / 4; i++)
      for (int side = 0; side < 2; side++)
        a[g + i % 2 * 8][i / 2 * 8 + t * 2 + side] = widen(in[i] >> side * 16 & 0xFFFF);
    for (int i = 0; i < K / 8; i++)
      for (int side = 0; side < 2; side++) b[i * 8 + t * 2 + side][g] = widen(in[K / 4 + i] >> side * 16 & 0xFFFF);
    for (int i = 0; i < 4; i++) c[g + i / 2 * 8][t * 2 + i % 2] = bit_cast<float>(in[K / 4 + K / 8 + i]);
  }
  for (int row = 0; row < 16; row++)
    for (int k = 0; k < K; k++) c[row] += a[row][k] * b[k];
  for (int lane = 0; lane < 32; lane++)
    for (int i = 0; i < 4; i++) {
      const float value = c[lane / 4 + i / 2 * 8][lane % 4 * 2 + i % 2];
      warp[lane].out[i] = bit_cast<u32>(value);
    }
}

template <int K>
void multiply(float* c, const u32* a, const u32* b, const float* from) {
  u32 in[K / 4 + K / 8 + 4];
  memcpy(in, a, K), memcpy(in + K / 4, b, K / 2), memcpy(in + K / 4 + K / 8, from, 16);
  memcpy(c, operate(~0u, multiply_tiles<K>, in, sizeof in), 16);
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

template <int COUNT, bool IS_TRANSPOSED>
void load(u32* r, const void* row) {
  memcpy(r, operate(~0u, load_matrices<COUNT, IS_TRANSPOSED>, &row, sizeof row), COUNT * 4);
}

static inline void copy_later(void* to, const void* from, u32 bytes) {
  if ((reinterpret_cast<u64>(to) | reinterpret_cast<u64>(from)) % bytes) fail("a copy of %u bytes is not aligned", bytes);
  Fiber& f = fibers[current];
  f.copies.push_back({to, from, bytes, f.copy_group});
}

static inline void finish_copies(u32 num_pending) {
  Fiber& f = fibers[current];
  size_t done = 0;
  while (done < f.copies.size() && f.copies[done].group + num_pending < f.copy_group) {
    memcpy(f.copies[done].to, f.copies[done].from, f.copies[done].bytes);
    done++;
  }
  f.copies.erase(f.copies.begin(), f.copies.begin() + done);
}

// A barrier in shared memory: arrivals still missing, arrivals of a phase, bytes still missing, parity.
struct Mbarrier {
  signed int bytes : 24;
  unsigned parity : 1, missing : 16, count : 16;
};
static_assert(sizeof(Mbarrier) == 8);

static inline void settle(Mbarrier& b) {
  if (b.missing == 0 && b.bytes == 0) b.missing = b.count, b.parity ^= 1u;
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
static inline void __syncwarp(unsigned mask = ~0u) { emulator::operate(mask, emulator::meet_lanes, &mask, 4); }
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
  return emulator::operate(mask, emulator::match_lanes, &word, 8)[0];
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
static inline int __float2int_rn(float v) { return static_cast<int>(std::nearbyint(v)); }
static inline int __float2int_rz(float v) { return static_cast<int>(v); }
static inline int __float2int_rd(float v) { return static_cast<int>(std::floor(v)); }
static inline int __float2int_ru(float v) { return static_cast<int>(std::ceil(v)); }
static inline unsigned __float2uint_rn(float v) { return static_cast<unsigned>(std::nearbyint(v)); }
static inline unsigned __float2uint_rz(float v) { return static_cast<unsigned>(v); }
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

// The twins of source/bits.cu.
static inline unsigned hmul2(unsigned a, unsigned b) { return emulator::on_halves(a, b, [](double x, double y) { return x * y; }); }
static inline unsigned hsub2(unsigned a, unsigned b) { return emulator::on_halves(a, b, [](double x, double y) { return x - y; }); }
static inline unsigned short to_half(float v) { return emulator::round_to_half(v); }
static inline float from_half(unsigned short v) { return emulator::widen(v); }
static inline float lower_half(unsigned v) { return emulator::widen(v & 0xFFFF); }
static inline float upper_half(unsigned v) { return emulator::widen(v >> 16); }
static inline void mma(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  const unsigned b[2] = {b0, b1};
  emulator::multiply<16>(c, a, b, c);
}
static inline void mma_new(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  const unsigned b[2] = {b0, b1};
  const float zero[4] = {};
  emulator::multiply<16>(c, a, b, zero);
}
static inline void mma_new_short(float* c, const unsigned* a, unsigned b0) {
  const float zero[4] = {};
  emulator::multiply<8>(c, a, &b0, zero);
}
static inline void load_matrix_x2(unsigned* r, const void* row) { emulator::load<2, false>(r, row); }
static inline void load_matrix_x4(unsigned* r, const void* row) { emulator::load<4, false>(r, row); }
static inline void load_matrix_x2_trans(unsigned* r, const void* row) { emulator::load<2, true>(r, row); }
static inline void load_matrix_x4_trans(unsigned* r, const void* row) { emulator::load<4, true>(r, row); }
static inline void copy16_async(void* to, const void* from) { emulator::copy_later(to, from, 16); }
static inline void commit_copies() { emulator::fibers[emulator::current].copy_group++; }
template <int PENDING>
void wait_copies() { emulator::finish_copies(PENDING); }
static inline void meet_some(int barrier, int num_threads) { emulator::meet(barrier, num_threads, emulator::SYNC, false); }

// The twins of source/ring.cu.
static inline emulator::Mbarrier& emulator_barrier(unsigned long long* b) { return *reinterpret_cast<emulator::Mbarrier*>(b); }
static inline void init_barrier(unsigned long long* at, int count) {
  emulator_barrier(at) = {0, 0, static_cast<unsigned>(count), static_cast<unsigned>(count)};
}
static inline void publish_barriers() {}
static inline void arrive(unsigned long long* at) {
  emulator::Mbarrier& b = emulator_barrier(at);
  if (!b.missing) emulator::fail("more arrivals than a barrier in shared memory expects");
  b.missing--;
  emulator::settle(b);
}
static inline void expect_bytes(unsigned long long* at, int bytes) {
  emulator_barrier(at).bytes += bytes;
  arrive(at);
}
static inline bool has_ended(unsigned long long* at, int parity) { return emulator_barrier(at).parity != parity; }
static inline void wait_barrier(unsigned long long* at, int parity) {
  while (!has_ended(at, parity)) emulator::spin();
}
static inline void copy_bulk(void* to, const void* from, int bytes, unsigned long long* at) {
  if ((reinterpret_cast<unsigned long long>(to) | reinterpret_cast<unsigned long long>(from) | bytes) % 16)
    emulator::fail("a bulk copy of %d bytes is not aligned", bytes);
  memcpy(to, from, bytes);
  emulator::Mbarrier& b = emulator_barrier(at);
  b.bytes -= bytes;
  emulator::settle(b);
}
static inline void release_stores() {}

// The twins of source/gated_delta_bits.cu.
static inline void prefetch_line(const void*) {}
namespace emulator {
// in: a (4 words), b (2 words), c (4 floats). The chip ignores the 13 low bits of a and b.
static void multiply_tf32(u32 lanes, Fiber* warp) {
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
}  // namespace emulator
static inline void mma_tf32(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  unsigned in[10] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(in + 6, c, 16);
  memcpy(c, emulator::operate(~0u, emulator::multiply_tf32, in, sizeof in), 16);
}
