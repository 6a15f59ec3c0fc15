"""Which budget is the best on this machine: plain decoding, fixed budgets and the automatic one, on
the same prompts.

In: a model, prompts, budgets. Out: rates, AL, speed-up over plain decoding and the texts' equality
by budget. One engine is open at a time; every pass goes through all budgets, so that a slow moment
of the machine does not meet one of them alone.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from draftree.bench import writing
from draftree.bench.dataset import Prompt
from draftree.bench.median import Ratio, Report, Samples, divide, summarize
from draftree.bench.writing import Text, encode_prompt, open_writer, write_text
from draftree.config import EngineConfig
from draftree.errors import BenchError

PLAIN: Final = "0"
AUTO: Final = "auto"
BUDGETS: Final = (PLAIN, "1", "2", "4", "8", "15", "22", "40", "64", AUTO)


@dataclass(frozen=True, slots=True)
class BudgetOptions:
    config: EngineConfig  # its budget is replaced by those below
    passes: int
    num_tokens: int
    budgets: tuple[str, ...] = BUDGETS


@dataclass(frozen=True, slots=True)
class BudgetRow:
    rate: Samples  # tok/s over all prompts, of each pass
    speed_up: Ratio  # over plain decoding
    acceptance_length: float
    nodes_per_round: float
    num_texts: int
    num_equal: int  # to the texts of plain decoding


@dataclass(frozen=True, slots=True)
class BudgetMeasures:
    """best: the budget with the highest median rate. refused: budgets that the engine refused."""

    device: str
    drafting: str
    num_prompts: int
    budgets: dict[str, BudgetRow]
    best: str
    best_fixed: str
    refused: dict[str, str]

    def headline(self) -> dict[str, Any]:
        rows = self.budgets.values()
        return {
            "best": self.best,
            "best_fixed": self.best_fixed,
            "tokens_per_second": {name: row.rate.median for name, row in self.budgets.items()},
            "num_equal": sum(row.num_equal for row in rows),
            "num_texts": sum(row.num_texts for row in rows),
        }


def measure_budget(
    path: Path, prompts: Sequence[Prompt], options: BudgetOptions, report: Report
) -> BudgetMeasures:
    if not prompts:
        raise BenchError("There are no prompts to measure.")
    budgets = (PLAIN, *(budget for budget in options.budgets if budget != PLAIN))
    found: dict[str, list[list[Text]]] = {}
    refused: dict[str, str] = {}
    words: dict[str, tuple[str, str]] = {}
    for number in range(options.passes):
        for step, name in enumerate(budgets):
            done = number * len(budgets) + step + 1
            report(f"budget {name}: step {done} of {options.passes * len(budgets)}")
            if name in refused:
                continue
            try:
                texts, words[name] = _write_all(path, prompts, options, name)
            except ValueError as error:
                if name in (PLAIN, AUTO):
                    raise
                refused[name] = str(error)  # more nodes than the device takes
            else:
                found.setdefault(name, []).append(texts)
    device, source = words[max(words)]  # of one that drafts, where there is one
    rows = summarize_budgets(found)
    return BudgetMeasures(device, source, len(prompts), rows, *find_best(rows), refused)


def _write_all(
    path: Path, prompts: Sequence[Prompt], options: BudgetOptions, name: str
) -> tuple[list[Text], tuple[str, str]]:
    """A text for each prompt, and in words where they were written and who drafted."""
    config = replace(options.config, budget=name if name == AUTO else int(name))
    config = writing.without_drafts(config) if name == PLAIN else config
    with open_writer(path, config) as engine:
        texts = [
            write_text(
                engine.tokens,
                encode_prompt(engine, prompt, options.num_tokens),
                options.num_tokens,
                stop_ids=engine.tokenizer.stop_ids,
            )
            for prompt in prompts
        ]
        return texts, (writing.device_name(engine), writing.describe_drafts(engine))


def summarize_budgets(found: Mapping[str, Sequence[Sequence[Text]]]) -> dict[str, BudgetRow]:
    """By budget, for each pass: its texts in the order of the prompts. PLAIN is one of them."""
    rates = {
        name: summarize([writing.total_rate([t.usage for t in texts]) for texts in passes], "tok/s")
        for name, passes in found.items()
    }
    expected = [text.tokens for texts in found[PLAIN] for text in texts]
    rows = {}
    for name, passes in found.items():
        texts = [text for one in passes for text in one]
        usages = [text.usage for text in texts]
        num_rounds = sum(u.rounds.num_rounds for u in usages)
        rows[name] = BudgetRow(
            rate=rates[name],
            speed_up=divide(rates[name], rates[PLAIN]),
            acceptance_length=writing.acceptance_length(usages),
            nodes_per_round=round(sum(u.rounds.num_drafted for u in usages) / num_rounds, 2),
            num_texts=len(texts),
            num_equal=sum(a == b.tokens for a, b in zip(expected, texts, strict=True)),
        )
    return rows


def find_best(rows: Mapping[str, BudgetRow]) -> tuple[str, str]:
    """The fastest budget, and the fastest of those that are fixed; plain decoding is one."""

    def fastest(names: Sequence[str]) -> str:
        return max(names, key=lambda name: rows[name].rate.median)

    return fastest(list(rows)), fastest([name for name in rows if name != AUTO])
