"""The accept walk on the device, and the records from which the host learns what a round brought.

The records form a ring in pinned memory: the device writes a record's number last, so the host
may look at any time without waiting for the device.
"""

from dataclasses import dataclass

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.lookup import DeviceText
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.request import PARAM_MACROS, End, RequestParams
from draftree.kernels.cuda.tree import MAX_NODES

_HEADER_LEN = 8  # see RoundRing.read; then tokens, parents, path
_RECORD_LEN = _HEADER_LEN + 3 * MAX_NODES
_MACROS = (("MAX_NODES", MAX_NODES), ("HEADER_LEN", _HEADER_LEN), ("RECORD_LEN", _RECORD_LEN))


@dataclass(frozen=True, slots=True)
class RoundRecord:
    """One finished round. Its first nodes besides the root were looked up; the draft's first
    choices share some of those.
    """

    number: int  # from 1
    tokens: tuple[int, ...]  # of all nodes
    parents: tuple[int, ...]
    path: tuple[int, ...]
    bonus: int
    end: End
    num_looked: int = 0
    num_shared: int = 0

    @property
    def emitted(self) -> tuple[int, ...]:
        return (*(self.tokens[node] for node in self.path[1:]), self.bonus)


class RoundRing:
    """The latest records. One request at a time: `clear` before the next one starts."""

    def __init__(self, num_records: int, gpu: Gpu) -> None:
        shape = (num_records, _RECORD_LEN)
        self.records = torch.zeros(shape, dtype=torch.int32, pin_memory=gpu.is_real)
        self._params: np.ndarray = self.records.numpy()

    def clear(self) -> None:
        """No round is under way."""
        self._params[:, 0] = 0

    def read(self, number: int) -> RoundRecord | None:
        """The record of a round, or None if it is not finished yet."""
        params = self._params[(number - 1) % len(self._params)]
        if params[0] != number:
            return None
        _, num_nodes, path_len, bonus, end, num_looked, num_shared = params[:7].tolist()
        tokens, parents, path = params[_HEADER_LEN:].reshape(3, MAX_NODES).tolist()
        return RoundRecord(
            number,
            tuple(tokens[:num_nodes]),
            tuple(parents[:num_nodes]),
            tuple(path[:path_len]),
            bonus,
            End(end),
            *(num_looked, num_shared),
        )


def accept_source() -> KernelSource:
    return KernelSource("accept_kernel", ("bits", "request", "accept"), (*PARAM_MACROS, *_MACROS))


def accept(
    chosen: torch.Tensor,  # int32 [nodes]
    params: RequestParams,
    step: CudaPassArgs,
    ring: RoundRing,
    gpu: Gpu,
    *,
    use_counts: bool = False,
    ends: torch.Tensor | None = None,  # int32 [nodes, words]
    text: DeviceText | None = None,
) -> None:
    """The path into step.path; anchor, tokens left and end into the params; a record into the ring.

    A pass over nothing has an empty path and leaves no record. use_counts: what was written is
    counted for the penalties. ends: the path does not go on to a node whose last word is not 0.
    text: what was written is appended to it.
    """
    load_kernel(accept_source(), gpu).launch(
        (1,),
        MAX_NODES,
        *(chosen, params.device, step.control, step.tokens, step.parents, step.depths),
        *(step.path, params.stops, params.counts if use_counts else None),
        *(ends, 0 if ends is None else ends.stride(0), None if text is None else text.tokens),
        *(ring.records, len(ring.records)),
        is_chained=True,
    )
