"""The loop: its schedule, its batches, and going on after an interruption."""

from dataclasses import replace
from itertools import pairwise

import numpy as np
import pytest
import torch

from draftree.errors import ModelError
from draftree.train.corpus import Corpus
from draftree.train.draft import resolve_shape
from draftree.train.loop import Feeder, Trainer, learning_rate
from draftree.train.settings import DraftShape, Schedule, TextPlan, TrainConfig
from draftree.train.teacher import load_teacher
from draftree.weights.file import open_checkpoint
from tests.tiny import tiny_path

CPU = torch.device("cpu")
CONFIG = TrainConfig(
    DraftShape(1, 64, block_size=4, feature_layers=(0, 1), mask_token=511),
    TextPlan(max_len=64),
    Schedule(
        num_steps=6,
        batch_tokens=128,
        rows_per_token=0.5,
        eval_every=2,
        save_every=1,
        block_sizes=(3, 4),
    ),
)


def _corpus(num_sequences=12):
    rng = np.random.default_rng(0)
    lengths = rng.integers(20, 60, num_sequences)
    return Corpus(
        ids=rng.integers(1, 500, lengths.sum()).astype(np.int32),
        starts=np.concatenate([[0], np.cumsum(lengths)]),
        prompt_lens=np.full(num_sequences, 5, dtype=np.int32),
        is_greedy=np.arange(num_sequences) % 2 == 0,
        is_held_out=np.arange(num_sequences) % 4 < 2,
    )


def _trainer(config=CONFIG):
    teacher = load_teacher(open_checkpoint(tiny_path("llama")), CPU)
    return Trainer(teacher, _corpus(), resolve_shape(config.shape, teacher, 511), config)


def _ignore(step, loss, point):
    pass


def test_the_rate_rises_and_falls():
    schedule = Schedule(learning_rate=1.0, warmup_share=0.1, final_share=0.05)
    rates = [learning_rate(schedule, i / 100) for i in range(101)]
    assert rates[0] < 0.02 and max(rates) == pytest.approx(1.0) == rates[10]
    assert rates[-1] == pytest.approx(0.05)
    assert all(a < b for a, b in pairwise(rates[:11]))
    assert all(a > b for a, b in pairwise(rates[10:]))


def test_held_out_sequences_are_not_drawn():
    teacher = load_teacher(open_checkpoint(tiny_path("llama")), CPU)
    corpus = _corpus()
    spec = resolve_shape(CONFIG.shape, teacher, 511)
    feeder = Feeder(corpus, CONFIG.schedule, spec, 0, CPU)
    lengths = corpus.lengths

    def rows(batch):
        return {tuple(ids[:20].tolist()) for ids in batch.ids}

    held_out = {tuple(corpus.sequence(i)[:20]) for i in np.flatnonzero(corpus.is_held_out)}
    drawn = [feeder.draw(step) for step in range(30)]
    assert not held_out & set().union(*(rows(batch) for batch in drawn))
    assert {batch.block_len for batch in drawn} == {3, 4}
    shown = [rows(b) for flag in (True, False) for b in feeder.held_out(is_greedy=flag)]
    assert set().union(*shown) == held_out and len(lengths) == 12
    again = feeder.draw(3)
    assert torch.equal(again.ids, drawn[3].ids) and torch.equal(again.anchors, drawn[3].anchors)


@pytest.mark.parametrize("optimizer", ["muon", "adamw"])
def test_an_interrupted_run_ends_like_a_whole_one(tmp_path, optimizer):
    config = replace(CONFIG, schedule=replace(CONFIG.schedule, optimizer=optimizer))
    whole = _trainer(config)
    whole.run(tmp_path / "whole.pt", _ignore)
    broken = _trainer(config)

    def interrupt(step, loss, point):
        if step == 4:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        broken.run(tmp_path / "broken.pt", interrupt)
    resumed = _trainer(config)
    resumed.run(tmp_path / "broken.pt", _ignore)
    for name, value in whole.draft.state_dict().items():
        assert torch.equal(value, resumed.draft.state_dict()[name]), name
    assert [p.step for p in resumed.curve] == [p.step for p in whole.curve] == [0, 2, 4, 6]
    last, other = whole.curve[-1], resumed.curve[-1]
    assert (last.held_out_loss, last.num_rows) == (other.held_out_loss, other.num_rows)


def test_the_curve_counts_what_was_learned_from(tmp_path):
    trainer = _trainer()
    trainer.run(tmp_path / "state.pt", _ignore)
    point = trainer.curve[-1]
    assert point.step == 6 and point.num_tokens == 6 * 128
    assert point.num_rows > 0 and point.loss is not None and len(point.accepted_by_depth) == 3
    assert 1.0 <= point.acceptance_length <= 4.0


def test_a_loss_that_is_no_number_ends_a_run(tmp_path):
    trainer = _trainer()
    with torch.no_grad():
        next(trainer.draft.parameters()).fill_(float("nan"))
    with pytest.raises(ModelError, match="not a number any more"):
        trainer.run(tmp_path / "state.pt", _ignore)
    assert not (tmp_path / "state.pt").exists()


def test_a_time_limit_ends_the_schedule(tmp_path):
    config = replace(CONFIG, schedule=replace(CONFIG.schedule, num_steps=10**6, max_minutes=0.02))
    trainer = _trainer(config)
    trainer.run(tmp_path / "state.pt", _ignore)
    assert trainer.curve[-1].learning_rate == pytest.approx(0.02 * 3e-3)
    assert 1.2 <= trainer.curve[-1].seconds < 6.0


@pytest.mark.parametrize(
    ("part", "values", "message"),
    [
        ("schedule", {"block_sizes": (9,)}, "block sizes"),
        ("schedule", {"optimizer": "sgd"}, "optimizer"),
        ("shape", {"block_size": 1}, "block"),
        ("text", {"held_out_share": 0.0}, "held-out"),
    ],
)
def test_settings_are_checked(part, values, message):
    with pytest.raises(ModelError, match=message):
        replace(CONFIG, **{part: replace(getattr(CONFIG, part), **values)})


def test_nothing_to_learn_from_is_said():
    teacher = load_teacher(open_checkpoint(tiny_path("llama")), CPU)
    corpus = _corpus()
    short = replace(corpus, prompt_lens=corpus.lengths.astype(np.int32))
    with pytest.raises(ModelError, match="nothing to learn"):
        Feeder(short, CONFIG.schedule, resolve_shape(CONFIG.shape, teacher, 511), 0, CPU)


def test_rounding_begins_late_and_the_loss_knows_frequent_tokens(tmp_path):
    schedule = replace(CONFIG.schedule, four_bit_from=0.5, num_loss_tokens=100)
    trainer = _trainer(replace(CONFIG, schedule=schedule, is_four_bit=True))
    rounded = []
    trainer.run(tmp_path / "s.pt", lambda *_: rounded.append(trainer.draft.is_four_bit))
    assert rounded[0] is False and rounded[-1] is True
    losses = [point.loss for point in trainer.curve[1:]]
    full = _trainer()
    full.run(tmp_path / "full.pt", _ignore)
    assert all(a != pytest.approx(b.loss) for a, b in zip(losses, full.curve[1:], strict=True))
