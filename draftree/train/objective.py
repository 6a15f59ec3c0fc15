"""The block objective: anchors at random or where rounds begin, blocks of masks, cross-entropy that
fades with depth.

In: sequences that the target wrote. Out: a loss, and how many tokens of each block the draft would
have got right. The head is the target's and stays as it is.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor

from draftree.train.draft import DraftModule
from draftree.train.teacher import Teacher

_CHUNK_ROWS = 8192  # rows whose logits are in memory at once
_ROUND_BLOCKS = 8  # anchors move in so many, as attention takes them in groups


@dataclass(frozen=True, slots=True)
class Batch:
    """Sequences padded on the right, and where blocks begin in them."""

    ids: Tensor  # int64 [batch, length]
    lengths: Tensor  # int64 [batch]
    anchors: Tensor  # int64 [batch, num_blocks], positions
    block_len: int


@dataclass(frozen=True, slots=True)
class LossHead:
    """The tokens that a loss tells apart: of a large vocabulary the frequent ones, and a few others
    drawn at random that stand for all the rest.
    """

    weight: Tensor  # [num_columns, hidden_size]
    bias: Tensor  # [num_columns]: log of how many tokens a column stands for
    columns: Tensor  # int64 [vocab_size], -1 where a token has none


class HeadSampler:
    """Makes the head of every step: the same frequent tokens, and half as many others."""

    def __init__(self, teacher: Teacher, frequent: Sequence[int]) -> None:
        head, device = teacher.head, teacher.device
        self._head = head
        self._frequent = torch.tensor(frequent, device=device)
        is_rare = torch.ones(len(head), dtype=torch.bool, device=device)
        is_rare[self._frequent] = False
        self._rare = is_rare.nonzero()[:, 0]
        self._num_others = min(len(frequent) // 2, len(self._rare))
        self._columns = torch.full((len(head),), -1, device=device)
        self._columns[self._frequent] = torch.arange(len(frequent), device=device)
        self._bias = torch.zeros(len(frequent) + self._num_others, device=device).to(head.dtype)
        if self._num_others:
            self._bias[len(frequent) :] = math.log(len(self._rare) / self._num_others)

    def draw(self, seed: int) -> LossHead:
        """Drawn on the device, so that the host need not wait for it."""
        tokens, device = self._frequent, self._head.device
        if self._num_others:
            noise = torch.Generator(device).manual_seed(seed)
            shape = (self._num_others,)
            drawn = torch.randint(len(self._rare), shape, generator=noise, device=device)
            tokens = torch.cat([tokens, self._rare[drawn]])
        return LossHead(self._head[tokens], self._bias, self._columns)


@dataclass(frozen=True, slots=True)
class BlockLabels:
    """The true tokens behind every anchor."""

    tokens: Tensor  # int64 [batch, num_blocks, block_len], the anchor first
    places: Tensor  # int64, the same shape: their positions, within the sequence
    is_real: Tensor  # bool, the same shape: not behind the end


def make_batch(
    sequences: Sequence[np.ndarray],
    prompt_lens: Sequence[int],
    length: int,
    num_blocks: int,
    block_len: int,
    rng: np.random.Generator,
    device: torch.device,
) -> Batch:
    """Anchors are spread over what the target wrote: the last token of the prompt to the last but
    one of the sequence.
    """
    ids = np.zeros((len(sequences), length), dtype=np.int64)
    for row, sequence in zip(ids, sequences, strict=True):
        row[: len(sequence)] = sequence
    lengths = np.array([len(sequence) for sequence in sequences])
    first = np.array(prompt_lens) - 1
    spread = np.arange(num_blocks) + rng.random((len(sequences), num_blocks))
    offsets = (spread / num_blocks * (lengths - 1 - first)[:, None]).astype(np.int64)
    anchors = np.minimum(first[:, None] + offsets, lengths[:, None] - 2)

    def move(values: np.ndarray) -> Tensor:
        tensor = torch.from_numpy(values)
        if device.type == "cuda":  # a copy from pinned memory does not wait for earlier work
            tensor = tensor.pin_memory()
        return tensor.to(device, non_blocking=True)

    return Batch(move(ids), move(lengths), move(anchors), block_len)


def read_labels(batch: Batch) -> BlockLabels:
    depths = torch.arange(batch.block_len, device=batch.ids.device)
    places = batch.anchors[:, :, None] + depths
    is_real = places < batch.lengths[:, None, None]
    places = places.clamp(max=batch.ids.shape[1] - 1)
    tokens = batch.ids.gather(1, places.flatten(1)).view_as(places)
    return BlockLabels(tokens, places, is_real)


def draft_rows(
    draft: DraftModule, teacher: Teacher, batch: Batch, labels: BlockLabels, features: Tensor
) -> Tensor:
    """Hidden states of the rows that predict: [batch, num_blocks, block_len - 1, hidden_size]."""
    tokens = torch.full_like(labels.tokens, draft.spec.mask_token)
    tokens[:, :, 0] = labels.tokens[:, :, 0]
    hidden: Tensor = draft(features, batch.anchors, teacher.embedding[tokens])
    return hidden[:, :, 1:]


@torch.no_grad()
def begin_rounds(
    draft: DraftModule, teacher: Teacher, batch: Batch, features: Tensor, share: float
) -> Batch:
    """Move that share of the anchors to where the draft's next round would begin: behind its first
    choices that are right, at the token that it got wrong.
    """
    num_blocks = batch.anchors.shape[1]
    unit = math.gcd(num_blocks, _ROUND_BLOCKS)
    count = round(share * num_blocks / unit) * unit
    if not count:
        return batch
    moved = torch.arange(count, device=batch.ids.device) * num_blocks // count
    part = replace(batch, anchors=batch.anchors[:, moved])
    labels = read_labels(part)
    hidden = draft_rows(draft, teacher, part, labels, features).flatten(0, 2)
    choices = [(rows @ teacher.head.T).argmax(-1) for rows in hidden.split(_CHUNK_ROWS)]
    anchors = batch.anchors.clone()
    anchors[:, moved] = torch.minimum(
        part.anchors + 1 + _count_runs(torch.cat(choices), labels), batch.lengths[:, None] - 2
    )
    return replace(batch, anchors=anchors)


def _count_runs(choices: Tensor, labels: BlockLabels) -> Tensor:
    """How many choices in a row are right, int64 [batch, num_blocks]."""
    wanted, is_real = labels.tokens[:, :, 1:], labels.is_real[:, :, 1:]
    is_right = (choices.view_as(wanted) == wanted) & is_real
    return is_right.long().cumprod(-1).sum(-1)


def block_loss(
    draft: DraftModule,
    teacher: Teacher,
    batch: Batch,
    *,
    depth_decay: float,
    distill_share: float = 0.0,
    round_share: float = 0.0,
    head: LossHead | None = None,
) -> Tensor:
    """The weighted mean cross-entropy of all block rows. Rows whose token has no column in the head
    do not count; where no row does, it is 0. round_share: of anchors that `begin_rounds` moves.
    """
    read = teacher.read(batch.ids, draft.spec.feature_layers, needs_hidden=distill_share > 0)
    assert read.features is not None
    if round_share > 0:
        batch = begin_rounds(draft, teacher, batch, read.features, round_share)
    labels = read_labels(batch)
    hidden = draft_rows(draft, teacher, batch, labels, read.features)
    depths = torch.arange(batch.block_len - 1, device=hidden.device)
    weights = torch.exp(-depths / depth_decay) * labels.is_real[:, :, 1:]
    tokens = labels.tokens[:, :, 1:]
    if head is not None:
        tokens = head.columns[tokens]
        weights = weights * (tokens >= 0)
        tokens = tokens.clamp(min=0)
    guide = None
    if distill_share > 0:  # the target's state one place before each label
        rows = torch.arange(len(batch.ids), device=hidden.device)[:, None, None]
        guide = read.hidden[rows, labels.places[:, :, 1:] - 1].flatten(0, 2)
    loss: Tensor = _FrozenHeadLoss.apply(
        hidden.flatten(0, 2),
        teacher.head if head is None else head.weight,
        None if head is None else head.bias,
        tokens.flatten(),
        (weights / weights.sum().clamp(min=torch.finfo(weights.dtype).tiny)).flatten(),
        guide,
        distill_share,
    )
    return loss


class _FrozenHeadLoss(torch.autograd.Function):
    """Cross-entropy behind a head that does not learn. Logits exist for a few rows at a time, since
    their gradient is known as soon as they are.
    """

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        head: Tensor,
        bias: Tensor | None,
        labels: Tensor,
        weights: Tensor,
        guide: Tensor | None,
        share: float,
    ) -> Tensor:
        gradient = torch.empty_like(hidden)
        loss = torch.zeros((), device=hidden.device)

        def softmax(states: Tensor) -> Tensor:
            logits = states @ head.T if bias is None else torch.addmm(bias, states, head.T)
            return logits.softmax(-1)

        for start in range(0, len(hidden), _CHUNK_ROWS):
            rows = slice(start, start + _CHUNK_ROWS)
            label, weight = labels[rows, None], weights[rows]
            chances = softmax(hidden[rows])
            losses = -chances.gather(1, label).float().clamp(min=1e-30).log()[:, 0]
            if guide is not None:
                wanted = softmax(guide[rows])
                spread = -(wanted * chances.clamp(min=1e-30).log()).sum(-1, dtype=torch.float32)
                losses = (1 - share) * losses + share * spread
                chances = chances.sub_(wanted, alpha=share)
            known = torch.full_like(label, -(1 - share), dtype=chances.dtype)
            chances.scatter_add_(1, label, known)
            gradient[rows] = (chances @ head) * weight[:, None].to(chances.dtype)
            loss += (losses * weight).sum()
        ctx.save_for_backward(gradient)
        return loss

    @staticmethod
    def backward(ctx: Any, *outer: Tensor) -> Any:
        (gradient,) = ctx.saved_tensors
        return gradient * outer[0].to(gradient.dtype), *[None] * 6


@torch.no_grad()
def count_right(draft: DraftModule, teacher: Teacher, batch: Batch) -> tuple[Tensor, Tensor]:
    """Per block: how many tokens in a row the draft's first choices get right; and the mean loss of
    the first row.
    """
    read = teacher.read(batch.ids, draft.spec.feature_layers, needs_hidden=False)
    assert read.features is not None
    labels = read_labels(batch)
    hidden = draft_rows(draft, teacher, batch, labels, read.features).flatten(0, 2)
    wanted, real = labels.tokens[:, :, 1:].flatten(), labels.is_real[:, :, 1:]
    choices, losses = torch.empty_like(wanted), torch.empty(len(wanted), device=wanted.device)
    for start in range(0, len(hidden), _CHUNK_ROWS):
        rows = slice(start, start + _CHUNK_ROWS)
        logits = (hidden[rows] @ teacher.head.T).float()
        choices[rows] = logits.argmax(-1)
        losses[rows] = torch.nn.functional.cross_entropy(logits, wanted[rows], reduction="none")
    mean = (losses.view_as(real) * real).sum((0, 1)) / real.sum((0, 1)).clamp(min=1)
    return _count_runs(choices, labels), mean
