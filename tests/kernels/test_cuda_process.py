"""Bias, penalties, masks and log-probabilities on the device against the CPU's sampler."""

from collections import Counter

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.core import DraftTree, SamplingParams, TokenScores  # noqa: E402
from draftree.decode.sampler import Sampler  # noqa: E402
from draftree.kernels.cpu.sampling import SamplingArgs  # noqa: E402
from draftree.kernels.cpu.select import forbid, penalize  # noqa: E402
from draftree.kernels.cuda.accept import RoundRing, accept  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.pass_args import CudaPassArgs  # noqa: E402
from draftree.kernels.cuda.process import TreeMasks, process  # noqa: E402
from draftree.kernels.cuda.request import SEEN, RequestParams  # noqa: E402
from draftree.kernels.cuda.sampling import new_sampling_workspace  # noqa: E402
from draftree.kernels.cuda.scores import ScoreRing, score  # noqa: E402
from tests.kernels.test_cuda_accept import device_ints, made_tree, set_tree  # noqa: E402
from tests.kernels.test_cuda_sampling import made_logits, on  # noqa: E402

VOCAB = 20_003
BIAS = ((3, 2.0), (17, -100.0), (9, 0.1), (VOCAB - 1, 1.5))
PROMPT = (5, 9, 9, 11, 8_500, VOCAB - 1)
PENALTIES = (1.3, 0.7, 0.21)


def start(gpu: Gpu, penalties: tuple[float, ...], **options) -> RequestParams:
    params = RequestParams(gpu, VOCAB)
    filters = SamplingArgs(0.0, 0, 1.0, 0.0, *penalties)
    limits = {"anchor": 3, "tokens_left": 99, "max_ctx": 999}
    params.start(filters, 0, **limits, prompt_ids=PROMPT, **options)
    return params


def path_to(tree: DraftTree, node: int) -> list[int]:
    """Tokens on the way from the root, without it."""
    path = []
    while node > 0:
        path.append(tree.tokens[node])
        node = tree.parents[node]
    return path[::-1]


def penalized(row: np.ndarray, reply: list[int], penalties: tuple[float, ...]) -> np.ndarray:
    seen = dict.fromkeys(PROMPT, 0) | Counter(reply)
    row = row.copy()
    tokens, counts = (np.array(part, dtype=np.int64) for part in (list(seen), list(seen.values())))
    penalize(row, tokens, counts, *penalties)
    return row


def biased(row: np.ndarray) -> np.ndarray:
    row = row.copy()
    for token, value in BIAS:
        row[token] += np.float32(value)
    return row


def step_of(gpu: Gpu, tree: DraftTree) -> CudaPassArgs:
    step = CudaPassArgs(64, 64, gpu)
    set_tree(step, tree, 50)
    step.set_rows(np.arange(tree.num_nodes))
    return step


@pytest.mark.parametrize("use_bias", [False, True])
def test_each_node_sees_its_own_text(any_gpu: Gpu, use_bias: bool) -> None:
    """Over rounds: what is accepted counts for all nodes of the next tree."""
    rng = np.random.default_rng(1)
    params = start(any_gpu, PENALTIES, logit_bias=BIAS if use_bias else ())
    ring, reply = RoundRing(8, any_gpu), []
    for number in range(1, 4):
        tree = made_tree(rng, 20)  # of few different tokens: most of them repeat
        step, logits = step_of(any_gpu, tree), made_logits(20, VOCAB, seed=number)
        rows = on(any_gpu, logits)
        process(rows, step, params, any_gpu, use_counts=True)
        found = rows.cpu().numpy()
        for node in range(tree.num_nodes):
            row = biased(logits[node]) if use_bias else logits[node]
            expected = penalized(row, [*reply, *path_to(tree, node)], PENALTIES)
            assert np.array_equal(found[node], expected), node
        chosen = [
            next((t for t, p in zip(tree.tokens, tree.parents, strict=True) if p == n), 7)
            for n in range(20)
        ]
        accept(device_ints(any_gpu, chosen), params, step, ring, any_gpu, use_counts=True)
        if any_gpu.is_real:
            torch.cuda.synchronize()
        record = ring.read(number)
        assert record is not None and len(record.path) > 1
        reply += record.emitted
    counts = params.counts.cpu().numpy()
    assert {t: c - SEEN for t, c in enumerate(counts.tolist()) if c} == dict.fromkeys(
        PROMPT, 0
    ) | Counter(reply)


