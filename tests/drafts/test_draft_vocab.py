"""A draft of a listed vocabulary also proposes tokens of the text, as if its head had them all."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.core import SamplingParams
from draftree.decode.sampler import Sampler
from draftree.drafts import draft_vocab
from draftree.drafts.dflash import BlockDrafter
from draftree.drafts.dflash_model import load_draft
from draftree.drafts.draft_vocab import GROUP_ROWS, DraftVocab, replace_rows
from draftree.kernels.cpu.form import FLOAT_ROWS
from draftree.kernels.cpu.isa import ALL_ISAS, NEON_DOTPROD, Isa
from draftree.kernels.cpu.pack import pack
from draftree.kernels.quant.formats import QuantType
from draftree.models.model import Embedding
from draftree.weights.file import open_checkpoint
from tests.kernels.raw import random_raw
from tests.made import make_draft
from tests.tiny import new_ops, open_target, tiny_path

FEATURES = np.random.default_rng(8).standard_normal((40, 3 * 128)).astype(np.float32)
LISTED = tuple(range(0, 512, 2))
KINDS = {"exact": (True, None), "own": (False, None), "arm": (False, NEON_DOTPROD)}


@pytest.mark.parametrize(("exact", "isa"), KINDS.values(), ids=KINDS)
@pytest.mark.parametrize("qtype", QuantType, ids=lambda qtype: qtype.name)
def test_replaced_rows_are_those_of_a_matrix_packed_with_them(
    qtype: QuantType, exact: bool, isa: Isa | None
) -> None:
    rng = np.random.default_rng(qtype)
    raw = random_raw(rng, qtype, 3 * GROUP_ROWS + 5, 512)
    weight = pack(raw, qtype, exact=exact, isa=isa)
    raw[GROUP_ROWS : 2 * GROUP_ROWS] = random_raw(rng, qtype, GROUP_ROWS, 512)
    expected = pack(raw, qtype, exact=exact, isa=isa).data
    assert not np.array_equal(weight.data, expected)
    replace_rows(weight, GROUP_ROWS, raw[GROUP_ROWS : 2 * GROUP_ROWS], qtype)
    assert np.array_equal(weight.data, expected)


def test_groups_are_whole_strips_of_every_kernel() -> None:
    assert all(GROUP_ROWS % rows == 0 for rows in (FLOAT_ROWS, *(isa.rows for isa in ALL_ISAS)))


def _new_vocab(monkeypatch: pytest.MonkeyPatch, num_spare: int = 64) -> DraftVocab:
    """Of 512 tokens, the even ones listed; the rows of the head tell the tokens."""
    monkeypatch.setattr(draft_vocab, "NUM_SPARE", num_spare)
    raw = np.arange(512, dtype=np.float32).repeat(4).reshape(512, 4).view(np.uint8)
    ops = new_ops(exact=False, num_threads=1)
    return DraftVocab(LISTED, Embedding(raw, QuantType.F32), ops)


def _spare(vocab: DraftVocab) -> list[int]:
    """The tokens of the spare rows; all rows of the head are those of their tokens."""
    rows = vocab.head.data.view(np.float32).reshape(-1, 4, FLOAT_ROWS)[:, 0].ravel()
    assert rows.tolist() == vocab.tokens.tolist()
    assert len(set(vocab.tokens.tolist())) == len(vocab.tokens)
    assert vocab.tokens[-len(LISTED) :].tolist() == list(LISTED)
    return vocab.tokens[: -len(LISTED)].tolist()


@pytest.mark.parametrize(("num_spare", "found"), [(63, 0), (64, 64), (200, 192), (512, 256)])
def test_spare_rows_come_in_groups_and_stand_for_tokens(
    num_spare: int, found: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    vocab = _new_vocab(monkeypatch, num_spare)
    assert _spare(vocab) == list(range(1, 2 * found, 2))
    vocab.add((511, 4))
    assert (511 in _spare(vocab)) == (found > 0)


def test_the_token_that_was_not_seen_for_longest_goes(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = _new_vocab(monkeypatch)
    vocab.add((2, 1, 4))  # is there; again the last
    vocab.add((511, 6, 509, 511))
    assert set(_spare(vocab)[:3]) == {1, 509, 511}
    for token in range(201, 323, 2):  # as many as are left
        vocab.add((token,))
    assert {1, 509, 511, 321} <= set(_spare(vocab))
    vocab.add((323,))
    assert 1 not in _spare(vocab) and 509 in _spare(vocab)
    vocab.add((325,))
    assert 509 not in _spare(vocab) and 511 in _spare(vocab)


def test_of_a_long_text_the_last_tokens_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab = _new_vocab(monkeypatch, 128)
    vocab.add(range(511, -1, -1))
    assert set(_spare(vocab)) == set(range(1, 256, 2))
    vocab.add(range(512))
    assert set(_spare(vocab)) == set(range(257, 512, 2))


def test_tokens_that_are_there_are_not_packed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    vocab, packed = _new_vocab(monkeypatch, 128), []
    replace = draft_vocab.replace_rows

    def count(weight: object, first: int, *rest: object) -> None:
        packed.append(first)
        replace(weight, first, *rest)

    monkeypatch.setattr(draft_vocab, "replace_rows", count)
    first, second = range(301, 361, 2), range(401, 461, 2)
    vocab.add(first)
    vocab.add(second)
    assert packed == [0, 0]
    for _ in range(3):
        vocab.add(first)
        vocab.add((*second, 4, 403, 4))
    assert packed == [0, 0]
    vocab.add(range(130, 511))
    assert set(packed[2:]) == {0, 64}


@settings(max_examples=40, deadline=None)
@given(st.lists(st.lists(st.integers(0, 511), max_size=150), max_size=8))
def test_the_last_tokens_of_a_text_are_always_there(pieces: list[list[int]]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        vocab = _new_vocab(patch)
    order = list(range(1, 128, 2))
    for piece in pieces:
        vocab.add(piece)
        for token in piece:
            order = [*(other for other in order if other != token), *[token] * (token % 2)]
        assert set(_spare(vocab)) == set(order[-64:])


@cache
def _drafter(exact: bool, *, is_listed: bool) -> BlockDrafter:
    target = open_target(tiny_path("qwen35-mtp"), exact=exact, num_threads=1)
    ops = new_ops(exact=exact, num_threads=1)
    draft = load_draft(open_checkpoint(make_draft()), ops)
    draft = replace(draft, config=replace(draft.config, draft_vocab=LISTED if is_listed else ()))
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(draft_vocab, "NUM_SPARE", 64)
        return BlockDrafter(draft, target.model, ops)


@pytest.mark.parametrize("exact", [True, False])
def test_a_token_of_the_text_is_proposed_as_by_the_whole_vocabulary(exact: bool) -> None:
    """With the same logit to the bit, and not before it was seen."""
    drafter, whole = (_drafter(exact, is_listed=is_listed) for is_listed in (True, False))
    sampler, logits = Sampler(SamplingParams(), 512), []
    for one in (drafter, whole):
        one.reset()
        one.extend_context(FEATURES)
        logits.append(one.block_logits(9).copy())
    tokens = drafter.draft_vocab
    assert tokens is not None and np.array_equal(logits[0], logits[1][:, tokens])
    wanted = [token for token in np.argmax(logits[1], axis=1) if token not in tokens]
    assert wanted, "the whole vocabulary's best are others"
    assert not np.isin(wanted, drafter.propose(9, sampler, 20, 15).tokens).any()
    drafter.extend_text((*wanted, 4))
    assert np.isin(wanted, tokens).all()
    assert np.array_equal(drafter.block_logits(9), logits[1][:, tokens])
    found, best = (one.propose(9, sampler, 1, 15).tokens[:, 0] for one in (drafter, whole))
    assert (found == best)[np.isin(best, wanted)].all()
