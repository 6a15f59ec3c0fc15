"""A selector learns what follows what, and its file drafts without changing a text."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from draftree.config import EngineConfig
from draftree.core import Request
from draftree.engine.engine import TokenEngine
from draftree.errors import ModelError
from draftree.train.block_row import BlockRows
from draftree.train.prompt import Prompt
from draftree.train.run import train_draft
from draftree.train.selector import SelectorModule, StoredBlocks, train_selector
from draftree.train.selector_run import add_selector
from draftree.train.settings import (
    DraftShape,
    Schedule,
    SelectorConfig,
    SelectorPlan,
    TextPlan,
    TrainConfig,
)
from draftree.weights.file import open_checkpoint
from tests.train.counting import make_counting
from tests.train.test_run import Watcher

PLAN = SelectorPlan(num_steps=120, batch_blocks=64, learning_rate=0.01, eval_every=40)
TEXT = TextPlan(300, 24, batch_size=8, held_out_share=0.2, temperatures=(0.3, 0.5))
CONFIG = SelectorConfig(TEXT, replace(PLAN, num_steps=6, top_k=8))
PROMPTS = [Prompt(a + b, False) for a in "ABCDEF" for b in "ABCDEFGH"]


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def _two_ways(count=600):
    """Texts that say one token all along, or another one, which no position can tell by itself; at
    every second one the wrong one comes first.
    """
    rng = np.random.default_rng(0)
    words = rng.permutation(np.arange(2, 10).repeat(2)).reshape(-1, 2)
    chosen = words[rng.integers(len(words), size=count)]
    chosen = chosen[chosen[:, 0] != chosen[:, 1]]
    candidates = np.sort(chosen, axis=1)[:, None].repeat(4, axis=1).astype(np.int32)
    candidates[:, 1::2] = candidates[:, 1::2, ::-1]
    said = candidates[np.arange(len(chosen)), 0, rng.integers(2, size=len(chosen))]
    tokens = np.column_stack([np.ones_like(said), *[said] * 4])
    hidden = np.ones((len(chosen), 4, 16), dtype=np.float16)
    is_greedy = np.arange(len(chosen)) % 2 == 0
    log_probs = np.broadcast_to(np.log([0.6, 0.4]), candidates.shape).astype(np.float16)
    is_held_out = np.arange(len(chosen)) % 5 < 2
    return BlockRows(hidden, candidates, log_probs, tokens, is_greedy, is_held_out)


def _module(num_tokens=10):
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(num_tokens, 16, generator=generator)
    return SelectorModule(rows, rows, torch.arange(num_tokens), PLAN)


def test_what_no_position_can_tell_is_told_by_the_one_before():
    points = []
    curve = train_selector(
        *(_module(), StoredBlocks(_two_ways(), 64, 0, torch.device("cpu")), PLAN, 0),
        lambda step, point: points.append(point) if point else None,
    )
    assert points == curve
    assert curve[0].acceptance_length < 2, "the chain goes on with the other one"
    assert curve[-1].acceptance_length > 2.7, "3 is the most: half of all beginnings are wrong"
    assert curve[-1].held_out_loss < 0.6 * curve[0].held_out_loss


def test_tables_score_as_the_module_does():
    module = _module().eval()
    tables, rows = module.tables(), _two_ways(8)
    hidden = torch.randn(8, 16)
    parents, candidates = torch.arange(8), torch.from_numpy(rows.candidates[:8, 0]).long()
    before = tables.before[parents.numpy()] * (hidden.numpy() @ tables.projection.T)
    expected = np.einsum("nr,ncr->nc", before, tables.after[candidates.numpy()])
    with torch.no_grad():
        found = module(hidden, parents, candidates).numpy()
    assert np.allclose(found, expected, rtol=1e-4, atol=1e-6)
    assert not tables.before[-1].any() and not tables.after[-1].any(), "all other tokens"


def test_ranks_are_whole_blocks():
    with pytest.raises(ModelError, match="rank"):
        SelectorPlan(rank=48)


@pytest.fixture(scope="module")
def pair(tmp_path_factory):
    """A target that counts, and a draft that has hardly learned."""
    folder = tmp_path_factory.mktemp("draft")
    shape = DraftShape(1, 64, block_size=4, feature_layers=(0, 1))
    config = TrainConfig(shape, TEXT, Schedule(num_steps=3, batch_tokens=128))
    target = make_counting()
    train_draft(
        *(open_checkpoint(target), PROMPTS, config, folder, torch.device("cpu"), Watcher()),
        formats=("q8",),
    )
    return target, folder / "draft-q8.gguf"


def _add(pair, folder, config=CONFIG):
    target, draft = map(open_checkpoint, pair)
    watcher = Watcher()
    path = add_selector(target, draft, PROMPTS, config, folder, "cpu", watcher, "made for a test")
    return path, watcher


def test_a_draft_gets_a_selector_and_texts_stay(pair, tmp_path):
    path, watcher = _add(pair, tmp_path)
    assert len(watcher.points) == 2
    assert "made for a test" in (tmp_path / "README.md").read_text()
    before, after = open_checkpoint(pair[1]), open_checkpoint(path)
    for name in before.tensors:
        assert np.array_equal(before.raw(name), after.raw(name))
    request = Request((70, 71, 72), 24)
    texts = []
    for draft in (None, path):
        engine = TokenEngine.open(pair[0], EngineConfig(budget=0 if draft is None else 7), draft)
        texts.append([event.token for event in engine.generate(request)])
        engine.close()
    assert texts[0] == texts[1]


def test_a_run_goes_on_with_what_is_there_and_refuses_other_settings(pair, tmp_path):
    path, _ = _add(pair, tmp_path)
    made = path.read_bytes()
    rows = {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.npz")}
    path.unlink()
    assert rows and _add(pair, tmp_path)[0].read_bytes() == made
    assert rows == {p: p.stat().st_mtime_ns for p in tmp_path.glob("*.npz")}
    with pytest.raises(ModelError, match="other settings"):
        _add(pair, tmp_path, replace(CONFIG, seed=1))
