"""A request as params in device memory: how tokens are chosen, how far to go, where it stands.

The host writes all of it when a request starts; the kernels of each round read it and keep the
anchor, the tokens left, the number of rounds, the end of the request and the counts of its tokens
up to date.
"""

import math
from collections.abc import Collection, Sequence
from enum import IntEnum

import numpy as np
import torch

from draftree.kernels.cpu.sampling import SamplingArgs
from draftree.kernels.cuda import pass_args
from draftree.kernels.cuda.compile import Gpu

MAX_TOP_K = 64  # more than this takes the longer way through a threshold
SEEN = 1 << 30  # a token that is in the text; the bits below count it in the reply
SLICE = 8192  # logits that a block works on
MAX_LOOKED = 10  # looked-up tokens that a tree takes over
_LENGTH = 22


class Param(IntEnum):
    """Where each word lies. The first three take two params."""

    SEED = 0  # unsigned
    TOP_P = 2  # float64
    LOG_MIN_P = 4  # float64, minus infinity is off
    TEMPERATURE = 6  # float32
    TOP_K = 7
    BUDGET = 8  # nodes of a tree besides the root
    MAX_CTX = 9
    NUM_SCORES = 10  # tokens of a position whose log-probabilities are wanted
    ANCHOR = 11
    TOKENS_LEFT = 12
    ENDED = 13  # an End
    NUM_ROUNDS = 14
    REPETITION = 15  # penalties, float32
    PRESENCE = 16
    FREQUENCY = 17
    NUM_LOOKED = 18  # of the tree's first nodes besides the root, those that were looked up
    NUM_SHARED = 19  # of those, the draft's first choices too
    LOOKED_LIMIT = 20  # the most of them


class End(IntEnum):
    """Whether a request goes on, and why not."""

    RUNNING = 0
    STOP = 1  # the last token is a stop token, or one that ends a segment of free text
    LENGTH = 2  # no tokens left
    IDLE = 3  # nothing was asked for yet, or the host called it off


_CONTROL = ("NUM_TOKENS", "COMMITTED", "IS_TREE", "PATH_LEN", "NUM_ROWS")
# Names for the params, for sources that read or write them.
PARAM_MACROS = (
    *((name, getattr(pass_args, name)) for name in _CONTROL),
    *((word.name, word.value) for word in Param),
    *((f"ENDED_BY_{end.name}", end.value) for end in End),
    ("MAX_TOP_K", MAX_TOP_K),
    ("SEEN", SEEN),
)


class RequestParams:
    """The params of the one request at a time that a device works on."""

    def __init__(self, gpu: Gpu, vocab_size: int) -> None:
        self.device = torch.zeros(_LENGTH, dtype=torch.int32, device=gpu.place)
        self._host = torch.zeros(_LENGTH, dtype=torch.int32, pin_memory=gpu.is_real)
        num_tokens = -(-vocab_size // SLICE) * SLICE
        self.bias = torch.zeros(num_tokens, device=gpu.place)  # float32, by token
        self.counts = torch.zeros(num_tokens, dtype=torch.int32, device=gpu.place)  # see SEEN
        self.stops = torch.zeros(num_tokens // 32, dtype=torch.int32, device=gpu.place)  # bits
        self._stop_ids: frozenset[int] = frozenset()
        self._logit_bias: tuple[tuple[int, float], ...] = ()
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
        logit_bias: Sequence[tuple[int, float]] = (),
        prompt_ids: Sequence[int] = (),
        written: Sequence[int] = (),
        num_scores: int = 0,
    ) -> None:
        """Every kernel launched from now on works on this request, after what was written."""
        self._set_stops(stop_ids)
        self._set_bias(tuple(logit_bias))
        if filters.has_penalties:
            self.counts.zero_()
            self.counts[torch.tensor(sorted({*prompt_ids, *written}), dtype=torch.int64)] = SEEN
            for token in written:
                self.counts[token] += 1
        params = self._host.numpy()
        params[:] = 0
        params.view(np.uint64)[Param.SEED // 2] = seed
        doubles, floats, log_min_p = params.view(np.float64), params.view(np.float32), -math.inf
        if filters.min_p > 0.0:
            log_min_p = math.log(filters.min_p)
        doubles[Param.TOP_P // 2], doubles[Param.LOG_MIN_P // 2] = filters.top_p, log_min_p
        floats[Param.TEMPERATURE] = filters.temperature
        floats[Param.REPETITION] = filters.repetition_penalty
        floats[Param.PRESENCE] = filters.presence_penalty
        floats[Param.FREQUENCY] = filters.frequency_penalty
        params[Param.TOP_K], params[Param.BUDGET] = filters.top_k, budget
        params[Param.MAX_CTX], params[Param.NUM_SCORES] = max_ctx, num_scores
        params[Param.ANCHOR], params[Param.TOKENS_LEFT] = anchor, tokens_left
        params[Param.LOOKED_LIMIT] = MAX_LOOKED
        self.device.copy_(self._host)  # waits: the host's copy may be changed at once

    def resume(self, tokens_left: int, stop_ids: Collection[int]) -> None:
        """The request goes on, also where it had ended, with a new end."""
        self._set_stops(stop_ids)
        words = self._host[Param.TOKENS_LEFT : Param.ENDED + 1]
        words[0], words[1] = tokens_left, int(End.RUNNING)
        self.device[Param.TOKENS_LEFT : Param.ENDED + 1].copy_(words)

    def set_looked_limit(self, count: int) -> None:
        """In the trees that are built from now on; does not wait."""
        if count != self._host[Param.LOOKED_LIMIT]:
            self._host[Param.LOOKED_LIMIT] = count
            self.device[Param.LOOKED_LIMIT : Param.LOOKED_LIMIT + 1].fill_(count)

    def stop(self) -> None:
        """Rounds that are launched after this have no effect."""
        self.device[Param.ENDED : Param.ENDED + 1] = int(End.IDLE)

    def _set_stops(self, stop_ids: Collection[int]) -> None:
        """Ids that are not in the vocabulary are never chosen."""
        wanted = frozenset(stop_ids)
        if wanted != self._stop_ids:
            bits = np.zeros(len(self.bias), dtype=bool)
            bits[[token for token in wanted if 0 <= token < len(bits)]] = True
            words = np.packbits(bits, bitorder="little").view(np.int32)
            self.stops.copy_(torch.from_numpy(words))
            self._stop_ids = wanted

    def _set_bias(self, logit_bias: tuple[tuple[int, float], ...]) -> None:
        if logit_bias != self._logit_bias:
            values = np.zeros(len(self.bias), dtype=np.float32)
            for token, value in logit_bias:
                values[token] = value
            self.bias.copy_(torch.from_numpy(values))
            self._logit_bias = logit_bias


def needs_threshold(filters: SamplingArgs, vocab_size: int) -> bool:
    """Whether `sampling.choose` has to look for the threshold of the filters first."""
    if filters.temperature == 0.0 or 0 < filters.top_k <= MAX_TOP_K:
        return False
    has_top_k = MAX_TOP_K < filters.top_k < vocab_size
    return has_top_k or filters.top_p < 1.0 or filters.min_p > 0.0
