"""The target writes: many prompts at once, each greedily or at a temperature, up to a length.

In: prompts as token ids. Out: sequences as token ids. Rows that are done are dropped whenever half
of a batch is done, so that short replies cost little. On a GPU a step is one recorded graph.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch

from draftree.train.teacher import Teacher

_STRIDE = 32  # steps between looks at who is done
_FEW = 16  # a batch ends when only this part of it is still being written; the rest is cut short
_LENGTHS = 128  # attention is computed up to a multiple of this


@dataclass(frozen=True, slots=True)
class Task:
    """One sequence to write. The first burn_in tokens are sampled at temperature 1."""

    prompt: np.ndarray  # int32 [prompt_len]
    temperature: float
    burn_in: int = 0


class TextWriter(Protocol):
    """Whatever writes texts."""

    def write(self, tasks: Sequence[Task], seed: int) -> list[np.ndarray]:
        """Each task's prompt and what follows it, the stop token included."""
        ...


class Writer:
    """Keeps one cache and the graphs of its steps between batches."""

    def __init__(
        self, teacher: Teacher, batch_size: int, max_len: int, stop_ids: Sequence[int]
    ) -> None:
        device = teacher.device
        self._teacher = teacher
        self._batch_size, self._max_len = batch_size, max_len
        self._cache = teacher.new_cache(batch_size, max_len)
        self._tokens, self._positions, self._burn_end, self._owner = (
            torch.zeros(batch_size, dtype=torch.int64, device=device) for _ in range(4)
        )
        self._temperature = torch.zeros(batch_size, device=device)
        self._done = torch.zeros(batch_size, dtype=torch.bool, device=device)
        self._text = torch.zeros(batch_size, max_len, dtype=torch.int64, device=device)
        self._stops = torch.tensor(sorted(stop_ids) or [-1], device=device)
        self._graphs: dict[tuple[int, int], torch.cuda.CUDAGraph] = {}
        self._pool: tuple[int, int] | None = None

    def write(self, tasks: Sequence[Task], seed: int) -> list[np.ndarray]:
        """Each task's prompt and what follows it, the stop token included."""
        torch.manual_seed(seed)
        lengths = [len(task.prompt) for task in tasks]
        if len(tasks) > self._batch_size or max(lengths) + 1 >= self._max_len:
            raise ValueError("these tasks do not fit the writer")
        self._fill(tasks, max(lengths))
        final = torch.zeros(len(tasks), dtype=torch.int64, device=self._teacher.device)
        count, end = len(tasks), max(lengths)  # every position is below end
        while True:
            num_steps = min(_STRIDE, self._max_len - min(end, self._max_len - 1))
            bound = min(-(-(end + num_steps) // _LENGTHS) * _LENGTHS, self._max_len)
            for _ in range(num_steps):
                self._step(count, bound)
            end = min(end + num_steps, self._max_len)
            final[self._owner[:count]] = self._positions[:count]
            num_left = count - int(self._done[:count].sum())
            if num_left <= len(tasks) // _FEW:
                break
            if num_left <= count // 2:
                count = self._compact(count, num_left)
        ends, text = (final + 1).tolist(), self._text.to(torch.int32).cpu().numpy()
        return [text[i, : ends[i]].copy() for i in range(len(tasks))]

    def _fill(self, tasks: Sequence[Task], longest: int) -> None:
        """Read the prompts; every row's last prompt token waits to be stepped."""
        count, device = len(tasks), self._teacher.device
        padded = np.zeros((count, longest), dtype=np.int64)
        for row, task in zip(padded, tasks, strict=True):
            row[: len(task.prompt)] = task.prompt
        lengths = torch.tensor([len(task.prompt) for task in tasks], device=device)
        self._text.zero_()
        self._text[:count, :longest] = torch.from_numpy(padded).to(device)
        part = max(1, (1 << 17) // longest)  # prompts read at once
        for start in range(0, count, part):
            rows = slice(start, min(start + part, count))
            ids, cache = self._text[rows, :longest], self._cache.part(rows)
            self._teacher.fill(ids, cache, lengths[rows] - 1)
        self._positions[:count] = lengths - 1
        self._tokens[:count] = self._text[:count].gather(1, (lengths - 1)[:, None])[:, 0]
        self._temperature[:count] = torch.tensor([t.temperature for t in tasks], device=device)
        self._burn_end[:count] = lengths - 1 + torch.tensor([t.burn_in for t in tasks]).to(device)
        self._owner[:count] = torch.arange(count, device=device)
        self._done[:count] = False

    def _step(self, count: int, bound: int) -> None:
        if self._teacher.device.type != "cuda":
            self._advance(count, bound)
            return
        graph = self._graphs.get((count, bound))
        if graph is None:
            graph = self._record(count, bound)
        graph.replay()

    def _record(self, count: int, bound: int) -> torch.cuda.CUDAGraph:
        done, noise = self._done.clone(), torch.cuda.get_rng_state()
        self._done.fill_(True)  # a step then repeats itself and changes nothing
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            self._advance(count, bound)
        torch.cuda.current_stream().wait_stream(side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._pool):
            self._advance(count, bound)
        self._pool = graph.pool()
        self._done.copy_(done)
        torch.cuda.set_rng_state(noise)
        self._graphs[count, bound] = graph
        return graph

    @torch.no_grad()
    def _advance(self, count: int, bound: int) -> None:
        """One token for each of the first rows that is not done, in place."""
        tokens, positions, done = (
            part[:count] for part in (self._tokens, self._positions, self._done)
        )
        logits = self._teacher.step(tokens, positions, done, self._cache, bound).float()
        heat = torch.where(positions < self._burn_end[:count], 1.0, self._temperature[:count])
        noise = torch.empty_like(logits).exponential_().log_()
        # The largest of logit / heat - noise; at heat 0 the noise is too small to matter.
        sharpness = 1 / heat.clamp(min=1e-6)[:, None]
        chosen = torch.addcmul(noise, logits, sharpness, value=-1).argmin(-1)
        tokens.copy_(torch.where(done, tokens, chosen))
        positions.add_((~done).long())
        self._text[self._owner[:count], positions] = tokens
        done |= torch.isin(tokens, self._stops) | (positions >= self._max_len - 1)

    def _compact(self, count: int, num_left: int) -> int:
        """Move the rows that go on to the front of a batch half as large, or smaller still."""
        order = torch.argsort(self._done[:count].long(), stable=True)
        while num_left <= count // 2:
            count = -(-count // 2)
        order = order[:count]
        parts = (self._tokens, self._positions, self._burn_end, self._owner, self._temperature)
        for part in (*parts, self._done):
            part[:count] = part[order]
        self._cache.move(order)
        return count
