// Reads memory and does nothing else: the ceiling that matmul speeds are compared with.
KERNEL void read_kernel(const uint4* data, u32* out, int num_vectors) {
  const u32 step = gridDim.x * blockDim.x;
  u32 sum = 0;
#pragma unroll 8
  for (u32 i = blockIdx.x * blockDim.x + threadIdx.x; i < num_vectors; i += step) {
    const uint4 v = __ldcs(data + i);
    sum ^= v.x ^ v.y ^ v.z ^ v.w;
  }
  if (sum == 0x12345678u) *out = sum;
}
