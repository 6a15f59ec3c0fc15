"""Parts are written as they come, and outlive a run that is cut short."""

import json

import pytest

from benchmarks.parts import Deadline, PartResult, choose_parts, run_parts, shorten
from draftree.bench.median import summarize
from draftree.bench.record import ModelId
from draftree.errors import BenchError

MODEL = ModelId("m", "m.gguf", 1, "0")


def result(folder, **settings):
    return PartResult(folder, "gpu-requests", MODEL, settings, "A GPU")


def read(folder):
    return json.loads((folder / "gpu-requests-m.json").read_text())["measures"]["parts"]


def run(folder, parts, deadline=None, **settings):
    asked = deadline or Deadline(60), lambda text: None
    return run_parts(result(folder, **settings), parts, *asked)


def test_what_was_measured_before_a_failure_is_there(tmp_path):
    def fail():
        assert read(tmp_path) == {"a": {"x": 1}}, "the first part is on disk already"
        raise RuntimeError("out of memory")

    line = run(tmp_path, {"a": lambda: {"x": 1}, "b": fail, "c": lambda: {"y": 2}})
    assert read(tmp_path) == {"a": {"x": 1}, "c": {"y": 2}}
    assert line["left_out"] == {"b": "RuntimeError: out of memory"}
    assert line["figures"] == {"a": {"x": 1}, "c": {"y": 2}}


def test_no_part_begins_after_the_limit(tmp_path):
    now = [0.0]
    deadline = Deadline(10, clock=lambda: now[0])

    def slow():
        now[0] += 11
        return {"x": 1}

    line = run(tmp_path, {"a": slow, "b": pytest.fail}, deadline)
    assert line["left_out"] == {"b": "there was no time left"} and deadline.is_over


def test_a_later_run_adds_to_the_file_if_it_asks_the_same(tmp_path):
    run(tmp_path, {"a": lambda: {"x": 1}, "b": lambda: {"x": 1}}, limit=4)
    run(tmp_path, {"b": lambda: {"x": 2}}, limit=4)
    assert read(tmp_path) == {"a": {"x": 1}, "b": {"x": 2}}
    run(tmp_path, {"b": lambda: {"x": 3}}, limit=5)
    assert read(tmp_path) == {"b": {"x": 3}}


def test_results_of_other_kernels_are_not_mixed_in(tmp_path):
    run(tmp_path, {"a": lambda: {"x": 1}})
    path = tmp_path / "gpu-requests-m.json"
    data = json.loads(path.read_text())
    data["machine"]["gpu_kernels"] = "older"
    path.write_text(json.dumps(data))
    run(tmp_path, {"b": lambda: {"x": 2}})
    assert read(tmp_path) == {"b": {"x": 2}}


def test_a_run_without_a_figure_is_an_error(tmp_path):
    with pytest.raises(BenchError, match="Nothing could be measured"):
        run(tmp_path, {"a": lambda: 1 / 0})


def test_parts_are_chosen_by_name():
    known = {"a": dict, "b": dict}
    assert list(choose_parts((), known)) == ["a", "b"]
    assert list(choose_parts(("b",), known)) == ["b"]
    with pytest.raises(BenchError, match="There is no part 'c'; known are a, b"):
        choose_parts(("c",), known)


def test_the_last_line_is_short():
    from dataclasses import asdict

    samples = asdict(summarize([1.0, 3.0, 2.0], "ms"))
    ratio = {"value": 0.5, "low": 0.4, "high": 0.6}
    assert shorten({"a": {"s": samples, "r": ratio, "list": [1]}}) == {"a": {"s": 2.0, "r": 0.5}}
