"""The block objective: which rows it asks for, and that its loss and gradient are right."""

import numpy as np
import pytest
import torch

from draftree.train.draft import DraftModule, resolve_shape
from draftree.train.objective import (
    HeadSampler,
    _FrozenHeadLoss,
    begin_rounds,
    block_loss,
    count_right,
    draft_rows,
    make_batch,
    read_labels,
)
from draftree.train.settings import DraftShape
from draftree.train.teacher import load_teacher
from draftree.weights.file import open_checkpoint
from tests.tiny import tiny_path

CPU = torch.device("cpu")


def _batch(num_blocks=6, block_len=4):
    rng = np.random.default_rng(0)
    sequences = [rng.integers(1, 500, length).astype(np.int32) for length in (30, 12)]
    batch = make_batch(sequences, [5, 9], 32, num_blocks, block_len, rng, CPU)
    return sequences, batch


def _pair(**shape):
    teacher = load_teacher(open_checkpoint(tiny_path("llama")), CPU)
    torch.manual_seed(0)
    spec = resolve_shape(DraftShape(2, block_size=4, feature_layers=(0, 1), **shape), teacher, 511)
    return teacher, DraftModule(spec, teacher.output_norm)


def test_anchors_are_where_the_target_wrote():
    for num_blocks in (1, 6, 200):
        sequences, batch = _batch(num_blocks)
        for ids, first, anchors in zip(sequences, (4, 8), batch.anchors.numpy(), strict=True):
            assert anchors.min() >= first and anchors.max() <= len(ids) - 2
        if num_blocks == 200:  # every place is used
            assert set(batch.anchors[0].tolist()) == set(range(4, 29))


def test_labels_are_the_text_behind_the_anchor():
    sequences, batch = _batch()
    labels = read_labels(batch)
    for row, ids in enumerate(sequences):
        for block, anchor in enumerate(batch.anchors[row].tolist()):
            real = labels.is_real[row, block]
            expected = ids[anchor : anchor + 4].tolist()
            assert labels.tokens[row, block][real].tolist() == expected
            assert int(real.sum()) == len(expected) and real[:2].all()


def test_blocks_in_parts_give_what_each_gives_alone():
    """32 blocks are two parts for attention; one block at a time is none."""
    teacher, draft = _pair()
    _, batch = _batch(num_blocks=32)
    features = teacher.read(batch.ids, (0, 1)).features
    labels = read_labels(batch)
    together = draft_rows(draft, teacher, batch, labels, features)
    for i in (0, 15, 16, 31):
        alone = type(batch)(batch.ids, batch.lengths, batch.anchors[:, i : i + 1], batch.block_len)
        rows = draft_rows(draft, teacher, alone, read_labels(alone), features)
        assert torch.allclose(together[:, i], rows[:, 0], atol=1e-5)


def test_only_the_anchor_is_shown():
    """What is behind an anchor must not reach its rows by any way."""
    teacher, draft = _pair()
    _, batch = _batch(num_blocks=1)
    labels = read_labels(batch)
    features = teacher.read(batch.ids, (0, 1)).features
    before = draft_rows(draft, teacher, batch, labels, features)
    ids = batch.ids.clone()
    for row, anchor in enumerate(batch.anchors[:, 0].tolist()):
        ids[row, anchor + 1 :] = 77
    changed = type(batch)(ids, batch.lengths, batch.anchors, batch.block_len)
    features = teacher.read(ids, (0, 1)).features
    after = draft_rows(draft, teacher, changed, read_labels(changed), features)
    assert torch.allclose(before, after, atol=1e-6)


@pytest.mark.parametrize("has_bias", [False, True])
@pytest.mark.parametrize("share", [0.0, 0.4])
def test_loss_and_gradient_are_those_of_cross_entropy(share, has_bias):
    torch.manual_seed(1)
    bias = torch.randn(50) if has_bias else torch.zeros(50)
    hidden = torch.randn(10, 16, requires_grad=True)
    head, labels, weights = torch.randn(50, 16), torch.randint(0, 50, (10,)), torch.rand(10)
    guide = torch.randn(10, 16) if share else None
    given = bias if has_bias else None
    loss = _FrozenHeadLoss.apply(hidden, head, given, labels, weights, guide, share)
    (gradient,) = torch.autograd.grad(loss * 3.0, hidden)
    logs = (hidden @ head.T + bias).log_softmax(-1)
    wanted = (1 - share) * torch.nn.functional.one_hot(labels, 50)
    if guide is not None:
        wanted = wanted + share * (guide @ head.T + bias).softmax(-1)
    expected = -((wanted * logs).sum(-1) * weights).sum()
    assert torch.allclose(loss, expected, atol=1e-4)
    (reference,) = torch.autograd.grad(expected * 3.0, hidden)
    assert torch.allclose(gradient, reference, atol=1e-4)


