"""Passes set up on the device: trees node for node those of decode/tree.py, and the small plans."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.core import TokenSource  # noqa: E402
from draftree.decode.tree import RankedTree  # noqa: E402
from draftree.decode.tree import build_tree as build_on_host  # noqa: E402
from draftree.drafts.drafter import Proposal  # noqa: E402
from draftree.drafts.lookup import LookupIndex  # noqa: E402
from draftree.kernels.cpu.sampling import SamplingArgs  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.lookup import DeviceText, find_match  # noqa: E402
from draftree.kernels.cuda.pass_args import (  # noqa: E402
    COMMITTED,
    FIRST,
    IS_TREE,
    NUM_ROWS,
    NUM_TOKENS,
    PATH_LEN,
    CudaPassArgs,
)
from draftree.kernels.cuda.request import Param, RequestParams  # noqa: E402
from draftree.kernels.cuda.tree import (  # noqa: E402
    TreeBuffer,
    advance,
    build_tree,
    plan_block,
    plan_context,
    plan_plain,
    plan_tree,
)

ANCHOR, VOCAB = 77, 5000
PER_NODE = ("tokens", "positions", "parents", "depths", "order", "rows")


def request(
    gpu: Gpu, budget: int = 0, tokens_left: int = 1000, max_ctx: int = 10_000
) -> RequestParams:
    params = RequestParams(gpu, VOCAB)
    limits = {"tokens_left": tokens_left, "max_ctx": max_ctx, "budget": budget}
    params.start(SamplingArgs(temperature=0.0), 0, anchor=ANCHOR, **limits)
    return params


def made_block(
    rng: np.random.Generator, num_positions: int, num_candidates: int, steps: int = 0
) -> Proposal:
    """steps: log-probabilities are multiples of 1 / steps, so that many paths cost the same."""
    rows = [rng.choice(VOCAB, num_candidates, replace=False) for _ in range(num_positions)]
    logits = rng.standard_normal((num_positions, num_candidates)) * rng.uniform(0.5, 5)
    log_probs = -np.sort(np.logaddexp(0, -logits), axis=1)
    if steps:
        log_probs = np.round(log_probs * steps) / steps
    return Proposal(np.stack(rows), log_probs.astype(np.float32))


def build_on(
    gpu: Gpu,
    block: Proposal,
    params: RequestParams,
    committed: int = 0,
    step: CudaPassArgs | None = None,
    text: DeviceText | None = None,
) -> CudaPassArgs:
    step = step or CudaPassArgs(64, 64, gpu)
    step.set_idle(committed)
    ids = torch.tensor(block.tokens, dtype=torch.int32, device=gpu.place)
    log_probs = torch.tensor(block.log_probs, device=gpu.place)
    build_tree(ids, log_probs, params, step, gpu, text)
    return step


def same_tree(gpu: Gpu, step: CudaPassArgs, ranked: RankedTree, committed: int) -> None:
    """All params of the step are those that the host would have uploaded."""
    tree, wanted = ranked.tree, CudaPassArgs(64, 64, gpu)
    arrays = (np.array(part) for part in (tree.tokens, tree.parents, tree.depths))
    wanted.set_tree(*arrays, committed)
    wanted.set_rows(np.arange(tree.num_nodes))
    assert step.control.tolist() == wanted.control.tolist()
    for name in PER_NODE:
        ours, theirs = getattr(step, name), getattr(wanted, name)
        assert ours[: tree.num_nodes].tolist() == theirs[: tree.num_nodes].tolist(), name
    for node, depth in enumerate(tree.depths):
        assert torch.equal(step.ancestors[node, : depth + 1], wanted.ancestors[node, : depth + 1])


@pytest.mark.parametrize("steps", [0, 1, 4])
def test_trees_are_those_of_the_host(any_gpu: Gpu, steps: int) -> None:
    rng = np.random.default_rng(steps)
    step = CudaPassArgs(64, 64, any_gpu)
    for case in range(150):
        budget = case % 63 + 1
        num_positions, num_candidates = rng.integers(1, 20), rng.integers(1, 33)
        block = made_block(rng, num_positions, num_candidates, steps)
        params, committed = request(any_gpu, budget), int(rng.integers(0, 500))
        build_on(any_gpu, block, params, committed, step)
        room = Proposal(block.tokens[:budget], block.log_probs[:budget])
        same_tree(any_gpu, step, build_on_host(ANCHOR, room, budget), committed)


@pytest.mark.parametrize("steps", [0, 1])
def test_trees_with_looked_up_text(any_gpu: Gpu, steps: int) -> None:
    """It shares nodes with the chain, or with lower choices, or none."""
    rng, num_shared = np.random.default_rng(steps), 0
    step, text = CudaPassArgs(64, 64, any_gpu), DeviceText(999, any_gpu)
    for case in range(150):
        budget = case % 63 + 1
        num_positions, num_candidates = rng.integers(1, 20), rng.integers(1, 9)
        block = made_block(rng, num_positions, num_candidates, steps)
        length = int(rng.integers(1, 15))
        looked = rng.integers(0, VOCAB, length)
        for depth in range(min(length, int(rng.integers(0, 12)), num_positions)):
            looked[depth] = block.tokens[
                depth, int(rng.integers(num_candidates)) if case % 2 else 0
            ]
        params, committed = request(any_gpu, budget), int(rng.integers(50, 500))
        text.start([1] * (committed + 1 - length) + looked.tolist())
        text.match[0] = 4 << 32 | (committed + 1 - length)
        build_on(any_gpu, block, params, committed, step, text)
        room = Proposal(block.tokens[:budget], block.log_probs[:budget])
        ranked = build_on_host(ANCHOR, room, budget, lookup=looked.tolist()[: min(10, budget)])
        same_tree(any_gpu, step, ranked, committed)
        num_looked = ranked.tree.sources.count(TokenSource.NGRAM)
        assert params.device[Param.NUM_LOOKED] == num_looked and text.match[0] == 0
        num_shared += ranked.tree.parents[num_looked + 1 :].count(num_looked) > 0
        text.match[0] = 4 << 32 | (committed + 1 - length)
        params.set_looked_limit(2)
        build_on(any_gpu, block, params, committed, step, text)
        ranked = build_on_host(ANCHOR, room, budget, lookup=looked.tolist()[: min(2, budget)])
        same_tree(any_gpu, step, ranked, committed)
    assert num_shared > 10


@pytest.mark.parametrize("num_kinds", [2, 5, 40])
def test_matches_are_those_of_the_index(any_gpu: Gpu, num_kinds: int) -> None:
    rng, text, step = (
        np.random.default_rng(3),
        DeviceText(5000, any_gpu),
        CudaPassArgs(8, 8, any_gpu),
    )
    params, found = request(any_gpu), 0
    for length in (1, 3, 4, 5, 9, 30, 500, 4000):
        tokens = rng.integers(0, num_kinds, length).tolist()
        text.start(tokens)
        text.match.zero_()
        step.set_idle(length - 1)
        find_match(text, step, params, any_gpu)
        index = LookupIndex()
        index.extend(tokens)
        looked, match_len = index.propose(10)
        match, start = divmod(int(text.match[0]), 2**32)
        assert match == (match_len if match_len >= 4 else 0)
        assert match == 0 or tuple(tokens[start : start + 10]) == looked
        found += match > 0
    assert found > 1 or num_kinds == 40


def test_a_block_as_large_as_can_be(any_gpu: Gpu) -> None:
    block = made_block(np.random.default_rng(1), 63, 64)
    step = build_on(any_gpu, block, request(any_gpu, 63))
    same_tree(any_gpu, step, build_on_host(ANCHOR, block, 63), 0)


@pytest.mark.parametrize(
    ("tokens_left", "committed", "num_positions"),
    [(1000, 0, 12), (6, 0, 5), (2, 0, 1), (1, 0, 0), (1000, 995, 4), (1000, 999, 0), (3, 998, 1)],
)
def test_depth_ends_with_the_request_and_the_context(
    any_gpu: Gpu, tokens_left: int, committed: int, num_positions: int
) -> None:
    block = made_block(np.random.default_rng(2), 12, 8)
    params = request(any_gpu, 22, tokens_left, max_ctx=1000)
    step = build_on(any_gpu, block, params, committed)
    room = Proposal(block.tokens[:num_positions], block.log_probs[:num_positions])
    ranked = build_on_host(ANCHOR, room if num_positions else None, 22)
    same_tree(any_gpu, step, ranked, committed)


def test_a_tree_is_not_larger_than_the_step(any_gpu: Gpu) -> None:
    block = made_block(np.random.default_rng(3), 12, 8)
    step = build_on(any_gpu, block, request(any_gpu, 63), step=CudaPassArgs(8, 8, any_gpu))
    tree = build_on_host(ANCHOR, Proposal(block.tokens[:7], block.log_probs[:7]), 7).tree
    assert step.tokens.tolist() == list(tree.tokens)
    assert step.parents.tolist() == list(tree.parents)


def test_a_block_too_large_is_refused(any_gpu: Gpu) -> None:
    step, params = CudaPassArgs(64, 64, any_gpu), request(any_gpu, 4)
    for shape in [(64, 4), (4, 65)]:
        ids = torch.zeros(shape, dtype=torch.int32, device=any_gpu.place)
        with pytest.raises(ValueError, match="too large"):
            build_tree(ids, ids.float(), params, step, any_gpu)


def test_plain_step(any_gpu: Gpu) -> None:
    step = CudaPassArgs(8, 8, any_gpu)
    step.set_idle(committed=40)
    plan_plain(request(any_gpu), step, any_gpu)
    control = step.control.tolist()
    assert [control[i] for i in (NUM_TOKENS, COMMITTED, IS_TREE, NUM_ROWS)] == [1, 40, 0, 1]
    assert (step.tokens[0], step.positions[0], step.rows[0]) == (ANCHOR, 40, 0)


def test_the_first_position_stays_until_it_is_set_again(any_gpu: Gpu) -> None:
    step = CudaPassArgs(8, 8, any_gpu)
    assert step.word(FIRST).item() == 0
    step.set_first(7)
    step.set_idle(committed=40)
    plan_block(request(any_gpu), step, 999, 4, any_gpu)
    assert step.word(FIRST).item() == 7
    step.set_chain((1, 2), 41)
    assert step.word(FIRST).item() == 7
    step.set_first(0)
    assert step.word(FIRST).item() == 0


def test_draft_block(any_gpu: Gpu) -> None:
    step = CudaPassArgs(100, 80, any_gpu)
    step.set_idle(committed=31)
    plan_block(request(any_gpu), step, 999, 70, any_gpu)
    control = step.control.tolist()
    assert [control[i] for i in (NUM_TOKENS, COMMITTED, IS_TREE, NUM_ROWS)] == [70, 31, 0, 69]
    assert step.tokens[:71].tolist() == [ANCHOR, *[999] * 69, 0]
    assert step.positions[:70].tolist() == list(range(31, 101))
    assert step.rows[:70].tolist() == [*range(1, 70), 0]
    with pytest.raises(ValueError, match="does not fit"):
        plan_block(request(any_gpu), step, 999, 82, any_gpu)


def test_draft_context_and_advance(any_gpu: Gpu) -> None:
    step, draft_step = CudaPassArgs(8, 8, any_gpu), CudaPassArgs(16, 8, any_gpu)
    step.set_tree(np.array([5, 6, 7, 8]), np.array([-1, 0, 0, 2]), np.array([0, 1, 1, 2]), 20)
    step.set_path(np.array([0, 2, 3]))
    draft_step.set_idle(committed=12)
    plan_context(step, draft_step, any_gpu)
    control = draft_step.control.tolist()
    params = [control[i] for i in (NUM_TOKENS, COMMITTED, IS_TREE, NUM_ROWS)]
    assert params == [3, 12, 0, 0]
    assert draft_step.tokens[:4].tolist() == [5, 7, 8, 0]
    assert draft_step.positions[:3].tolist() == [12, 13, 14]
    for advanced, committed in ((step, 23), (draft_step, 15)):
        for _ in range(2):  # the second time there is nothing to add
            advance(advanced, any_gpu)
            assert advanced.control[COMMITTED] == committed
            assert advanced.control[PATH_LEN] == 0


def test_after_the_end_passes_are_empty(any_gpu: Gpu) -> None:
    params = request(any_gpu, 22)
    params.stop()
    block = made_block(np.random.default_rng(4), 12, 8)
    step = build_on(any_gpu, block, params, committed=9)
    assert step.control[:5].tolist() == [0, 9, 1, 0, 0]
    step.set_path(np.array([0]))
    plan_plain(params, step, any_gpu)
    assert step.control[:5].tolist() == [0, 9, 0, 0, 0]
    step.set_path(np.array([0]))
    plan_block(params, step, 999, 16, any_gpu)
    assert step.control[:5].tolist() == [0, 9, 0, 0, 0]


def test_nothing_runs_before_a_request(any_gpu: Gpu) -> None:
    step = CudaPassArgs(8, 8, any_gpu)
    plan_plain(RequestParams(any_gpu, VOCAB), step, any_gpu)
    assert step.control[NUM_TOKENS] == 0


def test_the_host_gets_a_tree_to_choose_from(any_gpu: Gpu) -> None:
    """Its first nodes are those of any budget, and it is as deep as the request allows."""
    rng = np.random.default_rng(5)
    for budget, tokens_left in ((3, 1000), (22, 1000), (22, 4)):
        block = made_block(rng, 12, 8)
        drafted, step = TreeBuffer(any_gpu), CudaPassArgs(24, 24, any_gpu)
        step.set_idle(committed=9)
        before = [step.control.tolist(), step.tokens.tolist()]
        ids = torch.tensor(block.tokens, dtype=torch.int32, device=any_gpu.place)
        log_probs = torch.tensor(block.log_probs, device=any_gpu.place)
        params = request(any_gpu, budget, tokens_left)
        build_tree(ids, log_probs, params, step, any_gpu, drafted=drafted)
        _wait(any_gpu)
        room = min(budget, tokens_left - 1)
        block = Proposal(block.tokens[:room, :budget], block.log_probs[:room, :budget])
        tree = build_on_host(ANCHOR, block, 63).tree
        assert drafted.read() == (list(tree.tokens), list(tree.parents))
        assert [step.control.tolist(), step.tokens.tolist()] == before
        params.stop()
        build_tree(ids, log_probs, params, step, any_gpu, drafted=drafted)
        _wait(any_gpu)
        assert drafted.read() == ([], [])


def test_a_pass_over_a_tree_of_the_host(any_gpu: Gpu) -> None:
    rng, given, step = (
        np.random.default_rng(6),
        TreeBuffer(any_gpu),
        CudaPassArgs(64, 64, any_gpu),
    )
    params = request(any_gpu)
    for budget in (0, 1, 9, 63):
        ranked = build_on_host(ANCHOR, made_block(rng, 12, 8), budget)
        given.write(ranked.tree.tokens, ranked.tree.parents)
        step.set_idle(committed=30)
        plan_tree(given, params, step, any_gpu)
        same_tree(any_gpu, step, ranked, 30)
    params.stop()
    plan_tree(given, params, step, any_gpu)
    assert step.control[:5].tolist() == [0, 30, 1, 0, 0]


def _wait(gpu: Gpu) -> None:
    if gpu.is_real:
        torch.cuda.synchronize()
