"""The GPU's part of the page, and its bars. The measuring itself needs a card."""

from dataclasses import replace

from draftree.bench.bar import SYNTH, judge_bars
from draftree.bench.record import ModelId, make_record
from draftree.bench.report import make_page
from draftree.bench.synth import identify_pair
from tests.bench import example

MODEL = ModelId("synth-27b", "synth-27b-target.gguf", 16_500_000_000, SYNTH)


def record(measures):
    return make_record("card", MODEL, example.SETTINGS["card"], measures, None)


def test_the_bars_are_those_of_the_made_up_flagship(tmp_path) -> None:
    path = tmp_path / "t.gguf"
    path.write_bytes(b"x")
    assert identify_pair("27b", path).sha256 == SYNTH


def test_a_changed_text_is_a_missed_bar() -> None:
    def verdict(measures):
        (found,) = (
            v for v in judge_bars([record(measures)]) if v.bar.what == "texts that drafting changed"
        )
        return found.words

    good = example.card()
    (item,) = good.equality.values()
    bad = replace(good, equality={"greedy": replace(item, num_equal=2)})
    assert verdict(good) == "aim reached" and verdict(bad) == "missed"


def test_the_page_shows_card_bars_beside_card_results_only(tmp_path) -> None:
    import json

    (tmp_path / "gpu").mkdir()
    (tmp_path / "gpu" / "card.json").write_text(json.dumps(record(example.card())))
    page = make_page(tmp_path)
    assert "plain decoding at depth 65536" in page and "decode against llama.cpp" not in page
    (tmp_path / "start.json").write_text(json.dumps(example.record("start")))
    both = make_page(tmp_path)
    assert both.count("### Bars") == 2 and "decode against llama.cpp" in both
