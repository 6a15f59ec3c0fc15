"""Tokens chosen on the device against the CPU's sampler: the same noise, filters and ties."""

import math
from dataclasses import replace

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.core import SamplingParams  # noqa: E402
from draftree.decode import sampler  # noqa: E402
from draftree.decode.sampler import LATER_WEIGHTS, Sampler  # noqa: E402
from draftree.kernels.cpu.sampling import SamplingArgs, gumbel  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.pass_args import CudaPassArgs  # noqa: E402
from draftree.kernels.cuda.request import RequestParams, needs_threshold  # noqa: E402
from draftree.kernels.cuda.sampling import (  # noqa: E402
    SamplingWorkspace,
    choose,
    new_candidates,
    new_sampling_workspace,
    rank,
)
from tests.kernels.reference.sampling import kept_reference  # noqa: E402

VOCAB = 20_003  # three slices, the last one odd
COMMITTED = 117


@pytest.fixture(autouse=True)
def exact_sampler(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU's sampler does not look for what would need much noise; the GPU's does."""
    monkeypatch.setattr(sampler, "_NOISE_REACH", math.inf)


def on(gpu: Gpu, array: np.ndarray) -> torch.Tensor:
    """Rows with a stride of their own, on the device."""
    rows, vocab = array.shape
    wide = torch.full((rows, -(-vocab // 4) * 4 + 8), 1e9, device=gpu.place)
    wide[:, :vocab] = torch.from_numpy(array)
    return wide[:, :vocab]


def tree_step(gpu: Gpu, num_rows: int) -> CudaPassArgs:
    """A tree in which every fourth node is a root's child: positions are not in order."""
    step = CudaPassArgs(64, 64, gpu)
    nodes = np.arange(num_rows)
    parents = np.where(nodes % 4 == 1, 0, nodes - 1)
    depths = np.where(nodes == 0, 0, (nodes - 1) % 4 + 1)
    step.set_tree(nodes, parents, depths, COMMITTED)
    step.set_rows(nodes)
    return step


def device_params_for(gpu: Gpu, params: SamplingParams) -> RequestParams:
    device_params = RequestParams(gpu, VOCAB)
    device_params.start(filters_of(params), params.seed, anchor=1, tokens_left=10, max_ctx=999)
    return device_params


def filters_of(params: SamplingParams) -> SamplingArgs:
    return SamplingArgs(params.temperature, params.top_k, params.top_p, params.min_p)


def chosen_on(
    gpu: Gpu,
    logits: np.ndarray,
    params: SamplingParams,
    workspace: SamplingWorkspace | None = None,
    use_threshold: bool | None = None,
) -> list[int]:
    num_rows, vocab = logits.shape
    chosen = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=gpu.place)
    workspace = workspace or new_sampling_workspace(num_rows, vocab, gpu)
    if use_threshold is None:
        use_threshold = needs_threshold(filters_of(params), vocab)
    step, device_params = tree_step(gpu, num_rows), device_params_for(gpu, params)
    choose(
        on(gpu, logits), step, device_params, chosen, workspace, gpu, use_threshold=use_threshold
    )
    assert chosen[num_rows] == -1
    for cleared in (workspace.bins, workspace.num_members, workspace.arrived):
        assert not cleared.any()
    return chosen[:num_rows].tolist()


def expected(logits: np.ndarray, params: SamplingParams) -> list[int]:
    sampler = Sampler(params, logits.shape[1])
    depths = [0, *((n - 1) % 4 + 1 for n in range(1, len(logits)))]
    return [sampler.choose(row, COMMITTED + d + 1) for row, d in zip(logits, depths, strict=True)]


