"""How acceptance is counted, and that the chat prompts are there."""

import hashlib
import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.acceptance import (
    MAIN,
    SHAPES,
    Setting,
    load_set,
    make_speed_table,
    make_table,
    summarize_texts,
)
from draftree.bench.writing import Text
from draftree.core import RoundStats, Usage

ROOT = Path(__file__).parents[2]
SETTING = Setting("tree", 22, 0, 0.0)


def _text(tokens: list[int], num_rounds: int, verified: list[int], accepted: list[int]) -> Text:
    rounds = RoundStats(num_rounds=num_rounds, num_drafted=22 * num_rounds)
    rounds.verified_by_depth, rounds.accepted_by_depth = verified, accepted
    usage = Usage(completion_tokens=len(tokens), decode_ms=100.0 * num_rounds, rounds=rounds)
    return Text(tokens, usage)


def test_lengths_are_pooled_over_prompts() -> None:
    plain = [_text([1, 2, 3, 4], 4, [], []), _text([5, 6], 2, [], [])]
    drafted = [_text([1, 2, 3, 4], 2, [2, 1], [1, 1]), _text([5, 7], 1, [1, 1], [1, 0])]
    run = summarize_texts("chat", SETTING, plain, drafted, 0.1)
    assert run.acceptance_length == 2.0 and run.num_equal == 1
    assert run.accepted_by_depth == [0.6667, 0.5] and run.nodes_per_round == 22.0
    assert (run.plain_tokens_per_second, run.tokens_per_second) == (10.0, 20.0)


def test_there_are_twenty_chat_prompts() -> None:
    prompts = load_set("chat", 20, Path())
    assert len(set(prompts)) == 20 and all(prompt.is_chat for prompt in prompts)
    assert load_set("chat", 5, Path()) == prompts[::4]


def test_chains_and_trees_are_compared_at_equal_cost() -> None:
    budgets = {s.name: s.budget for s in SHAPES}
    assert budgets["chain of 7"] == budgets["tree of 7"] and budgets["chain of 5"] == 5
    assert all(s.budget == s.block - 1 for s in SHAPES if s.name.startswith("chain"))
    assert {(s.budget, s.temperature) for s in MAIN} == {
        (budget, temperature) for budget in (22, "auto") for temperature in (0.0, 0.8)
    }


def _result(name: str, pair: str = "smollm2-135m") -> dict[str, Any]:
    result = json.loads((ROOT / "results/draft" / pair / name).read_text())
    assert isinstance(result, dict)
    return result


@pytest.mark.parametrize("name", ["acceptance.json", "acceptance-gpu.json"])
def test_the_docs_show_the_results(name: str) -> None:
    result = _result(name)
    table = make_table(result)
    assert table.count("\n") == 10  # two lines of heading, nine settings
    assert table in (ROOT / "docs/training.md").read_text()


@pytest.mark.parametrize("pair", ["smollm2-135m", "qwen2.5-coder-0.5b"])
def test_the_cards_show_the_results(pair: str) -> None:
    result = _result("acceptance.json", pair)
    assert make_table(result) in (ROOT / f"draftree/data/{pair}-dflash.md").read_text()
    assert make_table(result) in (ROOT / "docs/training.md").read_text()
    assert all(run["num_equal"] == run["num_prompts"] for run in result["runs"])
    draft = ROOT / "draftree/data" / result["draft"]["file"]
    assert hashlib.sha256(draft.read_bytes()).hexdigest() == result["draft"]["sha256"]


def test_the_docs_show_the_draft_of_a_hybrid() -> None:
    result = _result("acceptance.json", "small-hybrid")
    assert make_table(result) in (ROOT / "docs/training.md").read_text()
    assert all(run["num_equal"] == run["num_prompts"] for run in result["runs"])


def test_the_docs_show_how_much_faster_it_is() -> None:
    text = (ROOT / "docs/training.md").read_text()
    on_cpu = make_speed_table(_result("acceptance.json"), (MAIN[2], MAIN[3]))
    on_gpu = make_speed_table(_result("acceptance-gpu.json"), MAIN)
    assert (on_cpu.count("\n"), on_gpu.count("\n")) == (3, 5)
    assert on_cpu in text and on_gpu in text


def test_the_shipped_draft_is_lossless_and_good_enough() -> None:
    for name in ("acceptance.json", "acceptance-gpu.json"):
        runs = _result(name)["runs"]
        assert all(run["num_equal"] == run["num_prompts"] for run in runs)
        greedy = [r["acceptance_length"] for r in runs if Setting(**r["setting"]) == MAIN[0]]
        assert len(greedy) == 4 and sum(greedy) / 4 >= 3.0
