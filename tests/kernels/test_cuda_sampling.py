"""Tokens chosen on the device against the CPU's sampler: the same noise, filters and ties."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.core import SamplingParams  # noqa: E402
from draftree.decode.sample import Sampler  # noqa: E402
from draftree.kernels.cpu.sampling import Filters, gumbel  # noqa: E402
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.request import (  # noqa: E402
    MAX_STOPS,
    RequestWords,
    needs_border,
)
from draftree.kernels.cuda.sampling import (  # noqa: E402
    SamplingWorkspace,
    choose,
    new_sampling_workspace,
    rank,
)
from draftree.kernels.cuda.step import CudaStep  # noqa: E402

VOCAB = 20_003  # three slices, the last one odd
COMMITTED = 117


def on(gpu: Gpu, array: np.ndarray) -> torch.Tensor:
    """Rows with a stride of their own, on the device."""
    rows, vocab = array.shape
    wide = torch.full((rows, -(-vocab // 4) * 4 + 8), 1e9, device=gpu.place)
    wide[:, :vocab] = torch.from_numpy(array)
    return wide[:, :vocab]


def tree_step(gpu: Gpu, num_rows: int) -> CudaStep:
    """A tree in which every fourth node is a root's child: positions are not in order."""
    step = CudaStep(64, 64, gpu)
    nodes = np.arange(num_rows)
    parents = np.where(nodes % 4 == 1, 0, nodes - 1)
    depths = np.where(nodes == 0, 0, (nodes - 1) % 4 + 1)
    step.set_tree(nodes, parents, depths, COMMITTED)
    step.set_rows(nodes)
    return step


def words_for(gpu: Gpu, params: SamplingParams) -> RequestWords:
    words = RequestWords(gpu)
    words.start(filters_of(params), params.seed, anchor=1, tokens_left=10, max_ctx=999)
    return words


def filters_of(params: SamplingParams) -> Filters:
    return Filters(params.temperature, params.top_k, params.top_p, params.min_p)


def chosen_on(
    gpu: Gpu,
    logits: np.ndarray,
    params: SamplingParams,
    workspace: SamplingWorkspace | None = None,
    use_border: bool | None = None,
) -> list[int]:
    num_rows, vocab = logits.shape
    chosen = torch.full((num_rows + 1,), -1, dtype=torch.int32, device=gpu.place)
    workspace = workspace or new_sampling_workspace(num_rows, vocab, gpu)
    if use_border is None:
        use_border = needs_border(filters_of(params), vocab)
    step, words = tree_step(gpu, num_rows), words_for(gpu, params)
    choose(on(gpu, logits), step, words, chosen, workspace, gpu, use_border=use_border)
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


WAYS = [
    dict(),
    dict(temperature=1.0),
    dict(temperature=0.37),
    dict(temperature=50.0),
    dict(temperature=0.6, top_k=20, top_p=0.95),
    dict(temperature=1.0, top_k=64),
    dict(temperature=1.0, top_k=1),
    dict(temperature=0.9, top_k=40, min_p=0.05),
    dict(temperature=1.0, top_p=0.9),
    dict(temperature=0.7, top_p=0.5),
    dict(temperature=2.0, top_p=0.999),
    dict(temperature=1.0, top_p=1e-6),
    dict(temperature=1.0, min_p=0.1),
    dict(temperature=1.0, top_k=65),
    dict(temperature=1.0, top_k=500, top_p=0.6),
    dict(temperature=1.0, top_k=19_000),
    dict(temperature=0.8, top_k=300, top_p=0.9, min_p=0.02),
    dict(temperature=1.0, top_k=30_000),
]


@pytest.mark.parametrize("way", WAYS, ids=str)
def test_choices_are_those_of_the_sampler(any_gpu: Gpu, way: dict) -> None:
    params = SamplingParams(**way, seed=2**62 + 12345)
    logits = made_logits(12)
    assert chosen_on(any_gpu, logits, params) == expected(logits, params)
