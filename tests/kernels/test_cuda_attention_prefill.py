"""Attention of long chains of rows: against float64, over ranges of a long prompt."""

from itertools import pairwise

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.attention_prefill import (  # noqa: E402
    split_range,
)
from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from tests.kernels.cuda_attention import (  # noqa: E402
    Layer,
    assert_near,
    expect,
    long_chain,
)
from tests.kernels.reference.attention import (  # noqa: E402
    chain_mask,
)


@pytest.mark.parametrize("window", [0, 33])
@pytest.mark.parametrize("committed", [0, 50])
def test_long_chains_equal_the_reference(window: int, committed: int, any_gpu: Gpu) -> None:
    layer = Layer(any_gpu, 6, 2, 64)
    before, rows = layer.rows(1, committed), layer.rows(4, 100)
    layer.fill(before)
    mask = chain_mask(100, committed, window)
    assert_near(long_chain(layer, rows, committed, window), expect(before, rows, mask))


def test_ranges_of_a_long_prompt_are_merged(any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("draftree.kernels.cuda.attention_prefill.MOST_RANGE", 128)
    monkeypatch.setattr("draftree.kernels.cuda.attention_prefill._LEAST_RANGE", 32)
    layer = Layer(any_gpu, 4, 2, 64)
    before, rows = layer.rows(1, 420), layer.rows(4, 80)
    layer.fill(before)
    mask = chain_mask(80, 420)
    assert_near(long_chain(layer, rows, 420), expect(before, rows, mask))


@pytest.mark.parametrize("length", [1, 1023, 1024, 5000, 32768, 100_000])
def test_ranges_cover_what_is_committed_in_few_sizes(length: int) -> None:
    ranges = split_range(length)
    assert ranges[0][0] == 0 and ranges[-1][1] == length
    assert all(a[1] == b[0] for a, b in pairwise(ranges))
    sizes = {end - first for first, end in ranges[:-1]}
    assert all(size & (size - 1) == 0 and 1024 <= size <= 32768 for size in sizes)
