"""Candidates scored after each candidate before them, against the host's ranking; trees over them
node for node those of decode/tree.py.
"""

from collections.abc import Callable

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import gguf
import torch
from hypothesis import given
from hypothesis import strategies as st

from draftree.core import SamplingParams, TokenSource
from draftree.decode.sampler import LATER_WEIGHTS, Sampler
from draftree.decode.tree import build_tree as build_on_host
from draftree.drafts.dflash_head import BlockOutput, Selector
from draftree.drafts.drafter import Proposal
from draftree.drafts.token_table import TokenTable, index_listed
from draftree.kernels.cpu.sampling import SamplingArgs
from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.edges import Edges, new_edges, score_edges
from draftree.kernels.cuda.lookup import DeviceText
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.request import Param, RequestParams
from draftree.kernels.cuda.store import WeightStore
from draftree.kernels.cuda.tree import TreeBuffer, build_tree
from draftree.kernels.quant.formats import QuantType
from tests.examples import examples
from tests.kernels.test_cuda_tree import ANCHOR, VOCAB, made_block, request, same_tree

RANK = 64
LISTED = tuple(range(3, VOCAB, 7))


def table_of(rng: np.random.Generator, kind: str, row_of: np.ndarray | None) -> TokenTable:
    qtype = gguf.GGMLQuantizationType[kind]
    num_rows = VOCAB if row_of is None else len(LISTED) + 1
    values = rng.standard_normal((num_rows, RANK)).astype(np.float32)
    raw = gguf.quants.quantize(values, qtype).view(np.uint8)
    return TokenTable(raw.reshape(num_rows, -1), QuantType[kind], row_of)


def scored_on(
    gpu: Gpu,
    ranked: Proposal,
    tables: tuple[TokenTable, TokenTable],
    hidden: np.ndarray,
    temperature: float,
    num_live: int,
) -> Edges:
    num_positions, count = ranked.tokens.shape
    params, draft_step = RequestParams(gpu, VOCAB), CudaPassArgs(64, 64, gpu)
    params.start(SamplingArgs(temperature), 0, anchor=ANCHOR, tokens_left=9, max_ctx=99)
    draft_step.set_rows(range(num_live))
    ids = torch.tensor(ranked.tokens, dtype=torch.int32, device=gpu.place)
    log_probs, edges = torch.tensor(ranked.log_probs, device=gpu.place), new_edges(20, count, gpu)
    edges = Edges(*(part[:num_positions] for part in edges))
    edges.picks.fill_(255)
    wide = torch.full((num_positions + 1, RANK + 4), 1e9, device=gpu.place)
    wide[:num_positions, :RANK] = torch.from_numpy(hidden)
    raw = [(table.raw, table.qtype) for table in tables]
    pairs = WeightStore(gpu).pair_tables(*raw, tables[0].row_of, wide[:, :RANK])
    score_edges(ids, log_probs, pairs, edges, params, draft_step, gpu, LATER_WEIGHTS.logits)
    return Edges(edges.log_probs.cpu(), edges.picks.cpu())


@pytest.mark.parametrize("temperature", [0.0, 0.7])
@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0", "Q4_1", "F32, Q8_0"])
def test_edges_are_those_of_the_host(any_gpu: Gpu, kind: str, temperature: float) -> None:
    """Of a table with a row for every token, or for some; the last row is not live."""
    rng, kinds = np.random.default_rng(3), kind.split(", ")
    error = 2e-5 if len(kinds) == 1 else 3e-3  # of 16-bit floats
    sampler = Sampler(SamplingParams(temperature=temperature, seed=5), VOCAB)
    for count, row_of in ((16, None), (6, index_listed(LISTED)), (1, None)):
        tables = table_of(rng, kinds[0], row_of), table_of(rng, kinds[-1], row_of)
        hidden = rng.standard_normal((7, RANK)).astype(np.float32) / 8
        logits = 3 * rng.standard_normal((7, VOCAB)).astype(np.float32)
        head = Selector(*tables, None, count, VOCAB)
        wanted = head.rank(sampler, BlockOutput(ANCHOR, 9, logits, None, hidden), 3)
        ranked = sampler.rank(logits, 9, count)
        found = scored_on(any_gpu, ranked, tables, hidden, temperature, num_live=6)
        assert (found.picks[6] == 255).all() and (found.picks[0, 1:] == 255).all()
        first = found.picks[0, 0].long().numpy()
        assert ranked.tokens[0, first].tolist() == wanted.tokens[0].tolist()
        np.testing.assert_allclose(found.log_probs[0, 0], wanted.log_probs[0], atol=error)
        assert wanted.edges is not None
        for position in range(1, 6):
            picks = found.picks[position].long().numpy()
            parents = first if position == 1 else np.arange(count)
            for place, parent in enumerate(parents):
                own = wanted.edges[position - 1, place]
                values = found.log_probs[position, parent].numpy()
                np.testing.assert_allclose(values, own[picks[parent]], atol=error)
                assert sorted(picks[parent].tolist()) == list(range(count))
                assert (np.diff(values) <= 0).all()


