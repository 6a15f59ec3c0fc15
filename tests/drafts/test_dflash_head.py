"""DFlash2, DSpark and JetSpec give the numbers of independent implementations
(tests/data/make_relatives.py).
"""

from dataclasses import replace
from functools import cache
from typing import TYPE_CHECKING

import numpy as np
import pytest

from draftree.core import SamplingParams
from draftree.decode.sampler import FIRST_WEIGHTS, LATER_WEIGHTS, Sampler
from draftree.drafts import token_table
from draftree.drafts.dflash import BlockDrafter
from draftree.drafts.dflash_head import BlockOutput, MarkovHead
from draftree.drafts.dflash_model import load_draft, name_kind
from draftree.drafts.token_table import TokenTable, index_listed
from draftree.errors import CheckpointError
from draftree.kernels.quant.formats import QuantType
from draftree.weights.checkpoint import Checkpoint
from draftree.weights.file import open_checkpoint
from tests.drafts.pairs import RELATIVE_LAYERS, RELATIVES, SELECTORS
from tests.golden import golden
from tests.kernels.raw import random_raw
from tests.made import make_draft
from tests.tiny import new_ops, open_target, tiny_path

if TYPE_CHECKING:
    from draftree.kernels.cuda.compile import Gpu

REFERENCE = np.load(golden("drafts/relatives.npz"))
IDS = REFERENCE["ids"].tolist()
NAMES = {"": "DFlash", "dflash2": "DFlash2", "jetspec": "JetSpec"} | dict.fromkeys(
    SELECTORS, "DFlash with selector"
)


@cache
def _drafter(kind: str, block_len: int = 0) -> BlockDrafter:
    target = open_target(tiny_path("qwen35-mtp"), num_threads=1).model
    ops = new_ops(exact=True, num_threads=1)
    checkpoint = open_checkpoint(make_draft(feature_layers=RELATIVE_LAYERS, relative=kind))
    assert name_kind(checkpoint) == NAMES.get(kind, "DSpark")
    return BlockDrafter(load_draft(checkpoint, ops), target, ops, block_len=block_len)


def _at(kind: str, length: int, block_len: int = 0) -> BlockDrafter:
    drafter = _drafter(kind, block_len)
    drafter.reset()
    drafter.extend_context(REFERENCE["features"][:length])
    return drafter


@pytest.mark.parametrize("length", [1, 30])
@pytest.mark.parametrize("kind", RELATIVES)
def test_blocks_of_the_reference(kind: str, length: int) -> None:
    """All rows for JetSpec, else the first, where it is used, and the last."""
    logits, expected = _at(kind, length).block_logits(IDS[length]), REFERENCE
    rows = expected[f"{kind}.ctx{length}.block"]
    np.testing.assert_allclose(logits[-1], rows[-1], atol=3e-4)
    if kind == "dspark":
        assert len(logits) == 8
        np.testing.assert_allclose(logits[0], rows[0], atol=3e-4)
    else:
        assert len(logits) == 7
    if kind == "jetspec":
        np.testing.assert_allclose(logits, rows[1:], atol=3e-4)


@pytest.mark.parametrize("length", [1, 30])
def test_edges_of_dflash2(length: int) -> None:
    sampler = Sampler(SamplingParams(), 512)
    found = _at("dflash2", length).propose(IDS[length], sampler, 3, 7)
    ids, edges = (REFERENCE[f"dflash2.ctx{length}.{name}"] for name in ("ids", "edges"))
    assert found.edges is not None and found.tokens.shape == (7, 6)
    order = np.argsort(-edges[0, 0])
    assert found.tokens[0].tolist() == ids[0, order].tolist()
    assert (found.tokens[1:] == ids[1:]).all()
    edges[1] = edges[1, order]
    chances = edges - np.log(np.exp(edges).sum(axis=-1, keepdims=True))
    own = found.edges - np.log(np.exp(found.edges).sum(axis=-1, keepdims=True))
    np.testing.assert_allclose(own, chances[1:], atol=5e-4)
    first = found.log_probs[0] - np.log(np.exp(found.log_probs[0]).sum())
    np.testing.assert_allclose(first, chances[0, 0, order], atol=5e-4)


