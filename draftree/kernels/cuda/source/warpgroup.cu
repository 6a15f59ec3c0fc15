// The matrix instruction of four warps (Hopper), and what it needs. Matrices lie in shared memory as rows of 128 bytes,
// the 16-byte chunks of a row turned by its number modulo 8, in blocks of 8 rows that begin at multiples of 1024.
constexpr int GROUP_THREADS = 128;

// The lowest dynamic shared memory that a matrix may begin at.
DEV u8* aligned_for_matrices(u8* shared) { return shared + (-static_cast<u32>(reinterpret_cast<u64>(shared)) & 1023); }

#ifndef EMULATED
// A matrix for `multiply`; what lies n bytes further is at + n / 16. All lanes name the same one, so that it is kept in
// registers that belong to the warp.
typedef u32 Matrix;
DEV Matrix matrix_at(const void* place) { return __shfl_sync(~0u, shared_address(place) >> 4, 0); }

// c += a times b, or c = a times b: 64 x 16 halves times 16 x (8 TILES). Rows of b are its columns; rows of a are its
// rows, or with TURNED its columns. A warp has 16 rows of c: lane 4 g + t those of 2t and 2t + 1 in rows g and g + 8.
// Ends with wait_for_products; begin_products comes before the first one.
#define FOUR(n) "+f"(c[n][0]), "+f"(c[n][1]), "+f"(c[n][2]), "+f"(c[n][3])
#define SUMS_1 "%0,%1,%2,%3"
#define SUMS_2 SUMS_1 ",%4,%5,%6,%7"
#define SUMS_3 SUMS_2 ",%8,%9,%10,%11"
#define SUMS_4 SUMS_3 ",%12,%13,%14,%15"
#define SUMS_6 SUMS_4 ",%16,%17,%18,%19,%20,%21,%22,%23"
#define SUMS_8 SUMS_6 ",%24,%25,%26,%27,%28,%29,%30,%31"
#define SUMS_9 SUMS_8 ",%32,%33,%34,%35"
#define PRODUCT(columns, sums, a_at, b_at, adds_at, turned_at, ...)                                                       \
  asm volatile("{.reg .pred adds; setp.ne.b32 adds, %" adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" columns           \
               "k16.f32.f16.f16 {" sums "}, %" a_at ", %" b_at ", adds, 1, 1, %" turned_at ", 0;}"                        \
               : __VA_ARGS__                                                                                              \
               : "l"(a), "l"(b), "r"(adds), "n"(TURNED))
template <int TILES, int TURNED>
DEV void multiply(float (*c)[4], Matrix first, Matrix second, int adds) {
  constexpr u64 FORM = 1ull << 16 | 64ull << 32 | 1ull << 62;  // 1024 bytes to the next 8 rows, chunks turned in 128
  const u64 a = FORM | first, b = FORM | second;
  static_assert(TILES == 1 || TILES == 3 || TILES == 6 || TILES == 9, "not written down");
  if constexpr (TILES == 1) PRODUCT("8", SUMS_1, "4", "5", "6", "7", FOUR(0));
  if constexpr (TILES == 3) PRODUCT("24", SUMS_3, "12", "13", "14", "15", FOUR(0), FOUR(1), FOUR(2));
  if constexpr (TILES == 6)
    PRODUCT("48", SUMS_6, "24", "25", "26", "27", FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5));
  if constexpr (TILES == 9)
    PRODUCT("72", SUMS_9, "36", "37", "38", "39", FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7), FOUR(8));
}
#undef PRODUCT

// The same with a in registers, where lane 4 g + t has columns 2t and 2t + 1 of rows g and g + 8, then those 8 further;
// b consists of pieces of 128 bytes, each 8 of its columns by 8 halves, and says how far it is to the next.
typedef u64 Pieces;
#define PRODUCT(columns, sums, a0, a1, a2, a3, b_at, adds_at, ...)                                                        \
  asm volatile("{.reg .pred adds; setp.ne.b32 adds, %" adds_at ", 0; wgmma.mma_async.sync.aligned.m64n" columns           \
               "k16.f32.f16.f16 {" sums "}, {%" a0 ",%" a1 ",%" a2 ",%" a3 "}, %" b_at ", adds, 1, 1, 0;}"                \
               : __VA_ARGS__                                                                                              \
               : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(b), "r"(adds))
