"""A selector learns on top of a draft that stays as it is: what a candidate's logit gains or loses
by the candidate before it.

In: blocks that a draft filled, embeddings of the tokens it knows. Out: its tables, and a curve. The
draft fills all places at once, so its candidates do not know of each other; this tells them.
"""

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.errors import ModelError
from draftree.train.block_row import BlockRows
from draftree.train.settings import SelectorPlan

_EVAL_BLOCKS = 6000
_LEAST_RATE, _WARM_UP = 0.02, 0.03


@dataclass(frozen=True, slots=True)
class SelectorPoint:
    """On held-out text. The loss is over the candidates; lengths are those of the chain of best
    choices, in greedy text (if there is none, in sampled text) and in sampled text.
    """

    step: int
    seconds: float
    held_out_loss: float
    acceptance_length: float
    sampled_acceptance_length: float | None


@dataclass(frozen=True, slots=True)
class SelectorTables:
    """score(p, c) = <before[p] * (hidden @ projection.T), after[c]>; the last row of a table stands
    for all tokens that it does not know.
    """

    before: np.ndarray  # float32 [num_tokens + 1, rank]
    after: np.ndarray  # float32 [num_tokens + 1, rank]
    projection: np.ndarray  # float32 [rank, hidden_size]


class SelectorModule(nn.Module):
    """Tables are projections of the target's own embedding and head: what it learns of a token
    holds for those like it, so that little text is enough.
    """

    def __init__(self, embedding: Tensor, head: Tensor, row_of: Tensor, plan: SelectorPlan) -> None:
        """embedding, head: float32 [num_tokens, hidden_size]; row_of: int64 by token, num_tokens
        for those that are not known.
        """
        super().__init__()
        size, rank = embedding.shape[1], plan.rank
        for name, rows in (("embedding", embedding), ("head", head)):
            scaled = rows / rows.norm(dim=1).mean()
            self.register_buffer(name, F.pad(scaled, (0, 0, 0, 1)), persistent=False)
        self.register_buffer("row_of", row_of, persistent=False)
        self.before = nn.Parameter(torch.randn(size, rank) * 4 * size**-0.5)
        self.after = nn.Parameter(torch.randn(size, rank) * 4 * size**-0.5)
        self.projection = nn.Parameter(torch.randn(size, rank) * 0.002)
        self._dropout = plan.dropout

    def forward(self, hidden: Tensor, parents: Tensor, candidates: Tensor) -> Tensor:
        """What the candidates' logits gain: [rows, num_candidates], hidden: [rows, hidden_size]."""
        dropout = self._dropout if self.training else 0.0
        context = F.dropout(hidden, dropout) @ self.projection
        context = F.dropout(context * self._rows(self.embedding, self.before, parents), dropout)
        after = self._rows(self.head, self.after, candidates)
        return torch.einsum("nr,ncr->nc", context, after)

    def tables(self) -> SelectorTables:
        before, after = self.embedding @ self.before, self.head @ self.after
        arrays = (table.detach().cpu().numpy() for table in (before, after, self.projection.T))
        return SelectorTables(*map(np.ascontiguousarray, arrays))

    def _rows(self, tokens: Tensor, projection: Tensor, ids: Tensor) -> Tensor:
        """[*ids.shape, rank]; each token is multiplied once."""
        return F.embedding(self.row_of[ids], tokens @ projection)


@dataclass(frozen=True, slots=True)
class CandidateBlocks:
    """All that a loss needs, on the device that it is computed on."""

    hidden: Tensor  # float32 [num_blocks, num_positions, hidden_size]
    parents: Tensor  # int64 [num_blocks, num_positions]
    candidates: Tensor  # int64 [num_blocks, num_positions, num_candidates]
    logits: Tensor  # float32, the same shape, up to a constant of each position
    labels: Tensor  # int64 [num_blocks, num_positions]: which candidate came; -1: none of them


class BlockSource(Protocol):
    """Blocks to learn from, and whole ones of held-out text."""

    def draw(self, step: int) -> CandidateBlocks: ...
    def held_out(self, *, is_greedy: bool) -> Sequence[CandidateBlocks]: ...


