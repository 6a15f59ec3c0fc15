"""Rows to learn from are those of the draft as it is used."""

from dataclasses import replace

import numpy as np
import pytest

from draftree.drafts.dflash import BlockDrafter
from draftree.drafts.dflash_model import load_draft
from draftree.train.block_row import FinalNorm, _Reader
from draftree.weights.file import open_checkpoint
from tests.made import make_draft
from tests.tiny import new_ops, open_target, tiny_path


def test_the_draft_has_seen_the_text_before_every_block(monkeypatch: pytest.MonkeyPatch) -> None:
    rng, ops = np.random.default_rng(5), new_ops(exact=True, num_threads=1)
    draft = load_draft(open_checkpoint(make_draft()), ops)
    draft = replace(draft, config=replace(draft.config, draft_vocab=tuple(range(0, 512, 2))))
    target = open_target(tiny_path("qwen35-mtp"), num_threads=1).model
    drafter, text = BlockDrafter(draft, target, ops), rng.integers(0, 512, 20).astype(np.int32)
    told: list[int] = []
    before: list[list[int]] = []
    extend_text, block_logits = drafter.extend_text, drafter.block_logits

    def hear(tokens: list[int]) -> None:
        told.extend(tokens)
        extend_text(tokens)

    def fill(anchor: int) -> np.ndarray:
        before.append(list(told))
        return block_logits(anchor)

    monkeypatch.setattr(drafter, "extend_text", hear)
    monkeypatch.setattr(drafter, "block_logits", fill)
    reader = _Reader(drafter, FinalNorm(np.ones(128, np.float32), 1e-6), 6)
    reader.begin(text, 5)
    features = rng.standard_normal((19, 3 * 128)).astype(np.float32)
    for part in (features[:3], features[3:10], features[10:]):
        reader.take(part)
    assert before == [text[:length].tolist() for length in range(6, 20)]
    assert np.array(reader.candidates).shape == (14, 15, 6)
