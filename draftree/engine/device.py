"""The device that a plan names, as a source of operations: CPU threads or one GPU."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from draftree.config import Plan
from draftree.drafts.drafter import Drafter
from draftree.errors import DeviceError
from draftree.kernels.ops import BatchOps, Ops, narrow
from draftree.kernels.quant.kv_format import BYTE_NAME, KEY_FORMATS, VALUE_FORMATS, KvFormat
from draftree.memory import GPU_DRAFT_CHUNK, count_ring
from draftree.models.target import Target

if TYPE_CHECKING:
    from draftree.decode.device_round import GpuRounds

_CPU_KV: dict[str, type[np.number]] = {"f32": np.float32, "f16": np.float16, BYTE_NAME: np.int8}
_DRAFT_CHUNK = 64  # rows of features that a draft reads together


class Device(Protocol):
    def new_ops(self) -> Ops: ...
    def new_draft_ops(self, block_len: int, context_len: int) -> Ops:
        """A pass may have block_len rows at least, and logits for each; its attention looks back
        context_len positions.
        """
        ...

    def new_scoring_ops(self, max_ctx: int, chunk: int) -> Ops:
        """For a sequence beside the engine's own, of prompts alone."""
        ...

    def new_member_ops(self) -> Ops:
        """For one more sequence, whose rows join passes of `new_batch_ops`."""
        ...

    def new_batch_ops(self, members: Sequence[Ops]) -> BatchOps:
        """For passes over a row of each."""
        ...

    def new_rounds(
        self,
        target: Target,
        ops: Ops,
        drafter: Drafter | None,
        draft_ops: Ops | None,
        budget: int,
        *,
        is_auto: bool,
    ) -> "GpuRounds | None":
        """Whole rounds on the device, where it can run them."""
        return None

    def finish_loading(self) -> None:
        """Everything that will run is recorded."""
        ...

    def first_sizes(self) -> tuple[int, ...]:
        """Numbers of rows, each of which has something made for it when it first comes."""
        return ()

    def warm(self) -> AbstractContextManager[None]:
        """What is run inside is run to make what later requests will need."""
        return nullcontext()

    def compile_kernels(
        self, rehearse: Callable[[], None], report: Callable[[int, int], None]
    ) -> None:
        """All that rehearse runs into, in which nothing is launched. report: how many of those that
        have to be compiled are. Nothing where they are compiled as they are recorded.
        """
        return

    def make_room(self) -> None:
        """There is time to move copies away that later ones would have to wait for."""
        return

    def release_copies(self) -> None:
        """Somebody needs the memory that copies would take."""
        return

    def close(self) -> None: ...


class CpuDevice(Device):
    def __init__(self, plan: Plan) -> None:
        from draftree.kernels.cpu.isa import current_isa

        try:
            current_isa()
        except ValueError as error:
            raise DeviceError(str(error)) from None
        from draftree.kernels.cpu.thread_pool import ThreadPool
        from draftree.kernels.cpu.workspace import Workspace

        self._plan, self._pool, self._workspace = plan, ThreadPool(plan.threads), Workspace()

    def new_ops(self) -> Ops:
        return self._new_ops(self._plan.chunk, self._plan.max_nodes, **self._formats)

    def new_draft_ops(self, block_len: int, context_len: int) -> Ops:
        max_tokens = max(_DRAFT_CHUNK, block_len)
        ring_len = _ring_len(self._plan, context_len, max_tokens)
        return self._new_ops(max_tokens, block_len, ring_len=ring_len)

    def new_scoring_ops(self, max_ctx: int, chunk: int) -> Ops:
        return self._new_ops(chunk, 1, max_ctx=max_ctx)

    def new_member_ops(self) -> Ops:
        return self._new_ops(1, 1, **self._formats)

    def new_batch_ops(self, members: Sequence[Ops]) -> BatchOps:
        from draftree.kernels.cpu.batch import CpuBatchOps
        from draftree.kernels.cpu.ops import CpuOps

        own = [narrow(member, CpuOps) for member in members]
        return CpuBatchOps(own, self._pool, **self._options, **self._formats)

    @property
    def _formats(self) -> dict[str, KvFormat]:
        """What the target's keys and values are rounded to."""
        plan = self._plan
        if plan.kv in _CPU_KV:
            return {}
        return {"key_format": KEY_FORMATS[plan.kv_k], "value_format": VALUE_FORMATS[plan.kv_v]}

    @property
    def _options(self) -> dict[str, Any]:
        """Of all operations."""
        plan = self._plan
        return {
            "max_ctx": plan.max_ctx,
            "exact": plan.is_exact,
            "kv_dtype": _CPU_KV.get(plan.kv, np.float16),
            "workspace": self._workspace,
        }

    def _new_ops(self, max_tokens: int, max_nodes: int, **options: Any) -> Ops:
        from draftree.kernels.cpu.ops import CpuOps

        every = {**self._options, **options}
        return CpuOps(self._pool, max_tokens=max_tokens, max_nodes=max_nodes, **every)

    def finish_loading(self) -> None:
        from draftree.kernels.cpu.release import release_memory
        from draftree.kernels.cpu.sampling import load_choices

        load_choices()
        release_memory()

    def close(self) -> None:
        self._pool.close()


