// Rows of the embedding table, decoded to float32. The table may lie in host memory: what a block needs of a row is
// fetched once, in whole vectors, and decoded from shared memory.
constexpr int CHUNK = 1024;  // columns a block
constexpr int CHUNK_BYTES = CHUNK / BLOCK_LEN * BLOCK_BYTES;
static_assert(CHUNK % BLOCK_LEN == 0, "blocks of weights lie in one chunk");

// A block: CHUNK columns of a row. The table starts at a multiple of 16 bytes and is padded to one.
KERNEL void LAUNCH_BOUNDS(256) embed_kernel(const u8* table, const int* tokens, const int* live, float* out, int width, int out_stride) {
  __shared__ uint4 raw[CHUNK_BYTES / 16 + 2];
  let_later_grids_start();
  wait_for_earlier_grids();
  const int row = blockIdx.x, first = blockIdx.y * CHUNK, thread = threadIdx.x;
  if (row >= *live) return;
  const u64 row_blocks = width / BLOCK_LEN;
  const u64 begin = (tokens[row] * row_blocks + first / BLOCK_LEN) * BLOCK_BYTES;
  const u64 end = begin + min(CHUNK, width - first) / BLOCK_LEN * BLOCK_BYTES;
  for (u64 i = begin / 16 + thread; i * 16 < end; i += blockDim.x) raw[i - begin / 16] = reinterpret_cast<const uint4*>(table)[i];
  __syncthreads();
  const int column = thread * 4;
  if (first + column >= width) return;
  const u8* bytes = reinterpret_cast<const u8*>(raw) + begin % 16;
  float v[4];
  for (int k = 0; k < 4; k++) v[k] = raw_value(bytes + (column + k) / BLOCK_LEN * BLOCK_BYTES, (column + k) % BLOCK_LEN);
  *reinterpret_cast<float4*>(out + static_cast<u64>(row) * out_stride + first + column) = make_float4(v[0], v[1], v[2], v[3]);
}