template <int TILES>
DEV void multiply_pieces(float (*c)[4], const u32* a, Pieces b, int adds) {
  static_assert(TILES < 5 || TILES == 6 || TILES == 8, "not written down");
  if constexpr (TILES == 1) PRODUCT("8", SUMS_1, "4", "5", "6", "7", "8", "9", FOUR(0));
  if constexpr (TILES == 2) PRODUCT("16", SUMS_2, "8", "9", "10", "11", "12", "13", FOUR(0), FOUR(1));
  if constexpr (TILES == 3) PRODUCT("24", SUMS_3, "12", "13", "14", "15", "16", "17", FOUR(0), FOUR(1), FOUR(2));
  if constexpr (TILES == 4) PRODUCT("32", SUMS_4, "16", "17", "18", "19", "20", "21", FOUR(0), FOUR(1), FOUR(2), FOUR(3));
  if constexpr (TILES == 6)
    PRODUCT("48", SUMS_6, "24", "25", "26", "27", "28", "29", FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5));
  if constexpr (TILES == 8)
    PRODUCT("64", SUMS_8, "32", "33", "34", "35", "36", "37", FOUR(0), FOUR(1), FOUR(2), FOUR(3), FOUR(4), FOUR(5), FOUR(6), FOUR(7));
}
#undef PRODUCT

// Pieces from `place` on: bytes to the next 8 halves, and to the next 8 columns.
DEV Pieces pieces_at(const void* place, int next_halves, int next_columns) {
  return __shfl_sync(~0u, shared_address(place) >> 4, 0) | static_cast<u64>(next_halves >> 4) << 16 | static_cast<u64>(next_columns >> 4) << 32;
}
DEV Pieces further(Pieces b, int bytes) { return b + (bytes >> 4); }

DEV void begin_products() { asm volatile("wgmma.fence.sync.aligned;" ::: "memory"); }
DEV void wait_for_products() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 0;" ::: "memory");
}

// The same where reads of memory may change places with them. Products since the last end are a batch; waits until at most
// PENDING batches are under way.
DEV void begin_batch() { asm volatile("wgmma.fence.sync.aligned;"); }
template <int PENDING>
DEV void end_batch() {
  asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned %0;" ::"n"(PENDING));
}

// Between products and other uses of their sums, which must not change places.
template <int TILES>
DEV void hold(float (*c)[4]) {
#pragma unroll
  for (int n = 0; n < TILES; n++) asm volatile("" : FOUR(n)::"memory");
}
template <int TILES>
DEV void hold_batch(float (*c)[4]) {
#pragma unroll
  for (int n = 0; n < TILES; n++) asm volatile("" : FOUR(n));
}
#undef FOUR

// What this thread wrote to shared memory, or has seen there, is there for matrix instructions that follow.
DEV void show_to_matrices() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

// Arrives at the barrier when all copies of this thread have.
DEV void arrive_after_copies(u64* barrier) {
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
}

// Two 8 x 8 matrices of halves, turned: lane 4 g + t has those of rows 2t and 2t + 1 in column g; lane r, 8 + r names row r.
DEV void store_matrix_x2_trans(void* row, u32 a, u32 b) {
  asm volatile("stmatrix.sync.aligned.m8n8.x2.trans.shared.b16 [%0], {%1,%2};" ::"r"(shared_address(row)), "r"(a), "r"(b) : "memory");
}

// 2^v for v <= 0; what is too small for a half is 0 in the end.
DEV float exp2_fast(float v) {
  float r;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(r) : "f"(v));
  return r;
}

DEV u32 round_to_halves(float even, float odd) {
  u32 r;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(odd), "f"(even));
  return r;
}

// Hides what v is made of: nothing that follows from it stays in registers from before.
DEV void launder(u32& v) { asm volatile("" : "+r"(v)); }
DEV void launder(int& v) { asm volatile("" : "+r"(v)); }
DEV void launder(u8*& v) { asm volatile("" : "+l"(v)); }

template <int COUNT>
DEV void take_registers() { asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT)); }
template <int COUNT>
DEV void give_registers() { asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT)); }
#endif
