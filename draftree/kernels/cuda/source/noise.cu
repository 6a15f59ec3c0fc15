// Gumbel noise of (seed, position, token): the integers and the bits of the result are those of kernels/cpu/noise.py.
constexpr u64 GOLDEN = 0x9E3779B97F4A7C15ull;

DEV u64 mix(u64 x) {
  x = (x ^ x >> 30) * 0xBF58476D1CE4E5B9ull;
  x = (x ^ x >> 27) * 0x94D049BB133111EBull;
  return x ^ x >> 31;
}

DEV u64 noise_key(u64 seed, int position) { return mix(mix(seed + GOLDEN) + static_cast<u64>(position) * GOLDEN); }

DEV u32 noise_bits(u64 key, int token) { return mix(key + static_cast<u64>(token + 1) * GOLDEN) >> 32; }

// Natural logarithm of a positive normal number by basic operations only: nothing is fused, so every machine agrees.
DEV double exact_log(double x) {
  const u64 bits = __double_as_longlong(x);
  int exponent = static_cast<int>(bits >> 52) - 1022;
  double mantissa = __longlong_as_double((bits & 0xFFFFFFFFFFFFFull) | 1022ull << 52);
  if (mantissa < 0.7071067811865476) mantissa *= 2.0, exponent -= 1;
  const double s = (mantissa - 1.0) / (mantissa + 1.0), square = __dmul_rn(s, s);
  double total = 0.0;
#pragma unroll
  for (int i = 11; i >= 0; i--) total = __dadd_rn(__dmul_rn(total, square), 2.0 / (2 * i + 1));
  return __dadd_rn(__dmul_rn(total, s), __dmul_rn(exponent, 0.6931471805599453));
}

static __device__ __noinline__ float exact_noise(u32 bits) {
  const double u = __dmul_rn(__dadd_rn(bits, 0.5), 1.0 / 4294967296.0);
  return static_cast<float>(-exact_log(-exact_log(u)));
}

// The same to within ROUGH_ERROR, for finding out who is worth the exact one.
constexpr float ROUGH_ERROR = 5e-4f;

DEV float rough_noise(u32 bits) {
  const float scale = 1.0f / 4294967296.0f;
  const float u = (static_cast<float>(bits) + 0.5f) * scale, rest = (static_cast<float>(~bits) + 0.5f) * scale;
  // -log(u): near 1 only the distance to 1 has the digits.
  const float series = rest * (1.0f + rest * (0.5f + rest * (0.33333333f + rest * (0.25f + rest * 0.2f))));
  return -__logf(bits >= 0xC0000000u ? series : -__logf(u));
}
