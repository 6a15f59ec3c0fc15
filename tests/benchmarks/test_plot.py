"""Plots are pictures, the same for the same figures, and only where there is data."""

import sys

import pytest

from benchmarks.plot import PLOTS, draw_pictures, draw_plots, plots_of
from benchmarks.result import KINDS
from draftree.bench.record import write_record
from draftree.errors import BenchError
from tests.benchmarks import example
from tests.needs import needs_package

MAX_BYTES = 100_000


@needs_package("matplotlib")
def test_every_plot_is_a_small_picture(tmp_path):
    for kind in KINDS:
        write_record(tmp_path, example.record(kind))
    names = draw_plots(tmp_path, tmp_path / "plots")
    assert sorted(names) == sorted(f"{plot.name}-smollm2.png" for plot in PLOTS)
    for name in names:
        data = (tmp_path / "plots" / name).read_bytes()
        assert data.startswith(b"\x89PNG") and 5000 < len(data) < MAX_BYTES


@needs_package("matplotlib")
def test_plots_are_drawn_twice_alike(tmp_path):
    write_record(tmp_path, example.record("budget"))
    (name,) = draw_plots(tmp_path, tmp_path / "a")
    assert draw_plots(tmp_path, tmp_path / "b") == [name]
    assert (tmp_path / "a" / name).read_bytes() == (tmp_path / "b" / name).read_bytes()
    pictures = draw_pictures(tmp_path)
    assert list(pictures) == [name] and pictures == draw_pictures(tmp_path)
    assert pictures[name].startswith("<svg")


@needs_package("matplotlib")
def test_a_folder_in_the_folder_has_pictures_of_its_own(tmp_path):
    write_record(tmp_path / "laptop", example.record("peers"))
    assert draw_plots(tmp_path, tmp_path / "plots") == ["peers-smollm2-laptop.png"]


@needs_package("matplotlib")
def test_only_what_was_measured_is_drawn(tmp_path):
    record = example.record("suite")
    assert [plot.name for plot in plots_of(record)] == [
        *("suite-speed-up", "suite-rounds", "suite-stages"),
    ]
    for item in record["measures"]["sets"].values():  # a device that runs whole rounds
        item["stage_ms"] |= dict.fromkeys(("draft", "tree", "accept", "commit"), 0.0)
        del item["rounds_by_length"]
    assert [plot.name for plot in plots_of(record)] == ["suite-speed-up"]
    write_record(tmp_path, example.record("start"))
    assert draw_plots(tmp_path, tmp_path / "plots") == []


def test_missing_package_is_a_sentence(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    write_record(tmp_path, example.record("decode"))
    with pytest.raises(BenchError, match="--no-plots"):
        draw_plots(tmp_path, tmp_path / "plots")
