"""Fixtures that several parts share: real model files, and the GPU that CUDA kernels run on."""

from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from draftree.errors import DraftreeError

if TYPE_CHECKING:
    from draftree.kernels.cuda.compile import Gpu


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, downloaded when it is not there yet."""
    from draftree.weights import hub

    try:
        return hub.pull("smollm2-135m")
    except (DraftreeError, OSError) as error:
        pytest.skip(f"the default model cannot be had: {error}")


@pytest.fixture(scope="session")
def coder_path() -> Path:
    """A second real model with k-quants and biases; only where it has been downloaded."""
    from draftree.weights import hub

    try:
        return hub.resolve("qwen2.5-coder-0.5b")
    except DraftreeError as error:
        pytest.skip(f"the coder model has not been downloaded: {error}")


@pytest.fixture
def card() -> "Gpu":
    """A real one; tests that ask for it are marked gpu."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from draftree.kernels.cuda.compile import gpu

    if not torch.cuda.is_available():
        pytest.skip("no CUDA device")
    return gpu(0)


@pytest.fixture(params=["emulated", pytest.param("card", marks=pytest.mark.gpu)])
def any_gpu(request: pytest.FixtureRequest) -> "Gpu":
    if request.param == "card":
        return request.getfixturevalue("card")
    pytest.importorskip("torch", reason="torch is not installed")
    from tests.kernels.emulator import emulated_gpu

    return emulated_gpu()
