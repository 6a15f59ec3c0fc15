// Reads memory and does nothing else: the ceiling that matmul speeds are compared with.
extern "C" __global__ void read_kernel(const uint4* data, u32* out, long long num_vectors) {
  const long long step = static_cast<long long>(gridDim.x) * blockDim.x;
  u32 sum = 0;
#pragma unroll 8
  for (long long i = static_cast<long long>(blockIdx.x) * blockDim.x + threadIdx.x; i < num_vectors; i += step) {
    const uint4 v = __ldcs(data + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678u) *out = sum;
}
