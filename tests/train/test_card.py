"""The card and the docs say what the record of the default pair's training says."""

import json
from pathlib import Path

from draftree.train.card import draw_curve, make_card
from draftree.train.loop import CurvePoint

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results/draft/smollm2-135m"
RECORD = json.loads((RESULTS / "training.json").read_text())
FIRST, SECOND, THIRD = (  # the runs before it
    json.loads((RESULTS / f"training-{name}.json").read_text())
    for name in ("first", "second", "third")
)


def test_the_shipped_card_is_the_records():
    card = make_card(RECORD, "SmolLM2-135M-Instruct DFlash")
    assert (ROOT / "draftree/data/smollm2-135m-dflash.md").read_text().startswith(card)


def test_the_docs_quote_the_record():
    text = (ROOT / "docs/training.md").read_text()
    for record in (FIRST, SECOND, THIRD, RECORD):
        for point in record["curve"]:
            if point["step"] in (500, 1000, 2000, 4000, record["curve"][-1]["step"]):
                row = f"{point['held_out_loss']:.2f} | {point['acceptance_length']:.2f}"
                assert f"| {point['step']:,} | {point['seconds'] / 60:.1f} | {row} |" in text
        assert f"{record['text']['num_written'] / 1e6:.1f} million" in text


def test_what_was_not_measured_is_not_shown_as_a_number():
    last = {**RECORD["curve"][-1], "sampled_acceptance_length": None}
    card = make_card({**RECORD, "curve": [last]}, "X")
    assert "| not measured |" in card


def test_own_prompts_and_the_start_are_named():
    plan = {**FIRST["config"]["text"], "num_own_prompts": 1234}
    text = {**FIRST["text"], "source": "mine.jsonl"}
    config = {**FIRST["config"], "text": plan}
    card = make_card({**FIRST, "config": config, "text": text, "start": "first"}, "X")
    assert "| 1,234 that the target wrote itself, and mine.jsonl |" in card
    assert "| started from | first |" in card
    alone = make_card({**FIRST, "config": config, "text": {**text, "source": ""}}, "X")
    assert "| 1,234 that the target wrote itself |" in alone and "started from" not in alone
    assert "hold no test set" in make_card(FIRST, "X") and "hold no test set" not in card


def test_a_curve_is_drawn_where_matplotlib_is(tmp_path):
    curve = [CurvePoint(**point) for point in RECORD["curve"]]
    assert draw_curve(curve, tmp_path / "curve.png") == (tmp_path / "curve.png").exists()


def test_late_rounding_and_a_smaller_loss_are_named():
    schedule = {**RECORD["config"]["schedule"], "four_bit_from": 0.7, "num_loss_tokens": 16384}
    card = make_card({**RECORD, "config": {**RECORD["config"], "schedule": schedule}}, "X")
    assert "| matrices | rounded to four bits after 70% of the schedule, as in the file |" in card
    assert "| tokens in the loss | the 16,384 most frequent |" in card
