// A ring of shared-memory stages, filled ahead of use: one bulk copy a piece where the chip has them, else
// 16 bytes a thread. Stage i holds unit i of the block's share and the matching activations.
#ifndef BULK
#define BULK (__CUDA_ARCH__ >= 900)
#endif

DEV u32 shared_address(const void* p) { return static_cast<u32>(__cvta_generic_to_shared(p)); }

DEV void init_barrier(u64* barrier, int count) {
#if BULK
  asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(count) : "memory");
#endif
}

DEV void publish_barriers() {
#if BULK
  asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
}

DEV void expect_bytes(u64* barrier, int bytes) {
#if BULK
  asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
               : "memory");
#endif
}

DEV void wait_barrier(u64* barrier, int parity) {
#if BULK
  asm volatile(
      "{\n.reg .pred done;\nagain:\n"
      "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
      "@!done bra again;\n}" ::"r"(shared_address(barrier)), "r"(parity)
      : "memory");
#endif
}

// Copies bytes (a multiple of 16) into shared memory. Bulk: one thread calls it; else all threads do.
DEV void copy_async(void* to, const void* from, int bytes, u64* barrier) {
#if BULK
  asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
                   shared_address(to)),
               "l"(from), "r"(bytes), "r"(shared_address(barrier))
               : "memory");
#else
  for (int i = threadIdx.x * 16; i < bytes; i += blockDim.x * 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(shared_address(to) + i),
                 "l"(static_cast<const u8*>(from) + i)
                 : "memory");
#endif
}

DEV void end_stage_copy() {
#if !BULK
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

template <int PENDING>
DEV void wait_stage_copy(u64* barrier, int parity) {
#if BULK
  wait_barrier(barrier, parity);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(PENDING) : "memory");
#endif
}

// Ordinary stores to a stage are done before a bulk copy overwrites it.
DEV void release_stage() {
#if BULK
  asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#endif
}
