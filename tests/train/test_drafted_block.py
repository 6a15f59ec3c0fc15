"""Candidates of blocks that are filled while a selector learns are those of the draft's files."""

import numpy as np
import pytest
import torch

from draftree.train.draft import DraftModule, resolve_shape
from draftree.train.drafted_block import DraftedBlocks
from draftree.train.loop import Feeder
from draftree.train.objective import begin_rounds, draft_rows, read_labels
from draftree.train.teacher import load_teacher
from draftree.weights.file import open_checkpoint
from tests.tiny import tiny_path
from tests.train.test_loop import CONFIG, _corpus

CPU = torch.device("cpu")


@pytest.mark.parametrize("listed", [range(512), range(0, 512, 2)])
def test_candidates_are_the_best_of_the_listed_tokens(listed):
    teacher = load_teacher(open_checkpoint(tiny_path("llama")), CPU)
    spec = resolve_shape(CONFIG.shape, teacher, 511)
    torch.manual_seed(0)
    draft = DraftModule(spec, teacher.output_norm)
    feeder = Feeder(_corpus(), CONFIG.schedule, spec, 0, CPU)
    source = DraftedBlocks(draft, teacher, feeder, list(listed), 8)
    blocks = source.draw(3)
    batch = feeder.draw(3)
    features = teacher.read(batch.ids, spec.feature_layers).features
    batch = begin_rounds(draft, teacher, batch, features, 0.5)
    labels = read_labels(batch)
    with torch.no_grad():
        hidden = draft_rows(draft, teacher, batch, labels, features).flatten(0, 1)
    logits = (hidden @ teacher.head.T)[..., list(listed)]
    assert torch.allclose(blocks.hidden, hidden, atol=1e-5)
    assert torch.allclose(blocks.logits, logits.topk(8).values, atol=1e-4)
    assert np.isin(blocks.candidates.numpy(), list(listed)).all()
    assert torch.equal(blocks.parents, labels.tokens[:, :, :-1].flatten(0, 1))
    wanted = labels.tokens[:, :, 1:].flatten(0, 1)
    known = blocks.labels >= 0
    assert torch.equal(
        blocks.candidates.gather(-1, blocks.labels.clamp(min=0)[..., None])[..., 0][known],
        wanted[known],
    )
    is_real = labels.is_real[:, :, 1:].flatten(0, 1)
    among = (blocks.candidates == wanted[..., None]).any(-1) & is_real
    assert torch.equal(known, among)


def test_held_out_blocks_are_whole_and_the_same_every_time():
    teacher = load_teacher(open_checkpoint(tiny_path("llama")), CPU)
    spec = resolve_shape(CONFIG.shape, teacher, 511)
    feeder = Feeder(_corpus(), CONFIG.schedule, spec, 0, CPU)
    source = DraftedBlocks(DraftModule(spec), teacher, feeder, range(512), 8)
    for is_greedy in (True, False):
        first, again = (source.held_out(is_greedy=is_greedy) for _ in range(2))
        assert first and sum(len(blocks.labels) for blocks in first) > 0
        for one, other in zip(first, again, strict=True):
            assert torch.equal(one.candidates, other.candidates)