class CudaDevice(Device):
    def __init__(self, plan: Plan, index: int) -> None:
        from draftree.kernels.cuda.compile import gpu
        from draftree.kernels.cuda.copies import DeviceCopies
        from draftree.kernels.cuda.memory import limit_memory
        from draftree.kernels.cuda.store import WeightStore

        self._plan, self._gpu = plan, gpu(index)
        limit_memory(plan.memory_limit, self._gpu)
        self._store = WeightStore(self._gpu)
        self._copies = DeviceCopies(plan.copy_bytes, self._gpu)

    def new_ops(self) -> Ops:
        return self._new_ops(self._plan.chunk, self._plan.max_nodes, 0, **self._formats)

    def new_draft_ops(self, block_len: int, context_len: int) -> Ops:
        max_tokens = max(min(self._plan.chunk, GPU_DRAFT_CHUNK), block_len)
        max_nodes = max(self._plan.max_nodes, block_len)
        ring_len = _ring_len(self._plan, context_len, max_tokens)
        return self._new_ops(max(max_tokens, max_nodes), max_nodes, ring_len)

    def new_scoring_ops(self, max_ctx: int, chunk: int) -> Ops:
        from draftree.kernels.cuda.ops import CudaOps

        return CudaOps(self._store, max_tokens=chunk, max_nodes=1, max_ctx=max_ctx)

    def new_member_ops(self) -> Ops:
        return self._new_ops(1, 1, 0, **self._formats)

    def new_batch_ops(self, members: Sequence[Ops]) -> BatchOps:
        from draftree.kernels.cuda.batch import CudaBatchOps
        from draftree.kernels.cuda.ops import CudaOps

        own = [narrow(member, CudaOps) for member in members]
        return CudaBatchOps(
            own, self._store, self._gpu, max_ctx=self._plan.max_ctx, **self._formats
        )

    @property
    def _formats(self) -> dict[str, KvFormat]:
        plan = self._plan
        return {"key_format": KEY_FORMATS[plan.kv_k], "value_format": VALUE_FORMATS[plan.kv_v]}

    def _new_ops(self, max_tokens: int, max_nodes: int, ring_len: int, **formats: KvFormat) -> Ops:
        from draftree.kernels.cuda.ops import CudaOps

        return CudaOps(
            self._store,
            max_tokens=max_tokens,
            max_nodes=max_nodes,
            max_ctx=self._plan.max_ctx,
            ring_len=ring_len,
            is_persistent=self._plan.is_persistent,
            copies=self._copies,
            **formats,
        )

    def new_rounds(
        self,
        target: Target,
        ops: Ops,
        drafter: Drafter | None,
        draft_ops: Ops | None,
        budget: int,
        *,
        is_auto: bool,
    ) -> "GpuRounds":
        from draftree.decode.device_round import GpuRounds

        parts = target, ops, drafter, draft_ops
        return GpuRounds(*parts, budget, is_auto=is_auto, width=self._plan.width)

    def finish_loading(self) -> None:
        """Rows of shared passes are chosen from by the host."""
        from draftree.kernels.cpu.sampling import load_choices

        if self._plan.batch:
            load_choices(is_sampled=True)

    def first_sizes(self) -> tuple[int, ...]:
        from draftree.kernels.cuda.program import BUCKETS, LONG_SIZES

        chunk = self._plan.chunk
        if not self._gpu.is_real:  # no graphs: one size for each choice of kernels
            return tuple(sorted({1, min(8, chunk), chunk}))
        return (*(size for size in (*BUCKETS, *LONG_SIZES) if size < chunk), chunk)

    def warm(self) -> AbstractContextManager[None]:
        return self._gpu.rehearsal.warm()

    def compile_kernels(
        self, rehearse: Callable[[], None], report: Callable[[int, int], None]
    ) -> None:
        from draftree.kernels.cuda.compile import compile_missing

        with self._gpu.rehearsal.collect() as launches:
            rehearse()
        if self._gpu.is_real:
            sources = dict.fromkeys(launch.source for launch in launches)
            compile_missing(sources, self._gpu.arch, report)

    def make_room(self) -> None:
        self._copies.make_room(self._plan.copy_bytes // 2)

    def release_copies(self) -> None:
        self._copies.release()

    def close(self) -> None:
        """Memory goes with the arrays."""


def _ring_len(plan: Plan, context_len: int, max_tokens: int) -> int:
    """0 where all positions are no more than a ring would hold."""
    ring_len = count_ring(context_len, max_tokens)
    return ring_len if ring_len < plan.max_ctx + max_tokens else 0


def open_device(plan: Plan) -> Device:
    return CpuDevice(plan) if plan.gpu is None else CudaDevice(plan, plan.gpu.index)
