"""Perplexity, needles and choices by format, on figures that can be checked and on a tiny model."""

from dataclasses import replace
from math import log

import pytest

from benchmarks.kv_quality import KvQualityOptions, check_pairs, judge, measure_kv_quality
from benchmarks.kv_reading import Reading
from benchmarks.needle import Haystack
from draftree.errors import BenchError
from tests.tiny import tiny_path


def test_figures_of_a_format() -> None:
    hay = Haystack([], [], [], [2048])
    base = Reading([-log(2.0)] * 3, [1, 2, 3], {"2048": [True, False]})
    other = Reading([-log(2.0), -log(4.0), -log(8.0)], [1, 9, 3], {"2048": [True, True]})
    got = judge([base, base], [base, other], [hay, hay], None)
    assert got.over_f16 == pytest.approx(2**0.5 - 1, abs=1e-6)
    assert got.perplexity == pytest.approx(2 * 2**0.5, abs=1e-4)
    assert got.same_choices == pytest.approx(5 / 6, abs=1e-4)
    assert got.needles == {"2048": [4, 3, 3]}
    assert judge([base], [base], [hay], None).stderr == 0.0


def test_formats_that_are_none() -> None:
    with pytest.raises(BenchError, match="q5 is no format; known are f16, q8_0"):
        check_pairs(["q4", "q5"], 64)
    with pytest.raises(BenchError, match="q8_0/q4 cannot hold heads of 96 dimensions"):
        check_pairs(["f16", "q8_0/q4"], 96)


def test_a_tiny_model_is_measured_once(tmp_path, say) -> None:
    options = KvQualityOptions(1, (128,), 256, ("q4", "f16/q4"), tmp_path)
    path = tiny_path("qwen3")
    first = measure_kv_quality(path, "hash", options, say)
    (item,) = first.lengths.values()
    assert list(item.formats) == ["f16", "q4", "f16/q4"] and 100 < item.num_tokens < 256
    assert item.formats["f16"].over_f16 == 0.0 and item.formats["f16"].error is None
    assert item.formats["q4"].over_f16 != 0.0 and item.formats["q4"].error is not None
    assert item.formats["f16/q4"].error is None
    assert len(list(tmp_path.iterdir())) == 6
    for kept in tmp_path.iterdir():
        kept.write_text(kept.read_text().replace("[-", "[-9"))  # what is kept is what is read
    again = measure_kv_quality(path, "hash", options, say)
    assert again.lengths["128"].formats["f16"].perplexity > item.formats["f16"].perplexity
    other = measure_kv_quality(path, "hash", replace(options, cache=tmp_path / "new"), say)
    assert other == first
