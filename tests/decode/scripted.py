"""Rounds on a GPU whose draft knows the text: right at a random rank at most positions, wrong at
others, so that paths are deep, leave the chain, and end everywhere.
"""

from collections.abc import Sequence

import numpy as np
import torch

from draftree.decode.device_round import GpuRounds
from draftree.engine.engine import TokenEngine
from draftree.kernels.cuda.pass_args import COMMITTED

NUM_POSITIONS, NUM_CANDIDATES = 15, 6
_RANKS = (0, 0, 0, 0, 0, 1, 2, 3)  # of the true token; the last: it is not among the candidates


class ScriptedRounds(GpuRounds):
    """What the engine's decoder runs, with a draft that knows the text."""

    def __init__(self, engine: TokenEngine, budget: int, text: Sequence[int], seed: int) -> None:
        super().__init__(engine.target, engine._parts.ops, None, None, budget)
        place, rng = self._gpu.place, np.random.default_rng(seed)
        padded = [*text, *[0] * (NUM_POSITIONS + 1)]
        self._text = torch.tensor(padded, device=place)
        self._ranks = torch.tensor(rng.choice(_RANKS, len(padded)), device=place)
        # Candidate j is the true token plus an offset, which is 0 at the rank of the true one.
        offsets = [
            [(j - rank) % NUM_CANDIDATES for j in range(NUM_CANDIDATES)] for rank in range(3)
        ]
        offsets.append(list(range(1, NUM_CANDIDATES + 1)))
        self._offsets = torch.tensor(offsets, device=place)
        self._depths = torch.arange(1, NUM_POSITIONS + 1, device=place)
        shape = (NUM_POSITIONS, NUM_CANDIDATES)
        ids = torch.zeros(shape, dtype=torch.int32, device=place)
        falling = -0.3 - 0.7 * torch.arange(NUM_CANDIDATES, device=place)
        self._candidates = ids, falling.expand(shape).contiguous()

    @property
    def can_draft(self) -> bool:
        return True

    def _propose(self) -> None:
        step, vocab_size = self._target.ops.step, self._target.logits.shape[1]
        at = (step.control[COMMITTED] + self._depths).clamp(max=len(self._text) - 1)
        ids = (self._text[at][:, None] + self._offsets[self._ranks[at]]) % vocab_size
        self._candidates[0].copy_(ids)
