"""Where the reference data lives: copied into tests/golden, or shared beside the checkout."""

from pathlib import Path

import pytest

_HERE = Path(__file__).parent / "golden_data"
_SHARED = Path(__file__).parents[2] / "shared" / "golden"


def golden(name: str) -> Path:
    """The path of one reference file; the test is skipped where it is not at hand."""
    for root in (_HERE, _SHARED):
        if (root / name).exists():
            return root / name
    pytest.skip(f"reference file {name} is not part of this checkout")