def test_equal_edges_stay_in_order(any_gpu: Gpu) -> None:
    rng = np.random.default_rng(4)
    zeros = TokenTable(np.zeros((VOCAB, RANK), np.float32).view(np.uint8), QuantType.F32)
    ids = np.stack([rng.choice(VOCAB, 8, replace=False) for _ in range(3)])
    ranked = Proposal(ids, np.full((3, 8), -np.log(8), np.float32))
    hidden = np.ones((3, RANK), np.float32)
    found = scored_on(any_gpu, ranked, (zeros, zeros), hidden, 0.0, num_live=3)
    assert (found.picks[1:] == torch.arange(8)).all()
    np.testing.assert_allclose(found.log_probs[1:], -np.log(8), atol=1e-6)


def test_what_does_not_fit_is_refused(any_gpu: Gpu) -> None:
    rng = np.random.default_rng(5)
    table, half = table_of(rng, "F16", None), table_of(rng, "F16", None)
    half = TokenTable(np.ascontiguousarray(half.raw[:, :RANK]), half.qtype)
    block, hidden = made_block(rng, 4, 8), np.ones((4, RANK), np.float32)
    with pytest.raises(ValueError, match="values"):
        scored_on(any_gpu, block, (table, half), hidden, 0.0, num_live=4)
    step, edges = CudaPassArgs(64, 64, any_gpu), new_edges(4, 6, any_gpu)
    ids = torch.tensor(block.tokens, dtype=torch.int32, device=any_gpu.place)
    args = ids, torch.tensor(block.log_probs, device=any_gpu.place)
    with pytest.raises(ValueError, match="not those of the candidates"):
        build_tree(*args, request(any_gpu, 4), step, any_gpu, edges=edges)


def edged(gpu: Gpu, block: Proposal, scores: np.ndarray) -> tuple[Edges, Proposal]:
    """scores [positions, parents, candidates] as the device has them and as the host does."""
    order = np.argsort(-scores, axis=-1, kind="stable")
    edges = new_edges(*scores.shape[:2], gpu)
    edges.log_probs.copy_(torch.from_numpy(np.take_along_axis(scores, order, axis=-1)))
    edges.picks.copy_(torch.from_numpy(order))
    tokens, log_probs, first = block.tokens.copy(), block.log_probs.copy(), order[0, 0]
    tokens[0], log_probs[0], rest = tokens[0, first], scores[0, 0, first], scores[1:].copy()
    rest[:1] = rest[:1, first]
    return edges, Proposal(tokens, log_probs, rest)


def made_edges(
    rng: np.random.Generator, num_positions: int, num_candidates: int, steps: int
) -> tuple[Proposal, np.ndarray]:
    """steps: log-probabilities are multiples of 1 / steps, so that many paths cost the same."""
    block = made_block(rng, num_positions, num_candidates, steps)
    shape = num_positions, num_candidates, num_candidates
    scores = -np.abs(rng.standard_normal(shape) * rng.uniform(0.5, 5)).astype(np.float32)
    return block, np.round(scores * steps) / np.float32(steps) if steps else scores


def looked_up(rng: np.random.Generator, proposal: Proposal, length: int) -> list[int]:
    """Text that goes with the first choices for a while, or with others, or with none."""
    looked = rng.integers(0, VOCAB, length)
    for depth in range(min(length, int(rng.integers(0, 12)), len(proposal.tokens))):
        looked[depth] = rng.choice(proposal.tokens[depth])
    chain = build_on_host(ANCHOR, proposal, length).tree
    if rng.random() < 0.7:
        count = int(rng.integers(0, length + 1))
        looked[:count] = [*chain.tokens[1:], *looked[chain.num_nodes - 1 :]][:count]
    return looked.tolist()


Case = tuple[np.random.Generator, int, int, int, int]
CASES = st.tuples(
    st.integers(0, 2**32 - 1).map(np.random.default_rng),
    st.integers(1, 63),  # budget
    st.integers(1, 19),  # positions
    st.integers(1, 22),  # candidates
    st.sampled_from((0, 1, 4)),  # steps
)


