// What source/bits.cu and source/ring.cu write in assembly, for emulator.h: halves, matrices, copies, barriers.
namespace emulator {
static inline float widen(u32 half) {
  const u32 exponent = half & 0x7C00, sign = (half & 0x8000) << 16;
  if (!exponent) return bit_cast<float>(bit_cast<u32>((half & 0x3FF) * 0x1p-24f) | sign);
  return bit_cast<float>((sign | (half & 0x7FFF) << 13) + (exponent == 0x7C00 ? 0x70000000 : 0x38000000));
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

// Operations of emulator.cpp.
template <int K>
void multiply_tiles(u32 lanes, Fiber* warp);
LINKED void multiply_tf32(u32 lanes, Fiber* warp);
template <int COUNT, bool IS_TRANSPOSED>
void load_matrices(u32 lanes, Fiber* warp);
LINKED void copy_later(void* to, const void* from, u32 bytes);
LINKED void finish_copies(u32 num_pending);

template <int K>
void multiply(float* c, const u32* a, const u32* b, const float* from) {
  u32 in[K / 4 + K / 8 + 4];
  memcpy(in, a, K), memcpy(in + K / 4, b, K / 2), memcpy(in + K / 4 + K / 8, from, 16);
  memcpy(c, operate(~0u, multiply_tiles<K>, &in), 16);
}

template <int COUNT, bool IS_TRANSPOSED>
void load(u32* r, const void* row) {
  memcpy(r, operate(~0u, load_matrices<COUNT, IS_TRANSPOSED>, &row), COUNT * 4);
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
static inline void copy_bulk_once(void* to, const void* from, int bytes, unsigned long long* at) { copy_bulk(to, from, bytes, at); }

// The twins of source/gated_delta_bits.cu.
static inline void prefetch_line(const void*) {}
static inline void mma_tf32(float* c, const unsigned* a, unsigned b0, unsigned b1) {
  unsigned in[10] = {a[0], a[1], a[2], a[3], b0, b1};
  memcpy(in + 6, c, 16);
  memcpy(c, emulator::operate(~0u, emulator::multiply_tf32, &in), 16);
}

// The twins of source/warpgroup.cu. Products read shared memory at once, so what was not shown in time is missing here
// too; that four warps ask for them together is not checked.
namespace emulator {
// A half of a matrix: rows of 128 bytes, whose chunks the address itself turns.
static inline float half_at(u64 matrix, u32 row, u32 column) {
  u64 at = matrix * 16 + row * 128 + column * 2;
  at ^= (at >> 7 & 7) << 4;
  return widen(*reinterpret_cast<const unsigned short*>(at));
}

static void store_turned(u32 lanes, Fiber* warp) {
  if (lanes != ~0u) fail("storing matrices needs all 32 lanes, not %08x", lanes);
  for (u32 lane = 0; lane < 32; lane++)
    for (u32 i = 0; i < 2; i++)
      for (u32 side = 0; side < 2; side++) {
        char* row;
        memcpy(&row, warp[i * 8 + lane % 4 * 2 + side].in, sizeof row);
        const unsigned short half = warp[lane].in[2 + i] >> side * 16;
        memcpy(row + lane / 4 * 2, &half, 2);
      }
}
}  // namespace emulator
typedef unsigned long long Matrix;
static inline Matrix matrix_at(const void* place) {
  if (reinterpret_cast<unsigned long long>(place) % 1024) emulator::fail("a matrix does not begin at a multiple of 1024 bytes");
  return reinterpret_cast<unsigned long long>(place) / 16;
}
template <int TILES, int TURNED>
void multiply(float (*c)[4], Matrix a, Matrix b, int adds) {
  const unsigned warp = emulator::current / 32 % 4, lane = emulator_lane();
  for (int row = 0; row < 2; row++) {
    float left[16];
    for (unsigned k = 0; k < 16; k++) {
      const unsigned m = warp * 16 + lane / 4 + row * 8;
      left[k] = TURNED ? emulator::half_at(a, k, m) : emulator::half_at(a, m, k);
    }
    for (int n = 0; n < TILES; n++)
      for (int side = 0; side < 2; side++) {
        float sum = adds ? c[n][row * 2 + side] : 0.0f;
        for (unsigned k = 0; k < 16; k++) sum += left[k] * emulator::half_at(b, n * 8 + lane % 4 * 2 + side, k);
        c[n][row * 2 + side] = sum;
      }
  }
}
struct Pieces {
  const char* at;
  int next_halves, next_columns;
};
static inline Pieces pieces_at(const void* place, int next_halves, int next_columns) {
  if ((reinterpret_cast<unsigned long long>(place) | next_halves | next_columns) % 16) emulator::fail("pieces of a matrix are not aligned");
  return {static_cast<const char*>(place), next_halves, next_columns};
}
static inline Pieces further(Pieces b, int bytes) { return {b.at + bytes, b.next_halves, b.next_columns}; }
template <int TILES>
void multiply_pieces(float (*c)[4], const unsigned* a, Pieces b, int adds) {
  for (int n = 0; n < TILES; n++) {
    const char* at = b.at + n * b.next_columns + emulator_lane() * 4;
    unsigned right[2];
    memcpy(right, at, 4), memcpy(right + 1, at + b.next_halves, 4);
    if (adds)
      mma(c[n], a, right[0], right[1]);
    else
      mma_new(c[n], a, right[0], right[1]);
  }
}
static inline void begin_products() {}
static inline void wait_for_products() {}
static inline void begin_batch() {}
template <int PENDING>
void end_batch() {}
template <int TILES>
void hold_batch(float (*c)[4]) {}
template <int TILES>
void hold(float (*c)[4]) {}
static inline void show_to_matrices() {}
static inline void arrive_after_copies(unsigned long long* barrier) {
  emulator::fibers[emulator::current].copy_group++;
  emulator::finish_copies(0);
  arrive(barrier);
}
static inline void store_matrix_x2_trans(void* row, unsigned a, unsigned b) {
  unsigned in[4] = {0, 0, a, b};
  memcpy(in, &row, sizeof row);
  emulator::operate(~0u, emulator::store_turned, &in);
}
static inline float exp2_fast(float v) { return exp2f(v); }
static inline unsigned round_to_halves(float even, float odd) {
  return emulator::round_to_half(even) | emulator::round_to_half(odd) << 16;
}
template <class T>
void launder(T&) {}
template <int COUNT>
void take_registers() {}
template <int COUNT>
void give_registers() {}
