"""Which formats and depths are measured."""

import pytest

from benchmarks.gpu_depth import DEPTHS, FORMATS, read_runs
from draftree.errors import BenchError


def test_runs_are_read() -> None:
    assert read_runs(FORMATS) == dict.fromkeys(FORMATS, DEPTHS)
    assert read_runs(["q4=512,65536", "f16 unlimited"]) == {
        "q4": (512, 65536),
        "f16 unlimited": DEPTHS,
    }


@pytest.mark.parametrize("word", ["q5", "q4=deep", "=512", "q4=1,-2"])
def test_what_names_no_run_is_refused(word: str) -> None:
    with pytest.raises(BenchError, match="names no run; formats are f16, q8_0"):
        read_runs([word])
