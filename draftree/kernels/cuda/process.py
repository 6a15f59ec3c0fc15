"""The logits processor on the device: bias, penalties and grammar, in place, before the choice.

Bit for bit what decode/sampler.py does. A node of a tree sees what the request has written so far
and the tokens on its own way from the root. Only rounds of requests that ask for it launch it.
"""

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.request import PARAM_MACROS, SLICE, RequestParams
from draftree.kernels.cuda.tree import MAX_NODES

_THREADS = 256
_MACROS = (*PARAM_MACROS, ("MAX_NODES", MAX_NODES), ("SLICE", SLICE))


class TreeMasks:
    """What a grammar lets follow each node of a tree: a bit a token, and in the last word whether
    nothing may. The host fills its rows, then uploads them.
    """

    def __init__(self, max_nodes: int, vocab_size: int, gpu: Gpu) -> None:
        shape = (max_nodes, -(-vocab_size // 32) + 1)
        self.device = torch.zeros(shape, dtype=torch.int32, device=gpu.place)
        self._host = torch.zeros(shape, dtype=torch.int32, pin_memory=gpu.is_real)
        self.rows: np.ndarray = self._host.numpy().view(np.uint32)

    def upload(self, end: int, first: int = 0) -> None:
        """Does not wait: the rows may be changed when a later launch is known to be done."""
        self.device[first:end].copy_(self._host[first:end], non_blocking=True)


def process_source() -> KernelSource:
    return KernelSource("process_kernel", ("bits", "request", "process"), _MACROS)


def process(
    logits: torch.Tensor,  # float32 [rows, vocab_size]
    step: CudaPassArgs,
    params: RequestParams,
    gpu: Gpu,
    *,
    use_bias: bool = True,
    use_counts: bool = False,
    has_nodes: bool = True,
    masks: TreeMasks | None = None,
) -> None:
    """The live rows of step as the request wants them. use_counts: with penalties, which need
    use_bias. has_nodes: a draft's rows belong to no nodes, and see what is written so far.
    """
    num_rows, vocab_size = logits.shape
    bits = None if masks is None else masks.device
    load_kernel(process_source(), gpu).launch(
        (-(-vocab_size // SLICE), num_rows),
        _THREADS,
        *(logits, step.control, params.device, params.bias if use_bias else None),
        *(params.counts if use_counts else None, bits),
        *(step.rows, step.tokens, step.depths if has_nodes else None),
        *(step.ancestors, step.max_nodes),
        *(0 if bits is None else bits.stride(0), logits.stride(0), vocab_size),
        is_chained=True,
    )
