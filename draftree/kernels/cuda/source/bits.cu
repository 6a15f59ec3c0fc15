// Names for single instructions: packed halves, byte permutes, the matrix instruction. No headers are needed.
typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;
#define DEV static __device__ __forceinline__
#define DEV_MEMBER __device__ __forceinline__

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

// Both halves of the result are the low or the high half of v.
DEV u32 dup_lo(u32 v) { return __byte_perm(v, v, 0x1010); }
DEV u32 dup_hi(u32 v) { return __byte_perm(v, v, 0x3232); }

DEV u32 rotate_right(u32 v, int n) { return n ? __funnelshift_r(v, v, n) : v; }

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

DEV float pow2(int e) { return __int_as_float((e + 127) << 23); }

// The power of two that brings `largest` into [2^top, 2^(top+1)); 0 where there is nothing to scale.
DEV int exponent_to(float largest, int top) {
  const int e = (__float_as_int(largest) >> 23) & 255;
  return e == 0 || e == 255 ? 0 : max(-100, min(100, top + 127 - e));
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

// With a chained launch the grid may start before the one ahead of it has ended: everything that an earlier
// grid writes is read, and everything it reads is written, only after wait_for_earlier_grids.
DEV void wait_for_earlier_grids() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEV void let_later_grids_start() {
#if __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;");
#endif
}