def made_logits(num_rows: int, vocab: int = VOCAB, seed: int = 0, scale: float = 3.0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return (scale * rng.standard_normal((num_rows, vocab))).astype(np.float32)


def named(params: SamplingParams) -> str:
    return "-".join(f"{value:g}" for value in filters_of(params)[:4])


GREEDY = SamplingParams()
FREE = SamplingParams(temperature=1.0)
SHORT = SamplingParams(temperature=0.6, top_k=20, top_p=0.95)
SHARE = SamplingParams(temperature=1.0, top_p=0.9)
WAYS = [
    *(GREEDY, FREE, SHORT, SHARE),
    replace(FREE, temperature=0.37),
    replace(FREE, temperature=50.0),
    replace(FREE, top_k=64),
    replace(FREE, top_k=1),
    replace(SHORT, top_k=40, top_p=1.0, min_p=0.05),
    replace(SHARE, temperature=0.7, top_p=0.5),
    replace(SHARE, temperature=2.0, top_p=0.999),
    replace(SHARE, top_p=1e-6),
    replace(FREE, min_p=0.1),
    replace(FREE, top_k=65),
    replace(SHARE, top_k=500, top_p=0.6),
    replace(FREE, top_k=19_000),
    replace(SHARE, temperature=0.8, top_k=300, min_p=0.02),
    replace(FREE, top_k=30_000),
]


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_choices_are_those_of_the_sampler(any_gpu: Gpu, way: SamplingParams) -> None:
    params = replace(way, seed=2**62 + 12345)
    logits = made_logits(12)
    assert chosen_on(any_gpu, logits, params) == expected(logits, params)


@pytest.mark.parametrize("way", WAYS, ids=named)
def test_ties_go_to_the_lower_token(any_gpu: Gpu, way: SamplingParams) -> None:
    """Values in steps of one, a row in which all are alike: most thresholds are among equals."""
    logits = np.round(made_logits(5, 9000, seed=1, scale=2.0))
    logits[2] = 1.5
    logits[3] = np.where(np.arange(9000) % 2, 0.0, -0.0)
    params = replace(way, seed=7)
    assert chosen_on(any_gpu, logits, params) == expected(logits, params)


def kept_on(gpu: Gpu, logits: np.ndarray, params: SamplingParams) -> list[set[int]]:
    """The tokens inside the threshold of each row."""
    workspace = new_sampling_workspace(*logits.shape, gpu)
    chosen_on(gpu, logits, params, workspace, use_threshold=True)
    bits = (logits / np.float32(params.temperature) + np.float32(0.0)).view(np.uint32)
    ordered = np.where(bits >> 31, ~bits, bits | 0x80000000).astype(np.uint64)
    tokens = np.arange(logits.shape[1], dtype=np.uint32)
    keys = ordered << np.uint64(32) | (~tokens).astype(np.uint64)
    thresholds = workspace.thresholds.cpu().numpy().view(np.uint64)
    return [
        set(np.flatnonzero(row >= threshold).tolist())
        for row, threshold in zip(keys, thresholds, strict=True)
    ]


@pytest.mark.parametrize("is_tied", [False, True])
@pytest.mark.parametrize(
    "way", [way for way in WAYS if needs_threshold(filters_of(way), VOCAB)], ids=named
)
def test_filters_keep_what_they_should(any_gpu: Gpu, way: SamplingParams, is_tied: bool) -> None:
    logits = made_logits(2, 1200, seed=2)
    if is_tied:
        logits = np.round(logits)
        logits[1] = 3.0  # one bin holds the whole row
    params = replace(way, top_k=min(way.top_k, 900))
    filters = (params.temperature, params.top_k, params.top_p, params.min_p)
    for row, kept in zip(logits, kept_on(any_gpu, logits, params), strict=True):
        wanted = kept_reference(torch.from_numpy(row), *filters)
        # A share may end one token earlier or later where rounding decides.
        assert len(kept ^ set(wanted)) <= (params.top_p < 1.0)


def test_a_threshold_in_a_bin_too_full_to_list(any_gpu: Gpu) -> None:
    logits = np.round(made_logits(1, 12_000, seed=3, scale=0.4))
    params = SamplingParams(temperature=1.0, top_p=0.6)
    (kept,) = kept_on(any_gpu, logits, params)
    wanted = kept_reference(torch.from_numpy(logits[0]), 1.0, 0, 0.6, 0.0)
    assert (logits[0] == logits[0, wanted[-1]]).sum() > 4096
    assert abs(len(kept) - len(wanted)) <= 1
    assert kept <= set(wanted) or set(wanted) <= kept


def test_one_threshold_graph_serves_every_request(any_gpu: Gpu) -> None:
    logits = made_logits(3, 9000, seed=4)
    workspace = new_sampling_workspace(3, 9000, any_gpu)
    for way in WAYS:
        params = replace(way, seed=5)
        chosen = chosen_on(any_gpu, logits, params, workspace, use_threshold=True)
        assert chosen == expected(logits, params), way


def test_a_row_does_not_depend_on_the_others(any_gpu: Gpu) -> None:
    logits = made_logits(9, 9000, seed=5)
    for way in (
        SamplingParams(),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.0, top_p=0.9),
    ):
        params = replace(way, seed=5)
        together = chosen_on(any_gpu, logits, params)
        assert [chosen_on(any_gpu, logits[: n + 1], params)[n] for n in range(9)] == together


