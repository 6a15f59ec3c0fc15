"""Budgets on a tiny model, and who is the best."""

import pytest

from benchmarks import budget
from benchmarks.budget import BudgetOptions, find_best, measure_budget, summarize_budgets
from draftree.bench.dataset import Prompt
from draftree.bench.writing import Text
from draftree.config import EngineConfig
from draftree.core import RoundStats, Usage
from draftree.errors import BenchError

CONFIG = EngineConfig("cpu", threads=1, max_ctx=128)
PROMPTS = [Prompt("one two one two one two one two", False), Prompt("x = 1", False)]


def text(tokens, decode_ms, num_rounds):
    rounds = RoundStats(num_rounds=num_rounds, num_drafted=3 * num_rounds)
    return Text(tokens, Usage(completion_tokens=4, decode_ms=decode_ms, rounds=rounds))


def test_budgets_are_compared_pass_by_pass():
    found = {
        "0": [[text([1], 40.0, 4)], [text([1], 80.0, 4)]],
        "8": [[text([1], 20.0, 2)], [text([2], 20.0, 2)]],
        "auto": [[text([1], 10.0, 1)], [text([1], 10.0, 1)]],
    }
    rows = summarize_budgets(found)
    assert rows["0"].rate.samples == (100.0, 50.0) and rows["0"].speed_up.value == 1.0
    assert (rows["8"].speed_up.low, rows["8"].speed_up.high) == (2.0, 4.0)
    assert (rows["8"].num_equal, rows["8"].num_texts) == (1, 2)
    assert (rows["8"].acceptance_length, rows["8"].nodes_per_round) == (2.0, 3.0)
    assert find_best(rows) == ("auto", "8")


def test_budgets_on_a_tiny_model(tiny_path, say):
    options = BudgetOptions(CONFIG, 2, 10, ("2", "0", "auto"))
    measures = measure_budget(tiny_path, PROMPTS, options, say)
    assert list(measures.budgets) == ["0", "2", "auto"]
    assert measures.refused == {} and measures.num_prompts == 2
    assert measures.best in measures.budgets and measures.best_fixed in ("0", "2")
    assert (measures.device, measures.drafting) == ("CPU", "lookup in the text so far")
    for row in measures.budgets.values():
        assert row.num_equal == row.num_texts == 4 and len(row.rate.samples) == 2
    assert measures.budgets["0"].nodes_per_round == 0.0
    assert say.lines[-1] == "budget auto: step 6 of 6"


def test_what_the_engine_refuses_is_said(tiny_path, say, monkeypatch):
    real = budget.open_writer

    def refuse(path, config):
        if config.budget == 2:
            raise ValueError("on a GPU the budget is at most 1")
        return real(path, config)

    monkeypatch.setattr(budget, "open_writer", refuse)
    options = BudgetOptions(CONFIG, 1, 4, ("2", "auto"))
    measures = measure_budget(tiny_path, PROMPTS[:1], options, say)
    assert measures.refused == {"2": "on a GPU the budget is at most 1"}
    assert list(measures.budgets) == ["0", "auto"]


def test_no_prompts_are_refused(tiny_path, say):
    with pytest.raises(BenchError, match="no prompts"):
        measure_budget(tiny_path, [], BudgetOptions(CONFIG, 1, 4), say)
