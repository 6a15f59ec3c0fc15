"""A tiny real model, and somebody who is told how far a measurement is."""

from pathlib import Path

import pytest

from tests.golden import golden


@pytest.fixture(scope="session")
def tiny_path() -> Path:
    return golden("dense/tiny-llama-A-F16.gguf")


@pytest.fixture
def say():
    lines = []

    def report(text):
        lines.append(text)

    report.lines = lines
    return report
