"""The token that follows each row of logits, and a draft's best candidates, all on the device.

The choice is that of kernels/cpu/sampling.py: the same noise by (seed, position, token), the same
filters, ties to the lower token. How tokens are chosen is read from the request's params. Bias,
penalties and grammars have changed the logits before (process.py).
"""

from dataclasses import dataclass

import torch

from draftree.kernels.cuda.compile import Gpu, KernelSource, load_kernel
from draftree.kernels.cuda.pass_args import CudaPassArgs
from draftree.kernels.cuda.request import MAX_TOP_K, PARAM_MACROS, SLICE, RequestParams

MAX_CANDIDATES = MAX_TOP_K
THREADS = 256
_MAX_SLICES = 64
_NUM_BINS, _MEMBERS = 1024, 4096
WORKSPACE_BYTES = 42 * 1024  # of shared memory, for a slice and its best
MACROS = (*PARAM_MACROS, ("WORKSPACE_BYTES", WORKSPACE_BYTES))
FILES = ("bits", "request", "noise", "select", "slice")


@dataclass(frozen=True)
class SamplingWorkspace:
    """Scratch; calls that share one must follow each other on one stream."""

    num_slices: int
    slices: torch.Tensor  # int64 [rows, slices, MAX_TOP_K], the best of each slice
    weights: torch.Tensor  # float32 [rows, slices, 2]
    peaks: torch.Tensor  # float32 [rows, slices]
    thresholds: torch.Tensor  # int64 [rows]
    members: torch.Tensor  # int64 [rows, 4096]
    # Zero between calls.
    bins: torch.Tensor  # int64 [rows, 1024]
    num_members: torch.Tensor  # int32 [rows]
    arrived: torch.Tensor  # int32 [rows]


