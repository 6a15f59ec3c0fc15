"""The few figures of a result that its command prints. In: a record. Out: figures by name."""

from collections.abc import Callable
from typing import Any, Final

from draftree.bench.record import Json


def headline(record: Json) -> dict[str, Any]:
    return _READERS[record["kind"]](record["measures"])


def _peers(measures: Json) -> dict[str, Any]:
    prefill = measures["prefill"].items()
    return {
        "decode": measures["decode"]["ours"]["median"],
        "decode_ratio": measures["decode"]["ratio"]["value"],
        "prefill": {length: duel["ours"]["median"] for length, duel in prefill},
        "prefill_ratio": {length: duel["ratio"]["value"] for length, duel in prefill},
    }


def _decode(measures: Json) -> dict[str, Any]:
    return {
        "tokens_per_second": _medians(measures["by_depth"]),
        "forward_ms": _medians(measures["forward_ms"]),
        "eight_over_one": measures["eight_over_one"]["value"],
    }


def _parity(measures: Json) -> dict[str, Any]:
    groups = (measures["first_choices"], measures["greedy"])
    unexplained = sum(len(g["disagreements"]) - g["num_explained"] for g in groups)
    return {
        "perplexity": measures["perplexity"],
        "ours_over_llama": measures["ours_over_llama"],
        "equal_share": measures["equal_share"],
        "unexplained": unexplained,
    }


def _suite(measures: Json) -> dict[str, Any]:
    names = ("speed_up", "acceptance_length", "num_equal", "num_prompts")
    return {name: {key: item[key] for key in names} for name, item in measures["sets"].items()}


def _context(measures: Json) -> dict[str, Any]:
    depths = measures["depths"].items()
    return {
        "plain": {depth: row["plain"]["median"] for depth, row in depths},
        "speculative": {depth: row["speculative"]["median"] for depth, row in depths},
        "ttft_ms": {depth: row["ttft_ms"]["median"] for depth, row in depths},
        "num_equal": sum(row["num_equal"] for _, row in depths),
        "num_texts": sum(row["num_texts"] for _, row in depths),
    }


def _budget(measures: Json) -> dict[str, Any]:
    rows = measures["budgets"].items()
    return {
        "best": measures["best"],
        "best_fixed": measures["best_fixed"],
        "tokens_per_second": {name: row["rate"]["median"] for name, row in rows},
        "num_equal": sum(row["num_equal"] for _, row in rows),
        "num_texts": sum(row["num_texts"] for _, row in rows),
    }


def _overhead(measures: Json) -> dict[str, Any]:
    names = ("num_equal", "num_replies")
    ratios = {name: measures[name]["value"] for name in ("ratio", "decode_ratio")}
    return ratios | {name: measures[name] for name in names}


def _http(measures: Json) -> dict[str, Any]:
    names = ("throughput", "ttft", "gap_ms", "token_ms")
    levels = measures["levels"].items()
    return {clients: {name: level[name] for name in names} for clients, level in levels}


def _multiturn(measures: Json) -> dict[str, Any]:
    ratios = {
        name: measures[name]["value"] for name in ("second_over_first", "returned_over_fresh")
    }
    names = ("num_equal", "num_replies", "acceptance_length")
    return ratios | {name: measures[name] for name in names}


def _card(measures: Json) -> dict[str, Any]:
    groups = ("plain", "round_ms", "forward_ms", "prefill")
    equality = measures["equality"].values()
    return {name: _medians(measures[name]) for name in groups} | {
        "peak_gib": measures["peak_gib"]["median"],
        "load_s": measures["load_s"]["median"],
        "num_equal": sum(item["num_equal"] for item in equality),
        "num_texts": sum(item["num_texts"] for item in equality),
    }


def _medians(samples: Json) -> dict[str, float]:
    return {name: item["median"] for name, item in samples.items()}


_READERS: Final[dict[str, Callable[[Json], dict[str, Any]]]] = {
    "peers": _peers,
    "decode": _decode,
    "prefill": lambda measures: {"tokens_per_second": _medians(measures["by_len"])},
    "memory": lambda measures: {
        name: measures[name]["median"] for name in ("ratio", "plain_ratio") if name in measures
    },
    "start": lambda measures: {"first_token_s": measures["first_token_s"]["median"]},
    "parity": _parity,
    "suite": _suite,
    "context": _context,
    "budget": _budget,
    "overhead": _overhead,
    "http": _http,
    "multiturn": _multiturn,
    "card": _card,
}
