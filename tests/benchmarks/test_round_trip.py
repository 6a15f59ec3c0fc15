"""Weights that an export changes are counted, each of them; the default model's draft has none."""

import json
from pathlib import Path

import numpy as np

from benchmarks.round_trip import count_changed, measure
from draftree.drafts.export import SYSTEMS
from draftree.weights.hub import draft_for

RESULT = Path(__file__).parents[2] / "results/draft/export/smollm2-135m.json"


def test_every_bit_counts():
    ones = {"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float32)}
    assert count_changed({**ones}, ones) == 0
    other = np.ones((2, 3), np.float32)
    other[1, 2] = np.nextafter(np.float32(1), np.float32(2))
    assert count_changed({**ones, "a": other}, ones) == 1
    assert count_changed({**ones, "b": -ones["b"]}, ones) == 4
    assert count_changed({"a": ones["a"]}, ones) == 4
    assert count_changed({**ones, "c": ones["b"]}, ones) == 4
    assert count_changed({**ones, "a": ones["a"].T.copy()}, ones) == 6


def test_the_default_draft_comes_back_as_it_was(smollm2_path):
    found = measure(smollm2_path, draft_for("smollm2-135m"))
    assert found == json.loads(RESULT.read_text(encoding="utf-8"))["measures"]
    assert found["num_changed"] == dict.fromkeys(SYSTEMS, 0)
