// What all kernels of the gated delta rule share: gates, unit vectors, and single instructions.
constexpr int LANE_KEYS = 4;  // a lane reads keys and queries in vectors of 4
constexpr float NORM_EPS = 1e-6f;

#ifndef EMULATED
// Brings a line closer without looking at it: allowed even while an earlier grid may still write it.
DEV void prefetch_line(const void* p) { asm volatile("prefetch.global.L2 [%0];" ::"l"(p)); }

// 16x8 times 8x8 floats, of which the 13 low bits are ignored.
DEV void mma_tf32(float* c, const u32* a, u32 b0, u32 b1) {
  asm("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
      : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}
#endif

// The nearest float without those bits.
DEV u32 to_tf32(float v) { return __float_as_uint(v) + 0x1000u; }

DEV float log_decay(float alpha, float decay, float decay_bias) {
  const float x = __fadd_rn(alpha, decay_bias);
  return __fmul_rn(decay, __fadd_rn(fmaxf(x, 0.0f), log1pf(expf(-fabsf(x)))));
}

// More exact than what activations use.
DEV float open_gate(float x) { return __fdividef(1.0f, __fadd_rn(1.0f, expf(-x))); }

DEV u32 two_halves(float even, float odd) { return to_half(even) | static_cast<u32>(to_half(odd)) << 16; }

DEV float dot4(float4 a, float4 b) {
  return __fmaf_rn(a.w, b.w, __fmaf_rn(a.z, b.z, __fmaf_rn(a.y, b.y, __fmul_rn(a.x, b.x))));
}

DEV float4 scaled(float4 v, float factor) {
  return make_float4(__fmul_rn(v.x, factor), __fmul_rn(v.y, factor), __fmul_rn(v.z, factor), __fmul_rn(v.w, factor));
}

// Adds up each of COUNT numbers over groups of LANES lanes; every lane gets the same bits.
template <int LANES, int COUNT>
DEV void sum_lanes(float* v) {
#pragma unroll
  for (int d = 1; d < LANES; d *= 2)
#pragma unroll
    for (int i = 0; i < COUNT; i++) v[i] = __fadd_rn(v[i], __shfl_xor_sync(~0u, v[i], d));
}

DEV float unit_factor(float sum_squares) { return rsqrtf(__fadd_rn(sum_squares, NORM_EPS)); }

DEV float query_scale() { return rsqrtf(static_cast<float>(HEAD_DIM)); }

// A lane's four numbers of a row of one head; zero beyond the head and for rows that are not there.
DEV float4 load_lane(const float* row, int lane, bool is_there) {
  const bool has_keys = is_there && lane * LANE_KEYS < HEAD_DIM;
  return has_keys ? *reinterpret_cast<const float4*>(row + lane * LANE_KEYS) : make_float4(0.0f, 0.0f, 0.0f, 0.0f);
}

// Rows of a slab, from `first` on, that the pass has (control[0] in all).
DEV int live_rows(const int* control, int first, int num_rows) { return max(0, min(num_rows, control[0] - first)); }
