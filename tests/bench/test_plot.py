"""Plots are pictures, the same for the same figures."""

import sys

import pytest

from draftree.bench.fault import BenchError
from draftree.bench.plot import draw_plots
from tests.bench import example


def test_plots_are_drawn_twice_alike(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    records = [example.record("decode"), example.record("prefill"), example.record("start")]
    names = draw_plots(records, tmp_path)
    assert names == ["decode-passes-smollm2.png", "decode-operations-smollm2.png"]
    first = [(tmp_path / name).read_bytes() for name in names]
    assert all(data.startswith(b"\x89PNG") and len(data) > 5000 for data in first)
    draw_plots(records, tmp_path)
    assert [(tmp_path / name).read_bytes() for name in names] == first


def test_nothing_to_draw(tmp_path):
    pytest.importorskip("matplotlib", reason="plots need the extra `bench`")
    assert draw_plots([example.record("start")], tmp_path) == []


def test_missing_package_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(BenchError, match="--no-plots"):
        draw_plots([example.record("decode")], tmp_path)