def test_a_new_request_begins_without_counts_and_bias(any_gpu: Gpu) -> None:
    params = start(any_gpu, PENALTIES, logit_bias=BIAS)
    filters, limits = SamplingArgs(0.0, presence_penalty=1.0), {"anchor": 3, "tokens_left": 9}
    params.start(filters, 0, **limits, max_ctx=99, prompt_ids=(2,))
    logits = made_logits(1, VOCAB)
    rows = on(any_gpu, logits)
    process(rows, step_of(any_gpu, DraftTree.chain([1])), params, any_gpu, use_counts=True)
    assert np.array_equal(rows.cpu().numpy(), logits)  # a prompt's tokens are not in the reply
    assert params.counts.nonzero().flatten().tolist() == [2]


def test_a_draft_sees_what_is_written_so_far(any_gpu: Gpu) -> None:
    params, logits = start(any_gpu, PENALTIES, logit_bias=BIAS), made_logits(4, VOCAB)
    rows, step = on(any_gpu, logits), step_of(any_gpu, DraftTree.chain([1, 2, 3]))
    process(rows, step, params, any_gpu, use_counts=True, has_nodes=False)
    live = [penalized(biased(row), [], PENALTIES) for row in logits[:3]]
    assert np.array_equal(rows.cpu().numpy(), np.stack([*live, logits[3]]))  # the last is not live


def test_masks_forbid_tokens(any_gpu: Gpu) -> None:
    rng, masks = np.random.default_rng(2), TreeMasks(8, VOCAB, any_gpu)
    params, logits = start(any_gpu, PENALTIES), made_logits(3, VOCAB)
    masks.rows[:] = rng.integers(0, 2**32, masks.rows.shape, dtype=np.uint32)
    masks.rows[1, 7:9], masks.rows[2, 3] = 0, 0xFFFFFFFF
    masks.upload(3)
    rows, step = on(any_gpu, logits), step_of(any_gpu, DraftTree((1, 9, 4), (-1, 0, 0), (0, 1, 1)))
    process(rows, step, params, any_gpu, use_counts=True, masks=masks)
    for node, reply in enumerate(((), (9,), (4,))):
        row = penalized(logits[node], list(reply), PENALTIES)
        forbid(row, masks.rows[node, :-1].copy())
        assert np.array_equal(rows[node].cpu().numpy(), row)


def test_what_completes_a_grammar_ends_the_path(any_gpu: Gpu) -> None:
    masks, ring, tree = (
        TreeMasks(8, VOCAB, any_gpu),
        RoundRing(4, any_gpu),
        DraftTree.chain([1, 2, 3, 4]),
    )
    for last, path in ((0, (0, 1, 2, 3)), (2, (0, 1)), (1, (0,))):
        masks.rows[:, -1] = 0
        masks.rows[last, -1] = last > 0
        masks.upload(4)
        params, step = start(any_gpu, (1.0, 0.0, 0.0)), step_of(any_gpu, tree)
        ring.clear()
        chosen = device_ints(any_gpu, [2, 3, 4, 5])
        accept(chosen, params, step, ring, any_gpu, ends=masks.device)
        if any_gpu.is_real:
            torch.cuda.synchronize()
        record = ring.read(1)
        assert record is not None and record.path == path
        assert record.emitted == (2, 3, 4, 5)[: len(path)]


