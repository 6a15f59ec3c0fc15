"""Fixtures that several parts share: real model files."""

from pathlib import Path

import pytest

from draftree.errors import DraftreeError


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
