// Exactly 0 or 1 at the far ends; a few units in the last place between.
DEV float sigmoid(float x) { return __fdividef(1.0f, __fadd_rn(1.0f, __expf(-x))); }

DEV float silu(float x) { return __fmul_rn(x, sigmoid(x)); }
