"""The training loop: batches of anchored blocks, one optimizer, a record of how it went.

In: a corpus and a teacher. Out: a trained DraftModule and its curve. All randomness comes from the
seed and the step's number, so that an interrupted run goes on as if it had not been. Knows nothing
of files but its own state.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from draftree.errors import ModelError
from draftree.train.corpus import Corpus
from draftree.train.draft import DraftModule, DraftSpec
from draftree.train.muon import Muon
from draftree.train.objective import Batch, HeadSampler, block_loss, count_right, make_batch
from draftree.train.settings import Schedule, TrainConfig
from draftree.train.teacher import Teacher

_LENGTH_STEP = 128  # batches hold sequences of similar length
_EVAL_SEQUENCES = 192
_EVAL_BLOCKS = 16


@dataclass(frozen=True, slots=True)
class CurvePoint:
    """acceptance_length: tokens a round if only the draft's first choices were checked, in held-out
    greedy text. loss: mean over the steps since the last point.
    """

    step: int
    num_tokens: int  # of text read so far, with repetition
    num_rows: int  # block rows learned from so far
    seconds: float
    learning_rate: float
    loss: float | None
    held_out_loss: float
    acceptance_length: float
    sampled_acceptance_length: float | None
    accepted_by_depth: list[float]  # share of blocks that are right up to this depth


Report = Callable[[int, float, CurvePoint | None], None]  # step, loss, what was just measured


class Feeder:
    """Draws batches of sequences of similar length."""

    def __init__(
        self, corpus: Corpus, schedule: Schedule, spec: DraftSpec, seed: int, device: torch.device
    ) -> None:
        self._corpus, self._schedule, self._spec = corpus, schedule, spec
        self._seed, self._device = seed, device
        lengths = corpus.lengths
        is_usable = lengths - corpus.prompt_lens >= 2
        bound = -(-lengths // _LENGTH_STEP) * _LENGTH_STEP
        self._groups = {
            int(b): np.flatnonzero(is_usable & ~corpus.is_held_out & (bound == b))
            for b in np.unique(bound)
        }
        self._groups = {b: group for b, group in self._groups.items() if len(group)}
        if not self._groups:
            raise ModelError("The target wrote nothing to learn from; try other prompts.")
        written = [lengths[group].sum() for group in self._groups.values()]
        self._shares = np.array(written) / sum(written)
        held_out = is_usable & corpus.is_held_out
        self._held_out = {
            is_greedy: np.flatnonzero(held_out & (corpus.is_greedy == is_greedy))[:_EVAL_SEQUENCES]
            for is_greedy in (True, False)
        }

    def draw(self, step: int) -> Batch:
        rng = np.random.default_rng((self._seed, 1, step))
        length = int(rng.choice(list(self._groups), p=self._shares))
        group = self._groups[length]
        count = min(max(1, self._schedule.batch_tokens // length), len(group))
        chosen = rng.choice(group, count, replace=False)
        sizes = self._schedule.block_sizes or (self._spec.block_size,)
        block_len = int(rng.choice(sizes))
        num_blocks = max(1, int(length * self._schedule.rows_per_token) // block_len)
        num_blocks = -(-num_blocks // 16) * 16  # attention takes so many at once
        return self._batch(chosen, length, num_blocks, block_len, rng)

    def held_out(self, *, is_greedy: bool) -> list[Batch]:
        """The same blocks every time."""
        rng = np.random.default_rng((self._seed, 2))
        chosen, batches = self._held_out[is_greedy], []
        for start in range(0, len(chosen), 32):
            part = chosen[start : start + 32]
            length = -(-int(self._corpus.lengths[part].max()) // _LENGTH_STEP) * _LENGTH_STEP
            batches.append(self._batch(part, length, _EVAL_BLOCKS, self._spec.block_size, rng))
        return batches

    def _batch(
        self,
        chosen: Sequence[int] | np.ndarray,
        length: int,
        num_blocks: int,
        block_len: int,
        rng: np.random.Generator,
    ) -> Batch:
        sequences = [self._corpus.sequence(int(i)) for i in chosen]
        prompt_lens = [int(self._corpus.prompt_lens[i]) for i in chosen]
        return make_batch(sequences, prompt_lens, length, num_blocks, block_len, rng, self._device)


@dataclass(frozen=True, slots=True)
class Acceptance:
    length: float
    by_depth: list[float]
    loss: float


def measure_acceptance(
    draft: DraftModule, teacher: Teacher, batches: Sequence[Batch]
) -> Acceptance | None:
    """None where nothing was held out."""
    if not batches:
        return None
    results = [count_right(draft, teacher, batch) for batch in batches]
    runs = torch.cat([runs.flatten() for runs, _ in results])
    losses = torch.stack([loss for _, loss in results]).mean(0)
    depths = range(1, draft.spec.block_size)
    return Acceptance(
        length=1.0 + float(runs.float().mean()),
        by_depth=[round(float((runs >= depth).float().mean()), 4) for depth in depths],
        loss=float(losses.mean()),
    )


class Trainer:
    """One run's draft, optimizer and record; save and restore make them survive an interruption."""

    def __init__(
        self, teacher: Teacher, corpus: Corpus, spec: DraftSpec, config: TrainConfig
    ) -> None:
        torch.manual_seed(config.seed)
        device = teacher.device
        self.draft = DraftModule(spec, teacher.output_norm).to(device)
        self._is_four_bit = config.is_four_bit
        self._heads: HeadSampler | None = None
        if 0 < config.schedule.num_loss_tokens < teacher.vocab_size:
            frequent = corpus.frequent_tokens(config.schedule.num_loss_tokens)
            self._heads = HeadSampler(teacher, frequent)
        self.curve: list[CurvePoint] = []
        self._teacher, self._schedule, self._seed = teacher, config.schedule, config.seed
        self._feeder = Feeder(corpus, config.schedule, spec, config.seed, device)
        self._optimizers = make_optimizers(self.draft, config.schedule)
        self._step = self._num_tokens = self._num_rows = 0
        self._seconds = 0.0

    def run(self, state_path: Path, report: Report) -> None:
        """Train to the end of the schedule, from where the state file left off if there is one."""
        schedule = self._schedule
        if state_path.is_file():
            self._restore(state_path)
        started = time.monotonic() - self._seconds
        losses: list[torch.Tensor] = []
        if not self.curve:
            self._measure(None, report)
        progress = self._progress()
        while progress < 1.0:
            losses.append(self._learn(progress))
            self._step += 1
            if self._step % 20 == 0 or self._teacher.device.type == "cpu":
                report(self._step, float(losses[-1]), None)  # waits for the device
            self._seconds = time.monotonic() - started
            progress = self._progress()
            if self._step % schedule.eval_every == 0 or progress >= 1.0:
                self._measure(float(torch.stack(losses).mean()), report)
                losses = []
            if self._step % schedule.save_every == 0 or progress >= 1.0:
                self._save(state_path)

    def _progress(self) -> float:
        limit = 60 * self._schedule.max_minutes
        share = self._seconds / limit if limit else 0.0
        share = max(self._step / self._schedule.num_steps, share)
        self.draft.is_four_bit = self._is_four_bit and share >= self._schedule.four_bit_from
        return share

    def _learn(self, progress: float) -> torch.Tensor:
        schedule = self._schedule
        rate = learning_rate(schedule, progress)
        for optimizer in self._optimizers:
            for group in optimizer.param_groups:
                group["lr"] = rate
        batch = self._feeder.draw(self._step)
        loss = block_loss(
            self.draft,
            self._teacher,
            batch,
            depth_decay=schedule.depth_decay,
            distill_share=schedule.distill_share,
            round_share=schedule.round_anchor_share,
            head=self._heads.draw(self._seed + self._step) if self._heads else None,
        )
        self.draft.zero_grad(set_to_none=True)
        loss.backward()
        torch.nn.utils.clip_grad_norm_(self.draft.parameters(), schedule.max_norm)
        for optimizer in self._optimizers:
            optimizer.step()
        self._num_tokens += batch.ids.numel()
        self._num_rows += batch.anchors.numel() * (batch.block_len - 1)
        return loss.detach()

    def _measure(self, loss: float | None, report: Report) -> None:
        greedy, sampled = (
            measure_acceptance(self.draft, self._teacher, self._feeder.held_out(is_greedy=flag))
            for flag in (True, False)
        )
        shown = greedy or sampled
        if shown is None:
            raise ModelError("Nothing was held out to measure on; use more prompts.")
        if not math.isfinite(shown.loss):  # the state before this is still there
            raise ModelError(
                f"After {self._step} steps the draft's loss is not a number any more; try again "
                "with a smaller --learning-rate, in another folder."
            )
        point = CurvePoint(
            step=self._step,
            num_tokens=self._num_tokens,
            num_rows=self._num_rows,
            seconds=round(self._seconds, 2),
            learning_rate=learning_rate(self._schedule, self._progress()),
            loss=loss,
            held_out_loss=shown.loss,
            acceptance_length=shown.length,
            sampled_acceptance_length=sampled.length if sampled else None,
            accepted_by_depth=shown.by_depth,
        )
        self.curve.append(point)
        report(self._step, loss if loss is not None else point.held_out_loss, point)

    def _save(self, path: Path) -> None:
        state = {
            "draft": self.draft.state_dict(),
            "optimizers": [optimizer.state_dict() for optimizer in self._optimizers],
            "curve": [asdict(point) for point in self.curve],
            "counts": (self._step, self._num_tokens, self._num_rows, self._seconds),
        }
        partial = path.with_suffix(".partial")
        torch.save(state, partial)
        partial.replace(path)

    def _restore(self, path: Path) -> None:
        state = torch.load(path, map_location=self._teacher.device, weights_only=True)
        self.draft.load_state_dict(state["draft"])
        for optimizer, saved in zip(self._optimizers, state["optimizers"], strict=True):
            optimizer.load_state_dict(saved)
        self.curve = [CurvePoint(**point) for point in state["curve"]]
        self._step, self._num_tokens, self._num_rows, self._seconds = state["counts"]


