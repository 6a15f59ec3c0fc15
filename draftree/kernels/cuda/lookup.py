"""The text so far on the device, and where its end occurred before: see drafts/lookup.py.

The tree's kernel takes what followed there as its first branch; the accept walk keeps the text up
to date.
"""

from collections.abc import Sequence

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.request import PARAM_MACROS, RequestParams

_MAX_MATCH, _LONG_MATCH = 6, 4
_BLOCKS, _THREADS = 64, 256
_MACROS = (*PARAM_MACROS, ("MAX_MATCH", _MAX_MATCH), ("LONG_MATCH", _LONG_MATCH))


class DeviceText:
    """Tokens by position, the anchor included."""

    def __init__(self, max_ctx: int, gpu: Gpu) -> None:
        self.tokens = torch.zeros(max_ctx + 1, dtype=torch.int32, device=gpu.place)
        self.match = torch.zeros(1, dtype=torch.int64, device=gpu.place)  # 0 between rounds

    def start(self, tokens: Sequence[int]) -> None:
        self.tokens[: len(tokens)].copy_(torch.tensor(tokens, dtype=torch.int32))


def lookup_source() -> KernelSource:
    return KernelSource("lookup_kernel", ("bits", "request", "lookup"), _MACROS)


def find_match(text: DeviceText, step: CudaPassArgs, params: RequestParams, gpu: Gpu) -> None:
    """text.match for the committed text and the anchor; for `build_tree`, which clears it."""
    load_kernel(lookup_source(), gpu).launch(
        (_BLOCKS,),
        _THREADS,
        *(text.tokens, step.control, params.device, text.match),
        is_chained=True,
    )