class StoredBlocks:
    """A source in memory."""

    def __init__(self, rows: BlockRows, num_blocks: int, seed: int, device: torch.device) -> None:
        self._rows, self._num_blocks, self._device = rows, num_blocks, device
        self._rng = np.random.default_rng((seed, 7))
        self._learn_from = np.flatnonzero(~rows.is_held_out)

    def draw(self, step: int) -> CandidateBlocks:
        return self._read(self._rng.choice(self._learn_from, self._num_blocks))

    def held_out(self, *, is_greedy: bool) -> list[CandidateBlocks]:
        rows = self._rows
        is_whole = rows.is_held_out & (rows.is_greedy == is_greedy) & (rows.tokens[:, -1] >= 0)
        chosen = self._rng.permutation(np.flatnonzero(is_whole))[:_EVAL_BLOCKS]
        return [self._read(chosen[i : i + 1000]) for i in range(0, len(chosen), 1000)]

    def _read(self, chosen: np.ndarray) -> CandidateBlocks:
        rows = self._rows.select(chosen)
        is_right = rows.candidates == rows.tokens[:, 1:, None]
        labels = np.where(is_right.any(axis=-1), is_right.argmax(axis=-1), -1)
        parents = np.maximum(rows.tokens[:, :-1], 0)
        return CandidateBlocks(
            torch.from_numpy(rows.hidden).to(self._device).float(),
            torch.from_numpy(parents).to(self._device).long(),
            torch.from_numpy(rows.candidates).to(self._device).long(),
            torch.from_numpy(rows.log_probs).to(self._device).float(),
            torch.from_numpy(labels).to(self._device),
        )


def train_selector(
    module: SelectorModule,
    source: BlockSource,
    plan: SelectorPlan,
    seed: int,
    report: Callable[[int, SelectorPoint | None], None],
) -> list[SelectorPoint]:
    """The module, where the blocks are, is left as it was where it did best on held-out text."""
    torch.manual_seed(seed)
    held_out = [source.held_out(is_greedy=flag) for flag in (True, False)]
    optimizer = torch.optim.AdamW(
        module.parameters(), lr=plan.learning_rate, betas=(0.9, 0.98), weight_decay=1.0
    )
    curve = [_measure(module, held_out, 0, 0.0)]
    report(0, curve[0])
    best = {name: value.clone() for name, value in module.state_dict().items()}
    started, step, progress = time.monotonic(), 0, 0.0
    while progress < 1.0:
        for group in optimizer.param_groups:
            group["lr"] = plan.learning_rate * _rate(progress)
        loss = _loss(module, source.draw(step), plan.depth_decay)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        step += 1
        seconds = time.monotonic() - started
        limit = 60 * plan.max_minutes
        progress = max(step / plan.num_steps, seconds / limit if limit else 0.0)
        report(step, None)
        if step % plan.eval_every == 0 or progress >= 1.0:
            curve.append(_measure(module, held_out, step, seconds))
            report(step, curve[-1])
            if curve[-1].held_out_loss <= min(point.held_out_loss for point in curve):
                best = {name: value.clone() for name, value in module.state_dict().items()}
    module.load_state_dict(best)
    return curve


def _rate(progress: float) -> float:
    """A linear rise, then half a cosine."""
    fall = _LEAST_RATE + (1.0 - _LEAST_RATE) * 0.5 * (1.0 + math.cos(math.pi * progress))
    return min(1.0, 0.01 + progress / _WARM_UP) * fall


def _loss(module: SelectorModule, blocks: CandidateBlocks, depth_decay: float) -> Tensor:
    """Cross-entropy over the candidates, where the right one is among them."""
    depths = torch.arange(blocks.labels.shape[1], device=blocks.labels.device)
    weights = torch.exp(-depths / depth_decay) * (blocks.labels >= 0)
    losses = _losses(_scores(module, blocks), blocks.labels)
    return (losses * weights).sum() / weights.sum().clamp(min=1e-9)


def _scores(module: SelectorModule, blocks: CandidateBlocks) -> Tensor:
    """The candidates' logits after the token that came before them."""
    rows = blocks.hidden.flatten(0, 1), blocks.parents.flatten(), blocks.candidates.flatten(0, 1)
    gains: Tensor = module(*rows)
    return blocks.logits + gains.view_as(blocks.logits)


def _losses(scores: Tensor, labels: Tensor) -> Tensor:
    """0 where no candidate is the right one."""
    losses = F.cross_entropy(
        scores.flatten(0, 1), labels.flatten(), ignore_index=-1, reduction="none"
    )
    return losses.view_as(labels)


@torch.no_grad()
def _measure(
    module: SelectorModule,
    held_out: Sequence[Sequence[CandidateBlocks]],
    step: int,
    seconds: float,
) -> SelectorPoint:
    module.eval()
    losses: list[float] = []
    lengths: list[float | None] = []
    for parts in held_out:
        right, loss, num_known = 0.0, 0.0, 0
        for blocks in parts:
            scores = _scores(module, blocks)
            right += float((scores.argmax(-1) == blocks.labels).long().cumprod(1).sum())
            loss += float(_losses(scores, blocks.labels).sum())
            num_known += int((blocks.labels >= 0).sum())
        if num_known:
            losses.append(loss / num_known)
        num_blocks = sum(len(blocks.labels) for blocks in parts)
        lengths.append(1.0 + right / num_blocks if num_blocks else None)
    module.train()
    greedy, sampled = lengths
    shown = sampled if greedy is None else greedy
    if shown is None or not losses:
        raise ModelError("Too little was held out to measure on; use more prompts or tokens.")
    loss = sum(losses) / len(losses)
    return SelectorPoint(step, round(seconds, 2), loss, shown, sampled)