def new_sampling_workspace(max_rows: int, vocab_size: int, gpu: Gpu) -> SamplingWorkspace:
    num_slices, place = -(-vocab_size // SLICE), gpu.place
    if num_slices > _MAX_SLICES:
        raise ValueError(f"a vocabulary of {vocab_size} is too large to choose from")
    long = {"dtype": torch.int64, "device": place}
    return SamplingWorkspace(
        num_slices,
        torch.zeros((max_rows, num_slices, MAX_TOP_K), **long),
        torch.zeros((max_rows, num_slices, 2), device=place),
        torch.zeros((max_rows, num_slices), device=place),
        torch.zeros(max_rows, **long),
        torch.zeros((max_rows, _MEMBERS), **long),
        torch.zeros((max_rows, _NUM_BINS), **long),
        torch.zeros(max_rows, dtype=torch.int32, device=place),
        torch.zeros(max_rows, dtype=torch.int32, device=place),
    )


def new_choices(max_rows: int, gpu: Gpu, *, for_host: bool = False) -> torch.Tensor:
    """int32 [max_rows]: what `choose` chose. for_host: in pinned memory."""
    place = torch.device("cpu") if for_host else gpu.place
    pinned = for_host and gpu.is_real
    return torch.zeros(max_rows, dtype=torch.int32, device=place, pin_memory=pinned)


def new_candidates(
    num_positions: int, num_candidates: int, gpu: Gpu
) -> tuple[torch.Tensor, torch.Tensor]:
    """int32 and float32 [num_positions, num_candidates]: what `rank` found, and its scores."""
    shape = (num_positions, num_candidates)
    ids = torch.zeros(shape, dtype=torch.int32, device=gpu.place)
    return ids, torch.zeros(shape, device=gpu.place)


def sampling_source(name: str) -> KernelSource:
    file = {"choose_kernel": "choose", "rank_kernel": "rank"}.get(name, "threshold")
    return KernelSource(name, (*FILES, file), MACROS)


def choose(
    logits: torch.Tensor,  # float32 [rows, vocab_size]
    step: CudaPassArgs,
    params: RequestParams,
    chosen: torch.Tensor,  # int32 [rows]
    workspace: SamplingWorkspace,
    gpu: Gpu,
    *,
    use_threshold: bool = False,
) -> None:
    """chosen[i] = the token after node step.rows[i], for the live rows.

    use_threshold: with filters for which `needs_threshold` holds; for others it only takes longer.
    """
    check_logits(logits, workspace)
    num_rows, vocab_size = logits.shape
    grid, sizes = (workspace.num_slices, num_rows), (logits.stride(0), vocab_size)
    if use_threshold:
        _find_thresholds(logits, step, params, workspace, gpu)
    load_kernel(sampling_source("choose_kernel"), gpu).launch(
        grid,
        THREADS,
        *(logits, step.control, step.rows, step.positions, params.device),
        workspace.thresholds if use_threshold else None,
        *(workspace.slices, workspace.arrived, chosen, *sizes),
        shared_bytes=WORKSPACE_BYTES,
        is_chained=True,
    )


def _find_thresholds(
    logits: torch.Tensor,
    step: CudaPassArgs,
    params: RequestParams,
    workspace: SamplingWorkspace,
    gpu: Gpu,
) -> None:
    w, sizes = workspace, (logits.stride(0), logits.shape[1])
    grid, shared = (w.num_slices, logits.shape[0]), (logits, step.control, params.device)
    load_kernel(sampling_source("peak_kernel"), gpu).launch(
        grid, THREADS, *shared, w.peaks, *sizes, shared_bytes=WORKSPACE_BYTES, is_chained=True
    )
    for is_mass in (0, 1):  # top_k, then top_p of what it leaves
        load_kernel(sampling_source("bin_kernel"), gpu).launch(
            grid,
            THREADS,
            *(*shared, w.peaks, w.thresholds, w.bins, *sizes, is_mass),
            shared_bytes=WORKSPACE_BYTES,
            is_chained=True,
        )
        load_kernel(sampling_source("threshold_kernel"), gpu).launch(
            grid,
            THREADS,
            *(*shared, w.peaks, w.thresholds, w.bins, w.members, w.num_members, w.arrived),
            *(*sizes, is_mass),
            shared_bytes=WORKSPACE_BYTES,
            is_chained=True,
        )


def rank(
    logits: torch.Tensor,  # float32 [positions, vocab_size], row i for i + 1 after the root
    step: CudaPassArgs,
    draft_step: CudaPassArgs,
    params: RequestParams,
    ids: torch.Tensor,  # int32 [positions, num_candidates]
    log_probs: torch.Tensor,  # float32 [positions, num_candidates]
    workspace: SamplingWorkspace,
    gpu: Gpu,
    *,
    later_weights: tuple[float, float] = (1.0, 1.0),
    by_node: bool = False,
) -> None:
    """The best candidates of each live row of the draft, as `Sampler.rank` has them.

    later_weights: of logits and of noise, in all rows but the first, where there is noise.

    Positions of the noise are the target's, from `step`; how many rows are live says the draft's.
    by_node: rows are those of step's nodes, as `choose` has them.
    """
    check_logits(logits, workspace)
    num_rows, vocab_size = logits.shape
    count = ids.shape[1]
    if not 1 <= count <= min(MAX_CANDIDATES, vocab_size):
        raise ValueError(f"{count} candidates cannot be ranked, at most {MAX_CANDIDATES}")
    if not (ids.is_contiguous() and log_probs.is_contiguous()) or ids.shape != log_probs.shape:
        raise ValueError("candidates must be contiguous and of one shape")
    load_kernel(sampling_source("rank_kernel"), gpu).launch(
        (workspace.num_slices, num_rows),
        THREADS,
        *(logits, draft_step.control, step.control),
        *((step.rows, step.positions) if by_node else (None, None)),
        params.device,
        *(workspace.slices, workspace.weights, workspace.arrived, ids, log_probs),
        *(logits.stride(0), vocab_size, count, *later_weights),
        shared_bytes=WORKSPACE_BYTES,
        is_chained=True,
    )


def check_logits(logits: torch.Tensor, workspace: SamplingWorkspace) -> None:
    if logits.dtype != torch.float32 or logits.stride(1) != 1 or logits.stride(0) % 4:
        raise ValueError("rows of logits must be float32 and start at multiples of 16 bytes")
    fits = logits.shape[0] <= len(workspace.arrived)
    if not fits or -(-logits.shape[1] // SLICE) != workspace.num_slices:
        raise ValueError(f"the workspace is not for logits {tuple(logits.shape)}")
