"""Which formats and depths are measured."""

from dataclasses import asdict
from pathlib import Path

import pytest

from benchmarks.gpu_depth import DEPTHS, FORMATS, find_kept, read_runs
from draftree.bench.machine import describe_machine
from draftree.bench.record import ModelId, make_record, write_record
from draftree.errors import BenchError
from tests.benchmarks.example import gpu_depth


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


def test_runs_of_the_same_kernels_and_settings_are_kept(tmp_path: Path) -> None:
    measures, settings = gpu_depth(), {"memory": 24.0}
    model = ModelId("model", "model.gguf", 1, "")
    path = write_record(tmp_path, make_record("gpu-depth", model, settings, measures, None))
    here = asdict(describe_machine())
    assert find_kept(path, here, settings) == measures.runs
    assert not find_kept(path, here | {"gpu_kernels": "others"}, settings)
    assert not find_kept(path, here, {"memory": 16.0})
    path.write_text(path.read_text(encoding="utf-8")[:200], encoding="utf-8")
    assert not find_kept(path, here, settings)
    assert not find_kept(tmp_path / "none.json", here, settings)