def test_rows_fade_with_depth_and_padding_does_not_count():
    teacher, draft = _pair()
    _, batch = _batch()
    labels = read_labels(batch)
    features = teacher.read(batch.ids, (0, 1)).features
    hidden = draft_rows(draft, teacher, batch, labels, features)
    losses = torch.nn.functional.cross_entropy(
        teacher.logits(hidden).flatten(0, 2), labels.tokens[:, :, 1:].flatten(), reduction="none"
    ).view(2, 6, 3)
    weights = torch.exp(-torch.tensor([0.0, 0.5, 1.0])) * labels.is_real[:, :, 1:]
    expected = (losses * weights).sum() / weights.sum()
    loss = block_loss(draft, teacher, batch, depth_decay=2.0)
    assert torch.allclose(loss, expected, atol=1e-4)
    guided = block_loss(draft, teacher, batch, depth_decay=2.0, distill_share=0.5)
    assert torch.isfinite(guided) and not torch.allclose(guided, loss)


def test_runs_end_at_the_first_mistake():
    teacher, draft = _pair()
    _, batch = _batch()
    labels = read_labels(batch)
    features = teacher.read(batch.ids, (0, 1)).features
    rows = draft_rows(draft, teacher, batch, labels, features)
    guesses = teacher.logits(rows).argmax(-1)
    ids = batch.ids.clone()
    anchor = int(batch.anchors[0, 0])
    ids[0, anchor + 1] = guesses[0, 0, 0]  # right, and what follows stays wrong
    changed = type(batch)(ids, batch.lengths, batch.anchors[:, :1], batch.block_len)
    runs, losses = count_right(draft, teacher, changed)
    assert runs.tolist() == [[1], [0]] and losses.shape == (3,)


def test_anchors_move_to_where_the_next_round_begins():
    """Texts are changed to what the draft says, so that some of it is right."""
    teacher, draft = _pair()
    _, batch = _batch(num_blocks=16)
    ids = batch.ids.clone()
    for _ in range(3):
        features = teacher.read(ids, (0, 1)).features
        told = type(batch)(ids, batch.lengths, batch.anchors, batch.block_len)
        rows = draft_rows(draft, teacher, told, read_labels(told), features)
        guesses = teacher.logits(rows).argmax(-1)
        for row in range(2):
            for block in (0, 6, 12):
                anchor = int(batch.anchors[row, block])
                ids[row, anchor + 1 : anchor + 3] = guesses[row, block, :2]
    batch = type(batch)(ids, batch.lengths, batch.anchors, batch.block_len)
    runs, _ = count_right(draft, teacher, batch)
    assert runs.unique().numel() > 1, "some are right, some are not"
    features = teacher.read(ids, (0, 1)).features
    expected = torch.minimum(batch.anchors + runs + 1, batch.lengths[:, None] - 2)
    moved = begin_rounds(draft, teacher, batch, features, 1.0)
    assert torch.equal(moved.anchors, expected)
    half = begin_rounds(draft, teacher, batch, features, 0.5)
    assert torch.equal(half.anchors[:, ::2], expected[:, ::2])
    assert torch.equal(half.anchors[:, 1::2], batch.anchors[:, 1::2])
    loss = block_loss(draft, teacher, batch, depth_decay=4.0, round_share=0.5)
    assert torch.equal(loss, block_loss(draft, teacher, half, depth_decay=4.0))


def test_a_sampled_head_tells_frequent_tokens_apart_and_stands_for_the_rest():
    teacher, _ = _pair()
    frequent = list(range(3, 103))
    head = HeadSampler(teacher, frequent).draw(0)
    assert head.weight.shape == (150, teacher.hidden_size)
    assert head.columns[frequent].tolist() == list(range(100))
    assert int((head.columns < 0).sum()) == teacher.vocab_size - 100
    assert torch.equal(head.weight[:100], teacher.head[3:103])
    stands_for = head.bias.exp()
    assert stands_for[:100].tolist() == [1.0] * 100
    assert float(stands_for.sum()) == pytest.approx(teacher.vocab_size, rel=1e-5)


def test_rows_of_tokens_without_a_column_do_not_count():
    teacher, draft = _pair()
    _, batch = _batch()
    present = sorted(set(read_labels(batch).tokens[:, :, 1:].flatten().tolist()))
    everything = [*present, *(t for t in range(teacher.vocab_size) if t not in present)]
    full = HeadSampler(teacher, everything).draw(0)
    loss = block_loss(draft, teacher, batch, depth_decay=4.0, head=full)
    expected = block_loss(draft, teacher, batch, depth_decay=4.0)
    assert loss.item() == pytest.approx(expected.item(), abs=1e-4)
    half = HeadSampler(teacher, present[::2]).draw(0)
    part = block_loss(draft, teacher, batch, depth_decay=4.0, head=half)
    assert torch.isfinite(part) and part.item() != pytest.approx(expected.item(), abs=1e-4)


def test_a_batch_without_any_column_teaches_nothing():
    """Not numbers would spoil the draft for good."""
    teacher, draft = _pair()
    _, batch = _batch()
    present = set(read_labels(batch).tokens[:, :, 1:].flatten().tolist())
    absent = [token for token in range(teacher.vocab_size) if token not in present][:9]
    head = HeadSampler(teacher, absent).draw(0)
    loss = block_loss(draft, teacher, batch, depth_decay=4.0, distill_share=0.5, head=head)
    loss.backward()
    assert loss.item() == 0.0
    assert all(not p.grad.any() for p in draft.parameters() if p.grad is not None)
