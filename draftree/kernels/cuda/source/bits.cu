// Names for single instructions: packed halves, byte permutes, the matrix instruction. No headers are needed.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV static __device__ __forceinline__
#define DEV_MEMBER __device__ __forceinline__

// How a kernel begins, and its dynamic shared memory. In a persistent kernel (machine.cu) kernels are functions.
#ifndef SHARED_MEMORY
#define SHARED_MEMORY(name) extern __shared__ __align__(128) u8 name[]
#endif
#ifdef PERSISTENT
#define KERNEL DEV
#define LAUNCH_BOUNDS(...)
#define DYNAMIC_SHARED(name) u8* const name = own_memory()
#else
#define KERNEL extern "C" __global__
#define LAUNCH_BOUNDS(...) __launch_bounds__(__VA_ARGS__)
#define DYNAMIC_SHARED(name) SHARED_MEMORY(name)
#endif

// Tests run the sources as C++ and define EMULATED; they bring their own versions of what is assembly here.
#ifndef EMULATED
DEV u32 hmul2(u32 a, u32 b) {
  u32 r;
  asm("mul.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

DEV u32 hsub2(u32 a, u32 b) {
  u32 r;
  asm("sub.rn.f16x2 %0, %1, %2;" : "=r"(r) : "r"(a), "r"(b));
  return r;
}

DEV u16 to_half(float v) {
  u16 r;
  asm("cvt.rn.f16.f32 %0, %1;" : "=h"(r) : "f"(v));
  return r;
}

DEV float lower_half(u32 v) {
  float r;
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, lo;}" : "=f"(r) : "r"(v));
  return r;
}

DEV float upper_half(u32 v) {
  float r;
  asm("{.reg .b16 lo, hi; mov.b32 {lo, hi}, %1; cvt.f32.f16 %0, hi;}" : "=f"(r) : "r"(v));
  return r;
}

DEV float from_half(u16 v) {
  float r;
  asm("cvt.f32.f16 %0, %1;" : "=f"(r) : "h"(v));
  return r;
}

// 16x16 halves times 16x8 halves; every column of c depends on its own column of b only.
DEV void mma(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// The same without anything to add to.
DEV void mma_new(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%10,%10,%10,%10};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1), "f"(0.0f));
}

// 16x8 halves times 8x8 halves.
DEV void mma_new_short(float* c, const u32* a, u32 b0) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5}, {%6}, {%7,%7,%7,%7};"
      : "=f"(c[0]), "=f"(c[1]), "=f"(c[2]), "=f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(b0), "f"(0.0f));
}

DEV u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

// Matrices of 8 rows of 8 halves in shared memory: lane 8 i + r names row r of matrix i, 16 bytes. Lane 4 g + t gets
// the halves 2t and 2t + 1 of row g of each; with _trans, those of column g in rows 2t and 2t + 1.
DEV void load_matrix_x2(u32* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
}

DEV void load_matrix_x4(u32* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

DEV void load_matrix_x2_trans(u32* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x2.trans.shared.b16 {%0,%1}, [%2];" : "=r"(r[0]), "=r"(r[1]) : "r"(shared_address(row)) : "memory");
}

DEV void load_matrix_x4_trans(u32* r, const void* row) {
  asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
               : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
               : "r"(shared_address(row))
               : "memory");
}

// Copies 16 bytes from global to shared memory in the background, past the first cache. Copies belong to the group
// that the next commit_copies closes; wait_copies returns when at most PENDING of this thread's groups are under way.
DEV void copy16_async(void* to, const void* from) {
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to)), "l"(from) : "memory");
}

DEV void commit_copies() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int PENDING>
DEV void wait_copies() {
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
}

// A barrier of some warps only: num_threads is a multiple of 32; barrier 0 is that of __syncthreads.
DEV void meet_some(int barrier, int num_threads) {
  asm volatile("barrier.sync %0, %1;" ::"r"(barrier), "r"(num_threads) : "memory");
}
#endif

// Both halves of the result are the low or the high half of v.
DEV u32 dup_lo(u32 v) { return __byte_perm(v, v, 0x1010); }
DEV u32 dup_hi(u32 v) { return __byte_perm(v, v, 0x3232); }

DEV u32 rotate_right(u32 v, int n) { return n ? __funnelshift_r(v, v, n) : v; }

DEV float pow2(int e) { return __int_as_float((e + 127) << 23); }

// The power of two that brings `largest` into [2^top, 2^(top+1)); 0 where there is nothing to scale.
DEV int exponent_to(float largest, int top) {
  const int e = (__float_as_int(largest) >> 23) & 255;
  return e == 0 || e == 255 ? 0 : max(-100, min(100, top + 127 - e));
}

// With a chained launch the grid may start before the one ahead of it has ended: everything that an earlier
// grid writes is read, and everything it reads is written, only after wait_for_earlier_grids, which all threads call.
#ifdef PERSISTENT
DEV void wait_for_earlier_grids();
DEV void let_later_grids_start() {}
#else
DEV void wait_for_earlier_grids() {
#if __CUDA_ARCH__ >= 900 && !defined(EMULATED)
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEV void let_later_grids_start() {
#if __CUDA_ARCH__ >= 900 && !defined(EMULATED)
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
#endif
