"""The accept walk on the device against decode/accept.py, and the records that the host reads."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.core import DraftTree, SamplingParams  # noqa: E402
from draftree.decode.accept import accept as accept_on_host  # noqa: E402
from draftree.decode.sampler import Sampler  # noqa: E402
from draftree.kernels.cpu.sampling import SamplingArgs  # noqa: E402
from draftree.kernels.cuda.accept import RoundRecord, RoundRing, accept  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.pass_args import COMMITTED, CudaPassArgs  # noqa: E402
from draftree.kernels.cuda.request import End, Param, RequestParams  # noqa: E402
from draftree.kernels.cuda.sampling import (  # noqa: E402
    choose,
    new_sampling_workspace,
    rank,
)
from draftree.kernels.cuda.tree import (  # noqa: E402
    advance,
    build_tree,
    plan_block,
    plan_context,
    plan_plain,
)

VOCAB = 12


def made_tree(rng: np.random.Generator, num_nodes: int) -> DraftTree:
    tokens, parents, depths = [int(rng.integers(VOCAB))], [-1], [0]
    children: dict[int, set[int]] = {0: set()}
    while len(tokens) < num_nodes:
        parent = int(rng.integers(max(0, len(tokens) - 6), len(tokens)))
        token = int(rng.integers(VOCAB))
        if token not in children[parent]:
            children[parent].add(token)
            children[len(tokens)] = set()
            tokens.append(token), parents.append(parent), depths.append(depths[parent] + 1)
    return DraftTree(tuple(tokens), tuple(parents), tuple(depths))


def made_choices(rng: np.random.Generator, tree: DraftTree) -> list[int]:
    """Mostly the token of a child, where there is one."""
    chosen = rng.integers(VOCAB, size=tree.num_nodes).tolist()
    for node, parent in enumerate(tree.parents):
        if parent >= 0 and rng.random() < 0.8:
            chosen[parent] = tree.tokens[node]
    return chosen


def start(gpu: Gpu, tokens_left: int, stop_ids: frozenset[int] = frozenset()) -> RequestParams:
    device_params = RequestParams(gpu, VOCAB)
    limits = {"tokens_left": tokens_left, "max_ctx": 1000}
    device_params.start(SamplingArgs(temperature=0.0), 0, anchor=3, **limits, stop_ids=stop_ids)
    return device_params


def set_tree(step: CudaPassArgs, tree: DraftTree, committed: int) -> None:
    step.set_tree(*(np.array(part) for part in (tree.tokens, tree.parents, tree.depths)), committed)


def finished(gpu: Gpu, ring: RoundRing, number: int) -> RoundRecord | None:
    """A record once nothing is under way any more."""
    if gpu.is_real:
        torch.cuda.synchronize()
    return ring.read(number)


def device_ints(gpu: Gpu, values: list[int]) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32, device=gpu.place)


def test_paths_are_those_of_the_host(any_gpu: Gpu) -> None:
    rng = np.random.default_rng(0)
    sampler = Sampler(SamplingParams(), VOCAB)
    step, ring, lengths, ends = CudaPassArgs(64, 64, any_gpu), RoundRing(4, any_gpu), [], set()
    for case in range(250):
        tree = made_tree(rng, case % 64 + 1)
        chosen, stops = (
            made_choices(rng, tree),
            frozenset(rng.integers(VOCAB, size=case % 3).tolist()),
        )
        tokens_left = int(rng.integers(1, 12))
        device_params = start(any_gpu, tokens_left, stops)
        set_tree(step, tree, 50)
        ring.clear()  # what the last case has launched is done
        accept(device_ints(any_gpu, chosen), device_params, step, ring, any_gpu)
        logits = np.eye(VOCAB, dtype=np.float32)[chosen]
        accepted = accept_on_host(tree, logits, sampler, 50, tokens_left, stops)
        path, bonus = accepted.path, accepted.bonus
        assert step.control[:5].tolist() == [tree.num_nodes, 50, 1, len(path), 0]
        assert tuple(step.path[: len(path)].tolist()) == path
        left = tokens_left - len(path)
        end = End.STOP if bonus in stops else End.LENGTH if left == 0 else End.RUNNING
        device = device_params.device.tolist()
        state = [
            device[w] for w in (Param.ANCHOR, Param.TOKENS_LEFT, Param.ENDED, Param.NUM_ROUNDS)
        ]
        assert state == [bonus, left, end, 1]
        record = finished(any_gpu, ring, 1)
        assert record is not None
        assert (record.tokens, record.parents) == (tree.tokens, tree.parents)
        assert (record.path, record.bonus, record.end) == (path, bonus, end)
        lengths.append(len(path))
        ends.add(end)
    assert ends == {End.RUNNING, End.STOP, End.LENGTH}
    assert max(lengths) >= 6 and min(lengths) == 1


def test_plain_steps_until_the_end(any_gpu: Gpu) -> None:
    """What an earlier tree left in the step's arrays does not matter."""
    step, ring, device_params = (
        CudaPassArgs(8, 8, any_gpu),
        RoundRing(2, any_gpu),
        start(any_gpu, 3),
    )
    set_tree(step, DraftTree((1, 2), (-1, 0), (0, 1)), 50)
    for number, token in enumerate((7, 8, 9, 10), start=1):
        plan_plain(device_params, step, any_gpu)
        accept(device_ints(any_gpu, [token]), device_params, step, ring, any_gpu)
        advance(step, any_gpu)
        record = finished(any_gpu, ring, number)
        if number == 4:
            assert record is None
            continue
        assert record is not None
        assert (record.path, record.emitted) == ((0,), (token,))
        assert record.end is (End.LENGTH if number == 3 else End.RUNNING)
    assert step.control[:5].tolist() == [0, 53, 0, 0, 0]
    assert device_params.device[Param.ANCHOR] == 9
    assert ring.read(1) is None  # overwritten by the third


