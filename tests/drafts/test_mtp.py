"""Multi-token prediction: the chain of an independent implementation, and a context that comes
back.
"""

from functools import cache
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.core import SamplingParams
from draftree.decode.sampler import Sampler
from draftree.drafts.mtp import MtpDrafter, MtpKind, load_mtp
from draftree.errors import CheckpointError, ModelError
from draftree.state.span import Span
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint
from draftree.weights.mtp import split_mtp
from tests.golden import golden
from tests.tiny import new_ops, open_target, tiny_path

REFERENCE = np.load(golden("drafts/mtp.npz"))
FEATURES = np.concatenate([REFERENCE["embed"], REFERENCE["residual"]], axis=1)
IDS = REFERENCE["ids"].tolist()
OTHERS = np.random.default_rng(9).standard_normal((20, 256)).astype(np.float32)


def _checkpoint() -> Checkpoint:
    checkpoint = split_mtp(open_checkpoint(tiny_path("qwen35-mtp")))
    assert checkpoint is not None
    return checkpoint


@cache
def _drafter() -> MtpDrafter:
    target = open_target(tiny_path("qwen35-mtp"), num_threads=1).model
    ops = new_ops(exact=True, num_threads=1)
    return MtpDrafter(load_mtp(_checkpoint(), target.vocab_size, ops), target, ops)


def _chain(drafter: MtpDrafter, anchor: int, count: int) -> tuple[list[int], np.ndarray]:
    """Greedy tokens, and the logits of each step."""
    drafter.flush_context()
    tokens, logits = [anchor], []
    for step in range(count):
        logits.append(drafter.step_logits(tokens[-1], step)[0].copy())
        tokens.append(int(logits[-1].argmax()))
    return tokens[1:], np.stack(logits)


@pytest.mark.parametrize("length", [1, 7, 32])
@pytest.mark.parametrize("piece", [1, 5, 64])
def test_the_chain_of_the_reference(length: int, piece: int) -> None:
    """However the context arrives, also after another draft has been made in between."""
    drafter = _drafter()
    drafter.reset()
    for start in range(0, length, piece):
        drafter.extend_context(FEATURES[start : min(start + piece, length)])
        if piece == 5:
            _chain(drafter, 77, 3)
    tokens, logits = _chain(drafter, IDS[length], 5)
    np.testing.assert_allclose(logits, REFERENCE[f"ctx{length}.logits"], atol=2e-4)
    assert tokens == REFERENCE[f"ctx{length}.tokens"].tolist()
    ranked = drafter.propose(IDS[length], Sampler(SamplingParams(), 512), 4, 5)
    assert ranked.tokens[:, 0].tolist() == tokens and ranked.tokens.shape == (5, 4)
    assert ranked.edges is None and (np.diff(ranked.log_probs, axis=1) <= 0).all()


def test_a_target_gives_the_features_of_the_reference() -> None:
    layers = MtpKind().read_size(_checkpoint()).feature_layers
    target = open_target(tiny_path("qwen35-mtp"), num_threads=1, feature_layers=layers)
    rows: list[np.ndarray] = []
    from draftree.prefill.chunked import prefill

    prefill(target, IDS, 16, lambda features: rows.append(features.copy()))
    np.testing.assert_allclose(np.concatenate(rows), FEATURES, atol=2e-4)


def test_nothing_is_drafted_where_nothing_is_known() -> None:
    drafter = _drafter()
    drafter.reset()
    assert len(drafter.propose(5, Sampler(SamplingParams(), 512), 4, 5).tokens) == 0


@settings(max_examples=25, deadline=None)
@given(seen=st.integers(1, 33), cut=st.integers(0, 33), shared=st.integers(0, 33))
def test_context_comes_back(seen: int, cut: int, shared: int) -> None:
    """Copied after `seen` tokens, put into a drafter that has read `shared` of them and others."""
    drafter, cut, shared = _drafter(), min(cut, seen), min(shared, seen)
    drafter.reset()
    drafter.extend_context(FEATURES[:seen])
    expected = _chain(drafter, 9, 3)[1]
    spans = [
        Span(start, stop, drafter.copy(start, stop))
        for start, stop in ((0, cut), (cut, seen))
        if stop > start
    ]
    drafter.reset()
    drafter.extend_context(FEATURES[:shared])
    drafter.extend_context(OTHERS)
    drafter.restore(spans, shared, seen)
    assert drafter.position == seen
    assert np.array_equal(_chain(drafter, 9, 3)[1], expected)


def test_going_back_to_where_no_copy_ends() -> None:
    """One entry is made without its hidden state; what is drafted later is close to the same."""
    drafter = _drafter()
    drafter.reset()
    drafter.extend_context(FEATURES[:30])
    drafter.restore((), 20, 20)
    drafter.extend_context(FEATURES[20:32])
    assert drafter.position == 32
    logits = _chain(drafter, IDS[32], 1)[1]
    expected = REFERENCE["ctx32.logits"][:1]
    assert np.isfinite(logits).all()
    assert 0 < np.abs(logits - expected).max() < 0.5 * np.abs(expected).max()


def test_files_without_the_block() -> None:
    assert split_mtp(open_checkpoint(tiny_path("llama"))) is None


def test_a_block_with_embeddings_of_its_own_is_refused() -> None:
    found = _checkpoint()
    tensors = dict(found.tensors)
    tensors["blk.0.nextn.embed_tokens.weight"] = tensors["blk.0.nextn.enorm.weight"]
    views = {name: found.raw(name) for name in found.tensors}
    other = Checkpoint(Path("x.gguf"), found.metadata, tensors, views)
    with pytest.raises(CheckpointError, match="embeddings of its own"):
        load_mtp(other, 512, new_ops(exact=True, num_threads=1))


def test_other_targets_are_refused() -> None:
    llama = open_target(tiny_path("llama"), num_threads=1).model
    with pytest.raises(ModelError, match="only that of qwen35"):
        MtpKind().check_fit(_checkpoint(), open_checkpoint(tiny_path("llama")), llama)