@pytest.fixture
def grow(any_gpu: Gpu) -> Callable[[Case, bool], None]:
    """Builds a case's tree on both sides and compares; text is looked up, or none."""
    step, text = CudaPassArgs(64, 64, any_gpu), DeviceText(999, any_gpu)

    def check(case: Case, has_lookup: bool) -> None:
        rng, budget, num_positions, num_candidates, steps = case
        block, scores = made_edges(rng, num_positions, num_candidates, steps)
        edges, proposal = edged(any_gpu, block, scores)
        params, committed = request(any_gpu, budget), int(rng.integers(50, 500))
        looked = looked_up(rng, proposal, int(rng.integers(1, 15))) if has_lookup else []
        if has_lookup:
            start = committed + 1 - len(looked)
            text.start([1] * start + looked)
            text.match[0] = 4 << 32 | start
        step.set_idle(committed)
        ids = torch.tensor(block.tokens, dtype=torch.int32, device=any_gpu.place)
        args = ids, torch.tensor(block.log_probs, device=any_gpu.place), params, step, any_gpu
        build_tree(*args, text if has_lookup else None, edges=edges)
        room = proposal.first(budget)
        ranked = build_on_host(ANCHOR, room, budget, lookup=looked[: min(10, budget)])
        same_tree(any_gpu, step, ranked, committed)
        num_looked = ranked.tree.sources.count(TokenSource.NGRAM)
        assert params.device[Param.NUM_LOOKED] == num_looked

    return check


def test_trees_are_those_of_the_host(grow: Callable[[Case, bool], None]) -> None:
    @given(CASES, st.booleans())
    @examples(300)
    def check(case: Case, has_lookup: bool) -> None:
        grow(case, has_lookup)

    check()


def test_edges_that_stay_where_they_are(any_gpu: Gpu) -> None:
    """More than fit beside a tree that grows."""
    block, scores = made_edges(np.random.default_rng(6), 12, 40, 4)
    edges, proposal = edged(any_gpu, block, scores)
    step, params = CudaPassArgs(64, 64, any_gpu), request(any_gpu, 63)
    step.set_idle(9)
    ids = torch.tensor(block.tokens, dtype=torch.int32, device=any_gpu.place)
    args = ids, torch.tensor(block.log_probs, device=any_gpu.place)
    build_tree(*args, params, step, any_gpu, edges=edges)
    same_tree(any_gpu, step, build_on_host(ANCHOR, proposal, 63), 9)


def test_the_host_gets_a_tree_to_choose_from(any_gpu: Gpu) -> None:
    rng = np.random.default_rng(7)
    for budget, tokens_left in ((3, 1000), (22, 1000), (22, 4)):
        block, scores = made_edges(rng, 12, 8, 0)
        edges, proposal = edged(any_gpu, block, scores)
        drafted, step = TreeBuffer(any_gpu), CudaPassArgs(24, 24, any_gpu)
        step.set_idle(committed=9)
        ids = torch.tensor(block.tokens, dtype=torch.int32, device=any_gpu.place)
        args = ids, torch.tensor(block.log_probs, device=any_gpu.place)
        params = request(any_gpu, budget, tokens_left)
        build_tree(*args, params, step, any_gpu, drafted=drafted, edges=edges)
        if any_gpu.is_real:
            torch.cuda.synchronize()
        wanted = build_from_few(proposal.first(min(budget, tokens_left - 1)), budget)
        assert drafted.read() == wanted


def build_from_few(proposal: Proposal, num_best: int) -> tuple[list[int], list[int]]:
    """The host's tree of 63 nodes when each parent has its best children alone."""
    tree = build_on_host(ANCHOR, proposal, 63).tree
    if num_best >= proposal.tokens.shape[1]:
        return list(tree.tokens), list(tree.parents)
    edges, log_probs = proposal.edges, proposal.log_probs.copy()
    assert edges is not None
    log_probs[0, num_best:] = -1e6  # a node with one of these comes after all others
    floor = np.sort(edges, axis=-1)[..., -num_best:][..., :1]
    cut = Proposal(proposal.tokens, log_probs, np.where(edges < floor, np.float32(-1e6), edges))
    tree = build_on_host(ANCHOR, cut, 63).tree
    ranked = build_on_host(ANCHOR, cut, 63)
    count = sum(value > -1e5 for value in ranked.path_log_probs) + 1
    return list(tree.tokens[:count]), list(tree.parents[:count])