def test_a_pass_over_nothing_leaves_everything(any_gpu: Gpu) -> None:
    step, ring, device_params = (
        CudaPassArgs(8, 8, any_gpu),
        RoundRing(2, any_gpu),
        start(any_gpu, 5),
    )
    step.set_idle(30)
    step.set_path(np.array([0, 1]))
    before = device_params.device.tolist()
    accept(device_ints(any_gpu, [1, 2]), device_params, step, ring, any_gpu)
    assert step.control[:5].tolist() == [0, 30, 0, 0, 0]
    assert device_params.device.tolist() == before
    assert not ring.records.any()


def test_emitted_tokens_of_a_record(any_gpu: Gpu) -> None:
    step, ring, device_params = (
        CudaPassArgs(8, 8, any_gpu),
        RoundRing(2, any_gpu),
        start(any_gpu, 100),
    )
    set_tree(step, DraftTree((1, 2, 3, 4), (-1, 0, 0, 2), (0, 1, 1, 2)), 0)
    accept(device_ints(any_gpu, [3, 0, 4, 11]), device_params, step, ring, any_gpu)
    record = finished(any_gpu, ring, 1)
    assert record is not None and record.emitted == (3, 4, 11)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rounds_write_the_text_of_plain_decoding(any_gpu: Gpu, temperature: float) -> None:
    """A model whose logits depend on the last token alone, and a draft that knows it roughly."""
    rng = np.random.default_rng(5)
    table = (3 * rng.standard_normal((40, 40))).astype(np.float32)
    params = SamplingParams(temperature=temperature, seed=11)
    text, sampler = [3], Sampler(params, 40)
    while len(text) <= 60 and text[-1] != 17:
        text.append(sampler.choose(table[text[-1]], 20 + len(text)))
    device_params = RequestParams(any_gpu, 40)
    limits = {"tokens_left": 60, "max_ctx": 1000, "budget": 9, "stop_ids": {17}}
    device_params.start(SamplingArgs(temperature=temperature), params.seed, anchor=3, **limits)
    step, draft_step = (CudaPassArgs(16, 16, any_gpu) for _ in range(2))
    ring = RoundRing(99, any_gpu)
    step.set_idle(committed=20)
    workspace = new_sampling_workspace(16, 40, any_gpu)
    chosen = torch.zeros(16, dtype=torch.int32, device=any_gpu.place)
    ids = torch.zeros((6, 4), dtype=torch.int32, device=any_gpu.place)
    log_probs = torch.zeros((6, 4), device=any_gpu.place)
    written = []
    for number in range(1, 62):
        plan_block(device_params, draft_step, 39, 7, any_gpu)
        guess = table[text[len(written) : len(written) + 6]]
        guess = np.resize(guess, (6, 40)) + rng.standard_normal((6, 40))
        draft_logits = torch.tensor(guess, dtype=torch.float32, device=any_gpu.place)
        rank(draft_logits, step, draft_step, device_params, ids, log_probs, workspace, any_gpu)
        build_tree(ids, log_probs, device_params, step, any_gpu)
        logits = torch.tensor(table, device=any_gpu.place)[step.tokens[:16].long()]
        choose(logits, step, device_params, chosen, workspace, any_gpu)
        accept(chosen, device_params, step, ring, any_gpu)
        plan_context(step, draft_step, any_gpu)
        advance(step, any_gpu)
        advance(draft_step, any_gpu)
        record = finished(any_gpu, ring, number)
        if record is None:
            break
        written += record.emitted
        assert step.control[COMMITTED] == 20 + len(written)
        assert draft_step.control[COMMITTED] == len(written)
    assert written == text[1:]
    assert number < len(text) / 2  # the draft was of use
    last = finished(any_gpu, ring, number - 1)
    assert last is not None and last.end is (End.STOP if text[-1] == 17 else End.LENGTH)
