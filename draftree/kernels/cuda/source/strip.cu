// What products have in common, whatever their activations are: the shape of a step, and small helpers.
#ifndef OWN_ROW
#define OWN_ROW 0
#endif
constexpr int BAND_ROWS = BAND * ROWS;
constexpr int NUM_STRIPS = BAND_ROWS / 16;
constexpr int X_BLOCKS = COLS / 128;
constexpr int STEP_BYTES = BAND * UNIT_BYTES;
static_assert(!OWN_ROW || TOKEN_TILES == 1, "a row is one token");

DEV float4 add4(float4 a, float4 b) {
  return make_float4(__fadd_rn(a.x, b.x), __fadd_rn(a.y, b.y), __fadd_rn(a.z, b.z), __fadd_rn(a.w, b.w));
}

// The compiler keeps v in a register, since it cannot know what comes out of a shuffle.
DEV int keep(int v) { return __shfl_sync(~0u, v, threadIdx.x & 31); }
