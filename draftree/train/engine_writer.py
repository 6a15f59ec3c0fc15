"""The target writes one text after another with the engine that users run, drafts included.

In: prompts as token ids. Out: sequences as token ids, as `writer.py` gives them. On a CPU it is
the faster of the two: its products are integers, and drafts save passes.
"""

import random
from collections.abc import Sequence

import numpy as np

from draftree.core import Request, SamplingParams
from draftree.engine.engine import TokenEngine
from draftree.train.writer import Task


class EngineWriter:
    """Writes with an open engine, which nobody else uses meanwhile."""

    def __init__(self, engine: TokenEngine, max_len: int, stop_ids: Sequence[int]) -> None:
        self._engine, self._max_len = engine, max_len
        self._stops = frozenset(stop_ids)

    def write(self, tasks: Sequence[Task], seed: int) -> list[np.ndarray]:
        """Each task's prompt and what follows it, the stop token included."""
        rng = random.Random(seed)
        return [self._write(task, rng) for task in tasks]

    def _write(self, task: Task, rng: random.Random) -> np.ndarray:
        text: list[int] = task.prompt.tolist()
        for temperature, limit in ((1.0, task.burn_in), (task.temperature, self._max_len)):
            count = min(limit, self._max_len - len(text))
            if count > 0 and not (len(text) > len(task.prompt) and text[-1] in self._stops):
                sampling = SamplingParams(temperature=temperature, seed=rng.getrandbits(31))
                self._engine.reset()
                stream = self._engine.generate(Request(tuple(text), count, sampling, self._stops))
                text += [event.token for event in stream]
        return np.array(text, dtype=np.int32)
