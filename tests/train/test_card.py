"""Cards and docs say what the records of the packaged drafts' training say."""

import json
from pathlib import Path

import pytest

from draftree.train.card import draw_curve, make_card
from draftree.train.loop import CurvePoint

ROOT = Path(__file__).parents[2]
RESULTS = ROOT / "results/draft/smollm2-135m"
RECORD = json.loads((RESULTS / "training.json").read_text())
FIRST, SECOND, THIRD = (  # the runs before it
    json.loads((RESULTS / f"training-{name}.json").read_text())
    for name in ("first", "second", "third")
)


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("smollm2-135m", "SmolLM2-135M-Instruct DFlash"),
        ("qwen2.5-coder-0.5b", "Qwen2.5-Coder-0.5B-Instruct DFlash"),
    ],
)
def test_the_shipped_cards_are_the_records(name: str, title: str):
    record = json.loads((RESULTS.parent / name / "training.json").read_text())
    card = (ROOT / f"draftree/data/{name}-dflash.md").read_text()
    assert card.startswith(make_card(record, title))


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
