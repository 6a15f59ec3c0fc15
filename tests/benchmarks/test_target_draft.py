"""Targets of packaged drafts, from results of made-up lengths."""

import pytest

from benchmarks.target import judge_targets
from benchmarks.target_draft import DRAFT_KIND, DRAFT_TARGETS
from benchmarks.verdict import CODER, HYBRID
from draftree.bench.record import Json

SETS = ("humaneval", "gsm8k", "math500", "chat")


def run(
    data: str, length: float, *, budget: int = 22, block: int = 0, temperature: float = 0.0
) -> Json:
    setting = {"budget": budget, "block": block, "temperature": temperature}
    return {
        "data": data,
        "setting": setting,
        "acceptance_length": length,
        "num_prompts": 10,
        "num_equal": 10 if length else 9,
    }


def judge(runs: list[Json], sha256: str = CODER) -> dict[str, tuple[float | None, str]]:
    record: Json = {"kind": DRAFT_KIND, "model": {"sha256": sha256}, "measures": {"runs": runs}}
    record["machine"] = {"cpu": "any"}
    verdicts = judge_targets([record], targets=DRAFT_TARGETS)
    return {v.target.what: (v.value, v.words) for v in verdicts if v.target.sha256 == sha256}


def test_lengths_of_trees_of_22_are_judged() -> None:
    trees = [run(name, length) for name, length in zip(SETS, (5.5, 4.0, 4.0, 3.0), strict=True)]
    found = judge([*trees, run("humaneval", 9.0, budget=7)])
    assert found["acceptance length, budget 22, humaneval"] == (5.5, "target reached")
    value, words = found["acceptance length, budget 22, mean of four sets"]
    assert value == pytest.approx(4.12, abs=0.01) and words == "target reached"
    assert found["texts that drafting changed"] == (0, "aim reached")


def test_a_hybrid_is_judged_by_its_tree_over_a_chain() -> None:
    what = "acceptance length, budget 22, over a chain of 15"
    trees = [run(name, 4.4) for name in SETS]
    chains = [run(name, 4.0, budget=15, block=16) for name in SETS]
    others = [run(name, 9.0, budget=15, block=8) for name in SETS]
    assert judge([*trees, *chains, *others], HYBRID)[what] == (1.1, "aim reached")
    assert judge([*trees, *chains[1:], *others], HYBRID)[what][0] is None


def test_a_mean_needs_all_sets() -> None:
    found = judge([run("chat", 4.0)])
    assert found["acceptance length, budget 22, mean of four sets"] == (None, "not measured")


def test_a_changed_text_is_a_miss() -> None:
    assert judge([run("chat", 0.0)])["texts that drafting changed"] == (1, "missed")
