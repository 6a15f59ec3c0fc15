"""How good a draft is: acceptance length by data set, budget and temperature, trees against chains,
and whether every text is the one that plain decoding gives.

In: a model and its draft. Out: a result file, one run per set and setting. Times are those of this
machine and secondary here; with a fixed budget everything else is the same on every machine.
"""

import json
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from importlib.resources import files
from pathlib import Path
from typing import Any, Final

from draftree.bench.dataset import Prompt, load_prompts
from draftree.bench.disturbance import foreign_share, look
from draftree.bench.machine import describe_machine
from draftree.bench.record import identify_model
from draftree.bench.writing import (
    Text,
    acceptance_length,
    accepted_shares,
    encode_prompt,
    total_rate,
    write_text,
)
from draftree.chat import Engine
from draftree.core import SamplingParams
from draftree.engine.locate import count_block
from draftree.memory import usable_cores
from draftree.weights.file import open_checkpoint

SETS: Final = ("humaneval", "gsm8k", "math500", "chat")
_SEED: Final = 7
_MAX_CTX: Final = 2048
_AUTO_PASSES: Final = 3
_WARM_UP: Final = Prompt("one two three four " * 12, is_chat=False)  # repeats: it is drafted


@dataclass(frozen=True, slots=True)
class Setting:
    """A chain is a tree of one candidate a position: budget = block - 1."""

    name: str
    budget: int | str
    block: int  # 0 is the draft's own
    temperature: float
    width: int = 0  # candidates of a position; 0: any number


MAIN: Final = (
    Setting("tree", 22, 0, 0.0),
    Setting("tree", 22, 0, 0.8),
    Setting("auto", "auto", 0, 0.0),
    Setting("auto", "auto", 0, 0.8),
)
SHAPES: Final = (
    Setting("chain of 7", 7, 8, 0.0, width=1),
    Setting("tree of 7", 7, 0, 0.0),
    Setting("chain of 5", 5, 6, 0.0, width=1),
    Setting("tree of 5", 5, 0, 0.0),
    Setting("tree of 15", 15, 0, 0.0),
)
CHAINS: Final = (
    Setting("chain of 15", 15, 16, 0.0, width=1),
    Setting("chain of 15", 15, 16, 0.8, width=1),
)


@dataclass(frozen=True, slots=True)
class SetRun:
    """accepted_by_depth[d]: share of rounds whose tree was that deep and whose path got there."""

    data: str
    setting: Setting
    num_prompts: int  # each as often as it was written on
    num_equal: int
    num_tokens: int
    num_rounds: int
    acceptance_length: float
    accepted_by_depth: list[float]
    nodes_per_round: float
    tokens_per_second: float
    plain_tokens_per_second: float
    disturbance: float | None


