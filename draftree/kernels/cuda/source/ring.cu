// A ring of shared-memory stages, filled ahead of use. With BULK one thread asks for whole pieces, and barriers in
// shared memory say when a stage is full or empty; else all threads copy 16 bytes at a time and meet once a stage.
#ifndef BULK
#define BULK (__CUDA_ARCH__ >= 900)
#endif

#ifndef EMULATED
DEV void init_barrier(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

DEV void arrive(u64* barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(shared_address(barrier)) : "memory");
}

// Whether the phase with this parity has ended.
DEV bool has_ended(u64* barrier, int parity) {
  u32 ended;
  asm volatile("{.reg .pred p; mbarrier.test_wait.parity.shared.b64 p, [%1], %2; selp.u32 %0, 1, 0, p;}"
               : "=r"(ended)
               : "r"(shared_address(barrier)), "r"(parity)
               : "memory");
  return ended;
}
#if BULK
DEV void publish_barriers() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

DEV void expect_bytes(u64* barrier, int bytes) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(shared_address(barrier)),
               "r"(bytes)
               : "memory");
}

DEV void wait_barrier(u64* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)), "r"(parity)
      : "memory");
}

DEV void copy_bulk(void* to, const void* from, int bytes, u64* barrier) {
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
}

// The same for what is not needed again soon: it leaves the second cache first, and what is used between stays there.
DEV void copy_bulk_once(void* to, const void* from, int bytes, u64* barrier) {
  u64 policy;
  asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier)), "l"(policy)
               : "memory");
}
#endif
#endif

#if !BULK
DEV void publish_barriers() {}
DEV void expect_bytes(u64* barrier, int bytes) {}
DEV void wait_barrier(u64* barrier, int parity) {}
#endif

// Copies bytes (a multiple of 16) into shared memory. ONCE: nobody reads them again before much else was read.
template <bool ONCE>
DEV void copy_async(void* to, const void* from, int bytes, u64* barrier) {
#if BULK
  if (ONCE)
    copy_bulk_once(to, from, bytes, barrier);
  else
    copy_bulk(to, from, bytes, barrier);
#else
  for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
    copy16_async(static_cast<u8*>(to) + i, static_cast<const u8*>(from) + i);
#endif
}

DEV void end_stage_copy() {
#if !BULK
  commit_copies();
#endif
}

// Waits until at most PENDING later stages are still under way, for all threads.
template <int PENDING>
DEV void meet_at_stage() {
  wait_copies<PENDING>();
  __syncthreads();
}

// The barriers of a ring, which a persistent kernel has for all its products; it may have asked for the first stages'
// weights already (machine.cu).
#ifndef PERSISTENT
#define RING_BARRIERS(name) __shared__ u64 name[STAGES]
DEV bool is_prefetched() { return false; }

DEV void init_barriers(u64* barriers, int count) {
  for (int i = 0; i < count; i++) init_barrier(barriers + i, 1);
  publish_barriers();
}
#endif