def test_rows_that_are_not_live_are_left(any_gpu: Gpu) -> None:
    logits, device_params = (
        on(any_gpu, made_logits(4, 300)),
        device_params_for(any_gpu, SamplingParams()),
    )
    step, workspace = tree_step(any_gpu, 4), new_sampling_workspace(4, 300, any_gpu)
    chosen = torch.full((4,), -1, dtype=torch.int32, device=any_gpu.place)
    for live in (0, 2):
        step.set_rows(np.arange(live))
        choose(logits, step, device_params, chosen, workspace, any_gpu, use_threshold=True)
        assert (chosen >= 0).tolist() == [row < live for row in range(4)]


def test_noise_lost_in_rounding_and_impossible_tokens(any_gpu: Gpu) -> None:
    """Scores so large that many are equal, and rows with few or no possible tokens."""
    logits = made_logits(4, 9000, seed=6, scale=1.0) + np.float32(3e6)
    logits[1:] = -np.inf
    logits[1, 8500], logits[2, [11, 300, 8999]] = 2.0, (1.0, 0.5, 1.5)
    for way in (
        SamplingParams(),
        SamplingParams(temperature=0.01),
        SamplingParams(temperature=1.0, top_p=0.7),
    ):
        params = replace(way, seed=8)
        assert chosen_on(any_gpu, logits, params) == expected(logits, params), way


def test_the_noise_has_the_bits_of_the_cpu(any_gpu: Gpu) -> None:
    """With equal logits the scores are the noise; ranks show them."""
    params = SamplingParams(temperature=1.0, seed=2**63 - 1)
    ids, _ = ranked_on(any_gpu, np.zeros((3, 9000), np.float32), params, 64)
    for row in range(3):
        position = COMMITTED + 1 + row
        noise = np.array([gumbel(params.seed, position, token) for token in range(9000)])
        assert ids[row].tolist() == np.lexsort((np.arange(9000), -noise))[:64].tolist()


@pytest.mark.parametrize("num_close", [500, 9000])
def test_scores_that_are_almost_alike(any_gpu: Gpu, num_close: int) -> None:
    """Logits that cancel the noise: only its exact value tells who is first."""
    rng, position = np.random.default_rng(12), COMMITTED + 1
    logits = np.full((1, 9000), -40.0, np.float32)
    for token in rng.permutation(9000)[:num_close].tolist():
        logits[0, token] = 1e-4 * rng.random() - gumbel(6, position, token)
    params = replace(FREE, seed=6)
    assert chosen_on(any_gpu, logits, params) == expected(logits, params)
    ids, _ = ranked_on(any_gpu, logits, params, 32)
    assert ids[0].tolist() == Sampler(params, 9000).rank(logits, position, 32).tokens[0].tolist()


def ranked_on(
    gpu: Gpu, logits: np.ndarray, params: SamplingParams, num_candidates: int
) -> tuple[np.ndarray, np.ndarray]:
    num_rows, vocab = logits.shape
    draft_step = CudaPassArgs(64, 64, gpu)
    draft_step.set_rows(np.arange(num_rows))
    ids = torch.full((num_rows + 1, num_candidates), -1, dtype=torch.int32, device=gpu.place)
    log_probs = torch.zeros((num_rows + 1, num_candidates), device=gpu.place)
    workspace = new_sampling_workspace(num_rows + 1, vocab, gpu)
    padded = on(gpu, np.concatenate([logits, logits[:1]]))  # the last row is not live
    device_params = device_params_for(gpu, params)
    args = padded, tree_step(gpu, 1), draft_step, device_params, ids, log_probs, workspace, gpu
    rank(*args, later_weights=LATER_WEIGHTS)
    assert (ids[num_rows] == -1).all() and not workspace.arrived.any()
    return ids[:num_rows].cpu().numpy(), log_probs[:num_rows].cpu().numpy()


