// A ring of shared-memory stages between one warp that copies and the others that compute. Copies are bulk
// copies where the chip has them, else 16 bytes a lane; barriers in shared memory say when a stage is full or empty.
#ifndef BULK
#define BULK (__CUDA_ARCH__ >= 900)
#endif

DEV u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEV void init_barrier(u64* barrier, int count) {
  asm volatile("mbarrier.init.shared.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
}

DEV void publish_barriers() {
#if BULK
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

DEV void arrive(u64* barrier) {
  asm volatile("{.reg .b64 state; mbarrier.arrive.shared.b64 state, [%0];}" ::"r"(shared_address(barrier)) : "memory");
}

// Waits for the end of the phase with this parity.
DEV void wait_barrier(u64* barrier, int parity) {
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
#if __CUDA_ARCH__ >= 900
      "mbarrier.try_wait.parity.shared.b64 done, [%0], %1;\n"
#else
      "mbarrier.test_wait.parity.shared.b64 done, [%0], %1;\n"
#endif
      "@!done bra again;\n}" ::"r"(shared_address(barrier)), "r"(parity)
      : "memory");
}

// How often a full stage is arrived at: bulk copies by the two kinds of data, others once a lane.
constexpr int FULL_COUNT = BULK ? 2 : 32;

// Announces the bytes of the copies that follow; the whole copying warp calls it and copy_async.
DEV void begin_copy(u64* barrier, int bytes) {
#if BULK
  if ((threadIdx.x & 31) == 0)
    asm volatile("{.reg .b64 state; mbarrier.arrive.expect_tx.shared.b64 state, [%0], %1;}" ::"r"(shared_address(barrier)),
                 "r"(bytes)
                 : "memory");
#endif
}

// Copies bytes (a multiple of 16) into shared memory.
DEV void copy_async(void* to, const void* from, int bytes, u64* barrier) {
#if BULK
  if ((threadIdx.x & 31) == 0)
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                     shared_address(to)),
                 "l"(from), "r"(bytes), "r"(shared_address(barrier))
                 : "memory");
#else
  for (int i = (threadIdx.x & 31) * 16; i < bytes; i += 512)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + i),
                 "l"(static_cast<const u8*>(from) + i)
                 : "memory");
#endif
}

// Everything for a stage has been asked for.
DEV void end_copy(u64* barrier) {
#if !BULK
  asm volatile("cp.async.mbarrier.arrive.noinc.shared.b64 [%0];" ::"r"(shared_address(barrier)) : "memory");
#endif
}

// Ordinary stores to a stage are done before a bulk copy overwrites it.
DEV void release_stores() {
#if BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