def make_optimizers(draft: DraftModule, schedule: Schedule) -> list[torch.optim.Optimizer]:
    """Matrices learn with Muon or AdamW, vectors with AdamW and without decay."""
    matrices = [p for p in draft.parameters() if p.ndim > 1]
    vectors = [p for p in draft.parameters() if p.ndim == 1]
    rate, decay = schedule.learning_rate, schedule.weight_decay
    groups: list[dict[str, Any]] = [{"params": vectors, "weight_decay": 0.0}]
    optimizers: list[torch.optim.Optimizer] = []
    if schedule.optimizer == "muon":
        optimizers.append(Muon(matrices, lr=rate, weight_decay=decay))
    else:
        groups.append({"params": matrices, "weight_decay": decay})
    is_fused = vectors[0].device.type == "cuda"
    optimizers.append(torch.optim.AdamW(groups, lr=rate, betas=(0.9, 0.95), fused=is_fused))
    return optimizers


def learning_rate(schedule: Schedule, progress: float) -> float:
    """A linear rise, then half a cosine down to final_share."""
    if progress < schedule.warmup_share:
        share = (progress + 1e-3) / (schedule.warmup_share + 1e-3)
    else:
        way = min(1.0, (progress - schedule.warmup_share) / (1.0 - schedule.warmup_share))
        low = schedule.final_share
        share = low + (1.0 - low) * 0.5 * (1.0 + math.cos(math.pi * way))
    return schedule.learning_rate * share