@pytest.mark.parametrize("temperature", [0.0, 0.3, 1.0, 20.0])
@pytest.mark.parametrize("num_candidates", [1, 22, 64])
def test_ranks_are_those_of_the_sampler(
    any_gpu: Gpu, temperature: float, num_candidates: int
) -> None:
    params = SamplingParams(temperature=temperature, top_k=5, seed=99)
    logits = made_logits(5, seed=9)
    logits[3] = np.round(logits[3])
    logits[4] = np.sort(logits[4])  # the best stand side by side
    ids, log_probs = ranked_on(any_gpu, logits, params, num_candidates)
    block = Sampler(params, VOCAB).rank(logits, COMMITTED + 1, num_candidates)
    assert np.array_equal(ids, block.tokens)
    np.testing.assert_allclose(log_probs, block.log_probs, rtol=1e-6, atol=1e-5)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_the_best_after_each_node_begin_with_its_choice(any_gpu: Gpu, temperature: float) -> None:
    params, logits = SamplingParams(temperature=temperature, seed=98), made_logits(6, seed=14)
    step, vocab = tree_step(any_gpu, 6), logits.shape[1]
    workspace = new_sampling_workspace(6, vocab, any_gpu)
    ids, scores = new_candidates(6, 16, any_gpu)
    args = on(any_gpu, logits), step, step, device_params_for(any_gpu, params), ids, scores
    rank(*args, workspace, any_gpu, by_node=True)
    assert ids[:, 0].tolist() == chosen_on(any_gpu, logits, params)
    for row, position in enumerate(step.positions[:6].tolist()):
        block = Sampler(params, vocab).rank(logits[row : row + 1], position + 1, 16)
        assert ids[row].tolist() == block.tokens[0].tolist()


def test_small_vocabularies(any_gpu: Gpu) -> None:
    logits = made_logits(4, 101, seed=10)
    for way in WAYS:
        params = replace(way, seed=3)
        assert chosen_on(any_gpu, logits, params) == expected(logits, params), way
    ids, _ = ranked_on(any_gpu, logits, SamplingParams(temperature=1.0), 64)
    block = Sampler(SamplingParams(temperature=1.0), 101).rank(logits, COMMITTED + 1, 64)
    assert np.array_equal(ids, block.tokens)


def test_a_large_vocabulary(any_gpu: Gpu) -> None:
    logits = made_logits(2, 248_320, seed=11)
    for way in (
        SamplingParams(),
        SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
        SamplingParams(temperature=1.0, top_p=0.95),
    ):
        params = replace(way, seed=4)
        assert chosen_on(any_gpu, logits, params) == expected(logits, params)
    params = SamplingParams(temperature=0.7, seed=4)
    ids, _ = ranked_on(any_gpu, logits, params, 22)
    assert np.array_equal(ids, Sampler(params, 248_320).rank(logits, COMMITTED + 1, 22).tokens)


def test_what_cannot_be_done_is_refused(any_gpu: Gpu) -> None:
    device_params = RequestParams(any_gpu, VOCAB)
    with pytest.raises(ValueError, match="too large"):
        new_sampling_workspace(1, 64 * 8192 + 1, any_gpu)
    step, workspace = CudaPassArgs(4, 4, any_gpu), new_sampling_workspace(2, 100, any_gpu)
    chosen = torch.zeros(4, dtype=torch.int32, device=any_gpu.place)
    for shape in [(3, 100), (2, 9000)]:
        with pytest.raises(ValueError, match="workspace"):
            logits = torch.zeros(shape, device=any_gpu.place)
            choose(logits, step, device_params, chosen, workspace, any_gpu)
    with pytest.raises(ValueError, match="16 bytes"):
        odd = torch.zeros((2, 101), device=any_gpu.place)[:, :100]
        choose(odd, step, device_params, chosen, workspace, any_gpu)
    ids = torch.zeros((2, 65), dtype=torch.int32, device=any_gpu.place)
    with pytest.raises(ValueError, match="candidates"):
        logits = torch.zeros((2, 100), device=any_gpu.place)
        rank(logits, step, step, device_params, ids, ids.float(), workspace, any_gpu)