@pytest.mark.parametrize("length", [1, 30])
@pytest.mark.parametrize("kind", ["dspark", "dspark bonus"])
def test_the_chain_of_dspark(kind: str, length: int) -> None:
    """The greedy chain of the reference, with its chances; other parents by their own bias."""
    sampler, drafter = Sampler(SamplingParams(), 512), _at(kind, length)
    found = drafter.propose(IDS[length], sampler, 5, 8)
    tokens, logits = (REFERENCE[f"{kind}.ctx{length}.{name}"] for name in ("tokens", "logits"))
    assert found.tokens[:, 0].tolist() == tokens.tolist()
    assert found.edges is not None and len(found.tokens) == (7 if kind == "dspark bonus" else 8)
    chances = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    expected = np.take_along_axis(chances, found.tokens, axis=1)
    np.testing.assert_allclose(found.log_probs[0], expected[0], atol=5e-4)
    np.testing.assert_allclose(found.edges[:, 0], expected[1:], atol=5e-4)
    head = load_draft(
        open_checkpoint(make_draft(feature_layers=RELATIVE_LAYERS, relative=kind)),
        new_ops(exact=True, num_threads=1),
    ).head
    base = drafter.block_logits(IDS[length])[3]
    bias = head.before(found.tokens[2, 4:5])[0] @ head.after[found.tokens[3]].T  # type: ignore[union-attr]
    differences = found.edges[2, 4] - (base[found.tokens[3]] + bias)
    np.testing.assert_allclose(differences, differences[0], atol=1e-3)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize("kind", SELECTORS)