def load_set(name: str, limit: int, cache: Path) -> list[Prompt]:
    """Prompts spread evenly over a set."""
    if name == "chat":
        text = (files("benchmarks") / "chat.json").read_text(encoding="utf-8")
        prompts = [Prompt(message, is_chat=True) for message in json.loads(text)]
    else:
        prompts = load_prompts(name, cache)
    step = max(1, len(prompts) // limit)
    return prompts[::step][:limit]


def write_sampled(engine: Engine, prompt: Prompt, num_tokens: int, temperature: float) -> Text:
    ids = encode_prompt(engine, prompt, num_tokens)
    sampling = SamplingParams(temperature=temperature, seed=_SEED)
    stop_ids = engine.tokenizer.stop_ids
    return write_text(engine.tokens, ids, num_tokens, sampling, stop_ids=stop_ids)


def measure_acceptance(
    model: str,
    draft: str,
    sets: dict[str, list[Prompt]],
    settings: Sequence[Setting],
    num_tokens: int,
    report: Callable[[str], None],
    known: Collection[tuple[str, Setting]] = (),
) -> Iterator[SetRun]:
    """One run per set and setting, but for those that are known already. Every text is written
    both ways, one right after the other; with an automatic budget, which follows the machine's
    moods, all sets come several times.
    """
    plain = Engine.open(model, draft="none", budget=0, ngram="off", max_ctx=_MAX_CTX)
    for setting in settings:
        missing = {name: p for name, p in sets.items() if (name, setting) not in known}
        if not missing:
            continue
        drafting = Engine.open(
            model,
            draft=draft,
            budget=setting.budget,
            block=setting.block,
            width=setting.width,
            max_ctx=_MAX_CTX,
        )
        engines = plain, drafting
        for engine in engines:  # kernels are compiled and loaded before anything is timed
            write_sampled(engine, _WARM_UP, num_tokens, setting.temperature)
        pairs: dict[str, list[list[Text]]] = {name: [] for name in missing}
        before = look()
        for number in range(_AUTO_PASSES if setting.budget == "auto" else 1):
            for name, prompts in missing.items():
                report(f"{name}: {setting.name}, temperature {setting.temperature}, {number + 1}")
                pairs[name] += [
                    [write_sampled(e, prompt, num_tokens, setting.temperature) for e in engines]
                    for prompt in prompts
                ]
        share = foreign_share(before, look(), usable_cores())
        for name, texts in pairs.items():
            plain_texts, drafted_texts = zip(*texts, strict=True)
            yield summarize_texts(name, setting, plain_texts, drafted_texts, share)
        drafting.close()
    plain.close()


def summarize_texts(
    name: str,
    setting: Setting,
    plain: Sequence[Text],
    drafted: Sequence[Text],
    disturbance: float | None,
) -> SetRun:
    usages = [text.usage for text in drafted]
    num_rounds = sum(u.rounds.num_rounds for u in usages)
    num_drafted = sum(u.rounds.num_drafted for u in usages)
    return SetRun(
        data=name,
        setting=setting,
        num_prompts=len(drafted),
        num_equal=sum(a.tokens == b.tokens for a, b in zip(plain, drafted, strict=True)),
        num_tokens=sum(u.completion_tokens for u in usages),
        num_rounds=num_rounds,
        acceptance_length=acceptance_length(usages),
        accepted_by_depth=accepted_shares(usages),
        nodes_per_round=round(num_drafted / num_rounds, 2),
        tokens_per_second=round(total_rate(usages), 2),
        plain_tokens_per_second=round(total_rate([text.usage for text in plain]), 2),
        disturbance=disturbance,
    )


def write_acceptance(
    model: Path,
    draft: Path,
    out: Path,
    cache: Path,
    limit: int,
    num_tokens: int,
    say: Callable[[str], None],
) -> None:
    """Main settings and chains on all prompts, shapes of trees on the first quarter; of chains,
    those that the draft can fill. What the file holds already is not measured again.
    """
    result = {
        "timestamp": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": asdict(describe_machine()),
        "model": asdict(identify_model(model)),
        "draft": asdict(identify_model(draft)),
        "settings": {"num_tokens": num_tokens, "limit": limit, "seed": _SEED},
    }
    runs: list[dict[str, Any]] = json.loads(out.read_text())["runs"] if out.is_file() else []
    known = [(run["data"], Setting(**run["setting"])) for run in runs]
    sets = {name: load_set(name, limit, cache) for name in SETS}
    few = {name: prompts[: max(1, limit // 4)] for name, prompts in sets.items()}

    trained = count_block(open_checkpoint(draft))
    for chosen, settings in ((sets, (*MAIN, *CHAINS)), (few, SHAPES)):
        fitting = [setting for setting in settings if setting.block <= trained]
        for run in measure_acceptance(
            str(model), str(draft), chosen, fitting, num_tokens, say, known
        ):
            runs.append(asdict(run))
            say(f"  AL {run.acceptance_length}, {run.num_equal} of {run.num_prompts} equal")
            out.parent.mkdir(parents=True, exist_ok=True)
            out.write_text(json.dumps({**result, "runs": runs}, indent=1) + "\n", encoding="utf-8")


def make_table(result: dict[str, Any]) -> str:
    """Markdown: acceptance length by set; one row per setting."""
    lines = [_heading("equal texts")]
    for title, row in _complete_rows(result, (*MAIN, *CHAINS, *SHAPES)):
        equal, total = (sum(run[key] for run in row) for key in ("num_equal", "num_prompts"))
        lengths = [run["acceptance_length"] for run in row]
        lines.append(f"| {title} | {_figures(lengths)} | {equal} of {total} |")
    return "\n".join(lines)


def make_speed_table(result: dict[str, Any], settings: Sequence[Setting] = MAIN) -> str:
    """Markdown: tokens per second over plain decoding's by set, with the latter's last."""
    lines = [_heading("plain, tok/s")]
    for title, row in _complete_rows(result, settings):
        plain = [run["plain_tokens_per_second"] for run in row]
        ratios = [run["tokens_per_second"] / rate for run, rate in zip(row, plain, strict=True)]
        lines.append(f"| {title} | {_figures(ratios)} | {sum(plain) / len(plain):.0f} |")
    return "\n".join(lines)


def _heading(last: str) -> str:
    return f"| | {' | '.join(SETS)} | mean | {last} |\n|---|" + "---|" * (len(SETS) + 2)


def _figures(values: Sequence[float]) -> str:
    return " | ".join(f"{x:.2f}" for x in [*values, sum(values) / len(values)])


def _complete_rows(
    result: dict[str, Any], settings: Sequence[Setting]
) -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """The runs of a setting by set, where none is missing."""
    for setting in settings:
        kind = (setting.name, setting.temperature)
        runs = {
            run["data"]: run
            for run in result["runs"]
            if (run["setting"]["name"], run["setting"]["temperature"]) == kind
        }
        if all(name in runs for name in SETS):
            title = f"budget {setting.budget}" if setting in MAIN else setting.name
            choice = f"T = {setting.temperature:g}" if setting.temperature else "greedy"
            yield f"{title}, {choice}", [runs[name] for name in SETS]


def draw_depths(result: dict[str, Any], path: Path) -> None:
    """How far paths get by set, and chains against trees of as many nodes."""
    from importlib import import_module

    figure = import_module("matplotlib.figure").Figure(figsize=(9, 3.6), layout="constrained")
    left, right = figure.subplots(1, 2)
    runs = [run for run in result["runs"] if run["setting"]["temperature"] == 0.0]
    for run in runs:
        if run["setting"]["name"] == "tree":
            shares = run["accepted_by_depth"]
            left.plot(range(1, len(shares) + 1), shares, marker="o", label=run["data"])
    left.set(xlabel="depth", ylabel="share of trees accepted so far", ylim=(0, 1))
    left.legend()
    for index, shape in enumerate(SHAPES):
        lengths = [r["acceptance_length"] for r in runs if r["setting"] == asdict(shape)]
        right.bar([i + 0.16 * index for i in range(len(lengths))], lengths, 0.15, label=shape.name)
    right.set_xticks([i + 0.32 for i in range(len(SETS))], SETS)
    right.set(ylabel="acceptance length, greedy")
    right.legend(fontsize=7)
    figure.savefig(path, dpi=120, metadata={"Software": None})
