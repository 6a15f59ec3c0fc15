"""The GPU's part of the page, and its targets. The measuring itself needs a GPU."""

from dataclasses import replace

from benchmarks.report import make_page
from benchmarks.target import judge_targets
from benchmarks.verdict import SYNTH
from draftree.bench.record import ModelId, make_record
from draftree.bench.synthetic import identify_pair
from tests.benchmarks import example

MODEL = ModelId("synth-27b", "synth-27b-target.gguf", 16_500_000_000, SYNTH)


def record(measures):
    return make_record("gpu", MODEL, example.SETTINGS["gpu"], measures, None)


def test_the_targets_are_those_of_the_synthetic_flagship(tmp_path) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(b"x")
    assert identify_pair("27b", path).sha256 == SYNTH


def test_a_changed_text_is_a_missed_target() -> None:
    def verdict(measures):
        verdicts = [v for v in judge_targets([record(measures)]) if v.target.kind == "gpu"]
        return {v.target.what: v.words for v in verdicts}["texts that drafting changed"]

    good = example.gpu()
    (item,) = good.equality.values()
    bad = replace(good, equality={"greedy": replace(item, num_equal=2)})
    assert verdict(good) == "aim reached" and verdict(bad) == "missed"


def test_the_page_shows_gpu_targets_beside_gpu_results_only(tmp_path) -> None:
    import json

    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "gpu.json").write_text(json.dumps(record(example.gpu())))
    page = make_page(tmp_path)
    assert "2.50 J a plain token, 4.00 J a round." in page
    assert "plain decoding at depth 65536" in page and "decode against llama.cpp" not in page
    (tmp_path / "start.json").write_text(json.dumps(example.record("start")))
    both = make_page(tmp_path)
    assert both.count("### Targets") == 2 and "decode against llama.cpp" in both