def test_a_selector_without_convolutions(kind: str, temperature: float) -> None:
    """The block is that of the draft without one; candidates are its best, scored in pairs, where
    as many are asked for as it scores.
    """
    drafter, sampling = _at(kind, 30), SamplingParams(temperature=temperature, seed=3)
    plain, sampler = _at("", 30, 8), Sampler(sampling, 512)
    logits = plain.block_logits(IDS[30], 7).copy()
    if drafter.draft_vocab is not None:
        logits = np.take(logits, drafter.draft_vocab, axis=1)
    assert np.array_equal(drafter.block_logits(IDS[30]), logits)
    few = drafter.propose(IDS[30], sampler, 5, 7)
    assert few.edges is None and few.tokens.shape == (7, 5)
    found = drafter.propose(IDS[30], sampler, 6, 7)
    ranked = sampler.rank(logits, 31, 6, drafter.draft_vocab)
    assert np.array_equal(few.tokens, ranked.tokens[:, :5])
    assert np.array_equal(found.tokens[1:], ranked.tokens[1:]) and found.edges is not None
    head, hidden = drafter._head, drafter._ops.read(drafter._projected, 8)[1:]
    table = {name: getattr(head, name).raw.view(np.float16) for name in ("before", "after")}
    row = found.tokens
    if kind == "listed selector":  # tokens of the text share the last row
        row = np.where(row % 2, 256, row // 2)
    corrections = table["before"][row[2, 4]] * hidden[3] @ table["after"][row[3]].T
    weights = LATER_WEIGHTS if temperature else FIRST_WEIGHTS
    scores = ranked.log_probs[3] + weights.logits * corrections
    expected = scores - np.log(np.exp(scores).sum()) + np.log(np.exp(ranked.log_probs[3]).sum())
    np.testing.assert_allclose(found.edges[2, 4], expected, atol=1e-4)


def test_large_tables_are_decoded_row_by_row(monkeypatch: pytest.MonkeyPatch) -> None:
    raw, tokens = random_raw(np.random.default_rng(3), QuantType.Q8_0, 40, 64), np.array([[7, 39]])
    table = TokenTable(raw, QuantType.Q8_0)
    rows = table(tokens)
    monkeypatch.setattr(token_table, "_SMALL", 0)
    large = TokenTable(raw, QuantType.Q8_0)
    assert np.array_equal(large(tokens), rows) and rows.shape == (1, 2, 64)
    assert table._decoded is not None and large._decoded is None


def test_tables_with_a_row_for_each_listed_token() -> None:
    raw = np.arange(4, dtype=np.float32)[:, None].view(np.uint8)
    table = TokenTable(raw, QuantType.F32, index_listed((2, 3, 7)))
    assert table(np.array([[2, 3, 7], [0, 4, 900]]))[..., 0].tolist() == [[0, 1, 2], [3, 3, 3]]


def _changed(
    kind: str, metadata: dict[str, object], cut: dict[str, int] | None = None
) -> Checkpoint:
    """With other metadata, and tables of fewer rows."""
    source, cut = open_checkpoint(make_draft(relative=kind)), cut or {}
    views = {name: source.raw(name)[: cut.get(name)] for name in source.tensors}
    tensors = dict(source.tensors)
    for name, num_rows in cut.items():
        tensors[name] = replace(tensors[name], shape=(num_rows, tensors[name].shape[1]))
    return Checkpoint(source.path, {**source.metadata, **metadata}, tensors, views)


@pytest.mark.parametrize(
    ("metadata", "cut"),
    [
        ({"dflash.head_tokens": [1, 2]}, None),
        ({"dflash.head_tokens": None}, None),
        ({}, {"selector_successor.weight": 256}),
    ],
)
def test_listed_tables_that_do_not_fit_are_refused(
    metadata: dict[str, object], cut: dict[str, int] | None
) -> None:
    with pytest.raises(CheckpointError, match="a row for each head token"):
        load_draft(_changed("listed selector", metadata, cut), new_ops(exact=True, num_threads=1))


def test_tokens_that_only_fill_the_vocabulary_up_do_not_compete() -> None:
    source = open_checkpoint(make_draft(feature_layers=RELATIVE_LAYERS, relative="dflash2"))
    metadata = {**source.metadata, "tokenizer.ggml.token_type": [1, 5, *[1] * 298, *[5] * 212]}
    views = {name: source.raw(name) for name in source.tensors}
    checkpoint = Checkpoint(source.path, metadata, source.tensors, views)
    drafter = _at("dflash2", 30)
    block = drafter.propose(7, Sampler(SamplingParams(), 512), 6, 7)
    assert block.tokens.max() >= 300, "nothing would be left out"
    drafter._head = load_draft(checkpoint, new_ops(exact=True, num_threads=1)).head
    try:
        for sampling in (SamplingParams(), SamplingParams(temperature=0.8, seed=2)):
            for bias in ((), ((505, 9.0), (3, 1.0))):  # a request may name such a token
                sampler = Sampler(sampling, 512, logit_bias=bias)
                found = drafter.propose(7, sampler, 6, 7)
                assert found.tokens.max() < 300 and np.isfinite(found.log_probs).all()
    finally:
        _drafter.cache_clear()


def test_a_table_shorter_than_the_vocabulary() -> None:
    """Files of one model may be filled up differently: the rest is not proposed."""
    rng, sampler = np.random.default_rng(4), Sampler(SamplingParams(), 512)
    raw = rng.standard_normal((400, 16)).astype(np.float32)
    table = TokenTable(raw.view(np.uint8).reshape(400, -1), QuantType.F32)
    logits = rng.standard_normal((5, 512)).astype(np.float32)
    block = BlockOutput(511, 9, logits, None, None)
    found = MarkovHead(table, raw).rank(sampler, block, 6)
    assert found.tokens.max() < 400
    assert (table(np.array([399, 511])) == raw[399]).all()
    columns = np.array([450, 3, 399, 7, 400, 8])  # a text may hold tokens that a table lacks
    block = block._replace(logits=logits[:, : len(columns)].copy(), tokens=columns)
    longer = MarkovHead(table, np.concatenate([raw, raw[-1:].repeat(51, axis=0)]))
    found, expected = (head.rank(sampler, block, 6) for head in (MarkovHead(table, raw), longer))
    assert np.array_equal(found.tokens, expected.tokens)
    assert np.array_equal(found.edges, expected.edges)


@pytest.mark.parametrize("kind", [*RELATIVES, *SELECTORS])
def test_what_a_device_can_run_alone(kind: str) -> None:
    """A Markov head's candidates follow the choice before, one position after another."""
    programs = _drafter(kind).programs()
    assert (programs is None) == kind.startswith("dspark")
    assert (programs is not None and programs.pairs is not None) == (
        kind == "dflash2" or kind in SELECTORS
    )


def test_more_candidates_than_a_device_ranks_are_left_to_the_host() -> None:
    head = load_draft(
        _changed("selector", {"dflash.selector_top_k": 65}), new_ops(exact=True, num_threads=1)
    ).head
    assert head is not None and head.pair_scores(np.zeros((7, 16), np.float32)) is None


def test_rows_of_a_causal_block_do_not_see_later_ones() -> None:
    """A shorter block gives the same; inside a bidirectional one it would not."""
    longer = _at("jetspec", 30).block_logits(7).copy()
    assert np.array_equal(_at("jetspec", 30).block_logits(7, 3), longer[:3])
    longer = _at("dspark bonus", 30).block_logits(7).copy()
    assert not np.allclose(_at("dspark bonus", 30).block_logits(7, 3), longer[:3])


@pytest.mark.parametrize("kind", ["dflash2", "dspark", "jetspec"])
def test_a_gpu_drafts_the_same(kind: str, any_gpu: "Gpu") -> None:
    from tests.cuda import CudaPlace, relative_error

    place = CudaPlace(any_gpu)
    target = place.open_target(tiny_path("qwen35-mtp"))
    path = make_draft(feature_layers=RELATIVE_LAYERS, relative=kind)
    drafter = place.open_drafter(path, target)
    drafter.extend_context(place.new_ops().constant(REFERENCE["features"][:30]))
    expected = _at(kind, 30)
    rows = expected.block_logits(IDS[30])
    assert relative_error(drafter.block_logits(IDS[30]), rows) < 0.02
    if kind == "dflash2":
        pair = (each._ops.read(each._projected, 8) for each in (drafter, expected))
        assert relative_error(*pair) < 0.02
