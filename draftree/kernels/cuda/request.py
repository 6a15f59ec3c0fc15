"""A request as params in device memory: how tokens are chosen, how far to go, where it stands.

The host writes all of it when a request starts; the kernels of each round read it and keep the
anchor, the tokens left, the number of rounds and the end of the request up to date. Penalties are
not among the params.
"""

import math
from collections.abc import Collection
from enum import IntEnum

import numpy as np
import torch

from draftree.kernels.cpu.sampling import SamplingArgs
from draftree.kernels.cuda import pass_args
from draftree.kernels.cuda.compile import Gpu

MAX_STOPS = 16
MAX_TOP_K = 64  # more than this takes the longer way through a threshold
_LENGTH = 32


class Param(IntEnum):
    """Where each word lies. The first three take two params."""

    SEED = 0  # unsigned
    TOP_P = 2  # float64
    LOG_MIN_P = 4  # float64, minus infinity is off
    TEMPERATURE = 6  # float32
    TOP_K = 7
    BUDGET = 8  # nodes of a tree besides the root
    MAX_CTX = 9
    NUM_STOPS = 10
    ANCHOR = 11
    TOKENS_LEFT = 12
    ENDED = 13  # an End
    NUM_ROUNDS = 14
    STOPS = 16


class End(IntEnum):
    """Whether a request goes on, and why not."""

    RUNNING = 0
    STOP = 1  # the last token is a stop token
    LENGTH = 2  # no tokens left
    IDLE = 3  # nothing was asked for yet, or the host called it off


_CONTROL = ("NUM_TOKENS", "COMMITTED", "IS_TREE", "PATH_LEN", "NUM_ROWS")
# Names for the params, for sources that read or write them.
PARAM_MACROS = (
    *((name, getattr(pass_args, name)) for name in _CONTROL),
    *((word.name, word.value) for word in Param),
    *((f"ENDED_BY_{end.name}", end.value) for end in End),
    ("MAX_TOP_K", MAX_TOP_K),
)


class RequestParams:
    """The params of the one request at a time that a device works on."""

    def __init__(self, gpu: Gpu) -> None:
        self.device = torch.zeros(_LENGTH, dtype=torch.int32, device=gpu.place)
        self._host = torch.zeros(_LENGTH, dtype=torch.int32, pin_memory=gpu.is_real)
        self.stop()

    def start(
        self,
        filters: SamplingArgs,
        seed: int,
        *,
        anchor: int,
        tokens_left: int,
        max_ctx: int,
        budget: int = 0,
        stop_ids: Collection[int] = (),
    ) -> None:
        """Every kernel launched from now on works on this request."""
        if filters.has_penalties:
            raise ValueError("penalties cannot be counted on the device")
        if len(stop_ids) > MAX_STOPS:
            raise ValueError(f"{len(stop_ids)} stop tokens, at most {MAX_STOPS} are possible")
        params = self._host.numpy()
        params[:] = 0
        params.view(np.uint64)[Param.SEED // 2] = seed
        doubles, log_min_p = params.view(np.float64), -math.inf
        if filters.min_p > 0.0:
            log_min_p = math.log(filters.min_p)
        doubles[Param.TOP_P // 2], doubles[Param.LOG_MIN_P // 2] = filters.top_p, log_min_p
        params.view(np.float32)[Param.TEMPERATURE] = filters.temperature
        params[Param.TOP_K], params[Param.BUDGET] = filters.top_k, budget
        params[Param.MAX_CTX], params[Param.NUM_STOPS] = max_ctx, len(stop_ids)
        params[Param.ANCHOR], params[Param.TOKENS_LEFT] = anchor, tokens_left
        params[Param.STOPS : Param.STOPS + len(stop_ids)] = sorted(stop_ids)
        self.device.copy_(self._host)  # waits: the host's copy may be changed at once

    def stop(self) -> None:
        """Rounds that are launched after this have no effect."""
        self.device[Param.ENDED : Param.ENDED + 1] = int(End.IDLE)


def needs_threshold(filters: SamplingArgs, vocab_size: int) -> bool:
    """Whether `sampling.choose` has to look for the threshold of the filters first."""
    if filters.temperature == 0.0 or 0 < filters.top_k <= MAX_TOP_K:
        return False
    has_top_k = MAX_TOP_K < filters.top_k < vocab_size
    return has_top_k or filters.top_p < 1.0 or filters.min_p > 0.0