def test_any_number_of_stop_ids(any_gpu: Gpu) -> None:
    stops = {*range(1000, 3000, 7), VOCAB - 1, VOCAB + 10**6}
    params, ring, tree = (
        RequestParams(any_gpu, VOCAB),
        RoundRing(4, any_gpu),
        DraftTree.chain([1, 1007]),
    )
    for stop_ids, emitted in (
        (stops, (1007,)),
        ((), (1007, VOCAB - 1)),
        ({VOCAB - 1}, (1007, VOCAB - 1)),
    ):
        limits = {"anchor": 1, "tokens_left": 9, "max_ctx": 99}
        params.start(SamplingArgs(0.0), 0, **limits, stop_ids=stop_ids)
        ring.clear()
        chosen = device_ints(any_gpu, [1007, VOCAB - 1])
        accept(chosen, params, step_of(any_gpu, tree), ring, any_gpu)
        if any_gpu.is_real:
            torch.cuda.synchronize()
        record = ring.read(1)
        assert record is not None and record.emitted == emitted
        assert bool(record.end) == (record.emitted[-1] in stop_ids)


def host_scores(row: np.ndarray, token: int, count: int) -> TokenScores:
    sampler = Sampler(SamplingParams(), len(row), num_logprobs=count)
    assert sampler._processor is not None
    sampler._processor._row[:] = row
    return sampler._processor._score(token)


@pytest.mark.parametrize("count", [1, 20, 64])
@pytest.mark.parametrize("vocab", [300, VOCAB])
def test_scores_are_those_of_the_sampler(any_gpu: Gpu, count: int, vocab: int) -> None:
    """Of the path alone, whose nodes are not the first ones; ties and impossible tokens too."""
    logits = made_logits(4, vocab, seed=3)
    logits[2] = np.round(logits[2])
    logits[3, 100:] = -np.inf
    tree = DraftTree((1, 2, 3, 4), (-1, 0, 0, 2), (0, 1, 1, 2))
    params, step = RequestParams(any_gpu, vocab), step_of(any_gpu, tree)
    limits = {"anchor": 1, "tokens_left": 9, "max_ctx": 99}
    params.start(SamplingArgs(0.0), 0, **limits, num_scores=count)
    ring, scores = RoundRing(2, any_gpu), ScoreRing(2, any_gpu)
    workspace, rows = new_sampling_workspace(4, vocab, any_gpu), on(any_gpu, logits)
    accept(device_ints(any_gpu, [3, 0, 4, 50]), params, step, ring, any_gpu)
    score(rows, step, params, scores, workspace, any_gpu)
    if any_gpu.is_real:
        torch.cuda.synchronize()
    found = scores.read(1, 3, count)
    assert not workspace.arrived.any()
    for (own, top), node, token in zip(found, (0, 2, 3), (3, 4, 50), strict=True):
        expected = host_scores(logits[node], token, count)
        assert abs(own - expected.logprob) < 1e-5
        tokens, values = zip(*expected.top, strict=True)
        assert tuple(t for t, value in top if value > -np.inf) == tokens
        assert np.abs(np.array([v for _, v in top[: len(values)]]) - values).max() < 1e-5


def test_scores_of_a_row_do_not_depend_on_the_others(any_gpu: Gpu) -> None:
    logits, found = made_logits(3, VOCAB, seed=4), []
    for tree, chosen, place in (
        (DraftTree.chain([1, 2, 3]), [2, 3, 9], 2),
        (DraftTree.chain([3]), [9], 0),
    ):
        params, step = start(any_gpu, (1.0, 0.0, 0.0), num_scores=5), step_of(any_gpu, tree)
        ring, scores = RoundRing(2, any_gpu), ScoreRing(2, any_gpu)
        workspace = new_sampling_workspace(3, VOCAB, any_gpu)
        accept(device_ints(any_gpu, chosen), params, step, ring, any_gpu)
        score(on(any_gpu, logits[2 - place :]), step, params, scores, workspace, any_gpu)
        if any_gpu.is_real:
            torch.cuda.synchronize()
        found.append(scores.read(1, place + 1, 5)[place])
    assert found[0] == found[1]
