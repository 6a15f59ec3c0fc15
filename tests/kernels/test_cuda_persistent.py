"""A pass as one kernel: the bits of its kernels, waits, weights asked for ahead."""

from dataclasses import replace
from functools import cache

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from draftree.core import DraftTree, TokenSource
from draftree.kernels.cuda.attention import plan_attention
from draftree.kernels.cuda.compile import Gpu, KernelSource, RecordedLaunch
from draftree.kernels.cuda.kv_cache import KvShape
from draftree.kernels.cuda.persistent import _STREAM, NotPersistentError, PersistentPass
from draftree.kernels.quant.kv_format import KEY_FORMATS, VALUE_FORMATS
from draftree.models.target import Target
from tests.cuda import CudaPlace
from tests.kernels.emulator import EmulationError, emulated_gpu
from tests.tiny import run_chain, tiny_path

TREE = DraftTree((7, 8, 9, 10, 11), (-1, 0, 0, 1, 2), (0, 1, 1, 2, 2), (TokenSource.CHAIN,) * 5)
PATH = (0, 2, 4)


def open_target(gpu: Gpu, *, is_persistent: bool) -> Target:
    """A hybrid: attention, convolution, delta rule."""
    place = CudaPlace(gpu, max_tokens=8, max_nodes=8, is_persistent=is_persistent)
    return place.open_target(tiny_path("qwen35"), feature_layers=(0, 2))


def run(target: Target) -> list[np.ndarray]:
    """A chain, a tree of which a path is kept, and one row behind it: logits and state."""
    results = [run_chain(target, [1, 2, 3, 4, 5], 5)]
    target.state.begin(TREE)
    results.append(target.forward(range(TREE.num_nodes)).logits.copy())
    target.state.commit(PATH)
    results.append(run_chain(target, [6], 1))
    return [*results, *(array for part in target.state.snapshot().parts for array in part)]


@cache
def run_separately() -> list[np.ndarray]:
    """By a kernel an operation, on an emulated GPU."""
    return run(open_target(emulated_gpu(), is_persistent=False))


def all_equal(found: list[np.ndarray], expected: list[np.ndarray]) -> bool:
    return all(np.array_equal(a, b) for a, b in zip(found, expected, strict=True))


def test_a_pass_has_the_bits_of_its_kernels(any_gpu: Gpu, launched: list[PersistentPass]) -> None:
    separate = any_gpu.without_warpgroups()
    expected = (
        run(open_target(separate, is_persistent=False)) if any_gpu.is_real else run_separately()
    )
    assert not launched
    assert all_equal(run(open_target(any_gpu, is_persistent=True)), expected)
    # A body each; head and commit are too short to be worth it. A real GPU replays the second.
    assert len(launched) == (2 if any_gpu.is_real else 3)


@pytest.mark.long
@pytest.mark.parametrize("arch", [86, 89, 90])
def test_gpus_with_little_shared_memory(arch: int) -> None:
    """As much as a 3090 or a 4090 has: smaller rings, blocks of 256 threads."""
    gpu = replace(emulated_gpu(arch), shared_per_sm=102400, shared_per_block=101376)
    expected = run(open_target(gpu.without_warpgroups(), is_persistent=False))
    assert all_equal(run(open_target(gpu, is_persistent=True)), expected)


def test_blocks_that_do_not_wait_are_found_out(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulator runs each block as far as it gets: without waits, into what is not there yet, or
    takes the parts of another product for its own, which then waits for ever.
    """
    gpu = emulated_gpu()
    make_table = PersistentPass._make_table

    def forget_waits(self: PersistentPass, kinds: dict) -> tuple[np.ndarray, int]:
        table, shared_bytes = make_table(self, kinds)
        table["num_before"] = 0
        return table, shared_bytes

    monkeypatch.setattr(PersistentPass, "_make_table", forget_waits)
    with pytest.raises(EmulationError, match="no thread can go on"):
        run(open_target(gpu, is_persistent=True))


def noted(name: str, shared_bytes: int = 0, **macros: int) -> RecordedLaunch:
    sizes = {"BAND": 1, "HOST_UNIT_BYTES": 1024, "COLS": 256, "TOKEN_TILES": 1, "STAGES": 2}
    macros = sizes | macros if name == "linear_kernel" else macros
    args = [torch.zeros(1), *[None] * 6, 0, 256, 2, 3, *[None] * 4, 1]
    source = KernelSource(name, ("bits",), tuple(macros.items()))
    return RecordedLaunch(source, (4,), 256, tuple(args), shared_bytes)


def test_weights_are_asked_for_when_the_ring_is_free() -> None:
    """By the product before, unless something between needs the ring's memory."""
    gpu = emulated_gpu()
    product, small = noted("linear_kernel", 100_000), noted("small_kernel", 1000)
    large = noted("large_kernel", 140_000)
    launches = [small, product, small, product, large, product, product]
    table = PersistentPass(launches, gpu)._table
    assert table["is_prefetched"].tolist() == [0, 0, 1, 0, 1, 0, 0, 1]
    assert table["has_next"].tolist() == [1, 0, 1, 0, 0, 0, 1, 0]
    assert table["shared_offset"].tolist() == [0, 100_096, 0, 100_096, 0, 0, 0, 0]
    assert table["num_before"].tolist() == [0, 0, *[4] * 6]
    stream = dict(zip(_STREAM.names, table["next"][0].tolist(), strict=True))
    assert stream["step_bytes"] == 1024 and stream["num_steps"] == 6
    assert stream["x_bytes"] == 2 * 2176 and stream["stage_bytes"] == 1024 + 2 * 2176


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_attention_works_on_two_halves_of_its_columns(head_dim: int) -> None:
    shape = KvShape(4, head_dim, KEY_FORMATS["f16"], VALUE_FORMATS["f16"])
    gpu = replace(emulated_gpu(), shared_per_sm=233472, shared_per_block=232448)
    assert plan_attention(shape, gpu)[-1].shrunk(gpu).col_tiles % 2 == 0


@pytest.mark.parametrize("macros", [{"CLUSTER": 2}, {"BULK": 0}])
def test_what_cannot_be_one_kernel_is_refused(macros: dict[str, int]) -> None:
    with pytest.raises(NotPersistentError, match="some_kernel"):
        PersistentPass([noted("some_kernel", **macros)], emulated_gpu())


def test_separate_kernels_stay_where_one_cannot_be(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As on a GPU without the shared memory; a warning says so."""
    gpu, expected = emulated_gpu(), run_separately()
    monkeypatch.setattr(PersistentPass, "_make_table", lambda *_: (None, 10**6))
    assert all_equal(run(open_target(gpu, is_persistent=True)), expected)
    assert "1000000 bytes of shared memory are too many" in caplog.text
