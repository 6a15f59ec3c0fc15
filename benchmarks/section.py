"""A result of each kind as Markdown: tables, and a sentence on how it was measured. In: a record.
Out: lines.
"""

from collections.abc import Callable, Mapping
from typing import Final

from benchmarks.markdown import spread, table
from benchmarks.memory import METHOD
from benchmarks.section_cluster import cluster
from benchmarks.section_gpu import gpu, gpu_depth, gpu_phases, kv_quality
from benchmarks.section_http import http
from benchmarks.section_request import agent, gpu_requests, gpu_shapes
from draftree.bench.record import Json

Section = Callable[[Json], list[str]]


def _peers(record: Json) -> list[str]:
    measures, settings = record["measures"], record["settings"]
    builds = measures["builds"]
    duels = {f"decode {settings['decode_tokens']} tokens": measures["decode"]}
    duels |= {f"prefill {length} tokens": duel for length, duel in measures["prefill"].items()}
    rows = [
        [
            name,
            spread(duel["ours"]),
            *(spread(duel["llama"][build]) for build in builds),
            _ratio(duel["ratio"]),
        ]
        for name, duel in duels.items()
    ]
    head = ["tok/s", "draftree", *(f"llama.cpp, {build}" for build in builds), "ratio"]
    if len(builds) > 1:
        head[-1] = "ratio to the faster"
    words = [_describe_build(build, builds[build]) for build in builds]
    if "native" not in builds:
        words.append("A build for this very CPU may be faster.")
    if "library too" not in settings["method"]:
        words.append(
            "The wheel's server and library shared a process in this run, which made both slower."
        )
    note = (
        f"{settings['threads']} threads, {settings['rounds']} rounds; {settings['method']}. "
        f"{' '.join(words)}{_kv_types(measures)}"
    )
    return [*table(head, rows), "", note]


def _kv_types(measures: Json) -> str:
    """Nothing of older results, which do not say it."""
    if "kv_type" not in measures:
        return ""
    builds = measures.get("builds", {"wheel": measures.get("peer", {})})
    theirs = next((words["kv"] for words in builds.values() if "kv" in words), "f16")
    return f" Keys and values: draftree {measures['kv_type']}, llama.cpp {theirs}."


def _describe_build(build: str, words: Mapping[str, str]) -> str:
    if build == "native":
        return (
            f"The native build is commit {words['build_commit']} ({words['backends']}), made for "
            "this machine."
        )
    return f"The wheel is xllamacpp {words['version']}, built for: {_features(words['system'])}."


def _decode(record: Json) -> list[str]:
    measures = record["measures"]
    base = measures["forward_ms"]["1"]["median"]
    passes = [
        [width, spread(cost), f"{cost['median'] / base:.2f}", f"{cost['median'] / int(width):.2f}"]
        for width, cost in measures["forward_ms"].items()
    ]
    depths = [[depth, spread(rate)] for depth, rate in measures["by_depth"].items()]
    return [
        *table(["tokens in a pass", "ms", "over a pass of 1", "ms a token"], passes),
        "",
        *table(["depth", "decode, tok/s"], depths),
    ]


def _prefill(record: Json) -> list[str]:
    measures = record["measures"]
    rows = [[length, spread(rate)] for length, rate in measures["by_len"].items()]
    return table(["prompt", "tok/s"], rows)


def _operations(record: Json) -> list[str]:
    """Operations as columns would be wide; they are rows, the largest first."""
    shares = record["measures"]["shares"]
    names = list(dict.fromkeys(name for item in shares.values() for name in item["groups"]))
    rows = [
        [name, *(f"{100 * item['groups'].get(name, 0.0):.1f} %" for item in shares.values())]
        for name in names
    ]
    rows.append(["one at a time, ms", *(f"{item['total_ms']:.2f}" for item in shares.values())])
    return table(["operation", *(f"pass of {width}" for width in shares)], rows)


def _memory(record: Json) -> list[str]:
    measures = record["measures"]
    names = {
        "ratio": "over the size of all files loaded",
        "peak_ratio": "the same, at the peak",
        "plain_ratio": "without a draft, over the target's file",
        "filled_mib": f"context of {measures['context']} full",
        "loaded_mib": "after loading",
        "anonymous_mib": "of it anonymous",
        "file_mib": "of it pages of files",
        "plain_filled_mib": "context full, without a draft",
        "imports_mib": "imports alone",
    }
    rows = [
        [words, f"{spread(measures[key])} {measures[key]['unit']}"]
        for key, words in names.items()
        if key in measures
    ]
    if "files_mib" in measures:
        rows.append(["files loaded", f"{measures['files_mib']} MiB"])
    return [*table(["resident memory above imports", ""], rows), "", METHOD]


def _start(record: Json) -> list[str]:
    measures = record["measures"]
    names = {
        "first_token_s": "process start to first token",
        "exit_s": "to the end of the process",
        "interpreter_s": "a Python that does nothing",
        "open_s": "opening the engine",
    }
    rows = [[words, spread(measures[key])] for key, words in names.items()]
    imports = ", ".join(f"{name} {ms:.0f}" for name, ms in measures["imports_ms"].items())
    return [*table(["", "s"], rows), "", f"Imports, traced, in ms: {imports}."]


def _parity(record: Json) -> list[str]:
    measures, settings = record["measures"], record["settings"]
    values = measures["perplexity"]
    part = settings["exact_windows"] * settings["window"]
    rows = [
        ["draftree", f"{values['ours']:.4f}", f"{values['ours_part']:.4f}"],
        ["llama.cpp", f"{values['llama']:.4f}", f"{values['llama_part']:.4f}"],
        ["draftree, exact", "", f"{values['exact_part']:.4f}"],
    ]
    noise = measures["noise"]
    lines = [
        *table(["perplexity", f"{settings['num_tokens']} tokens", f"first {part}"], rows),
        "",
        f"draftree is {100 * measures['ours_over_llama']:+.3f} % from llama.cpp, "
        f"{100 * measures['ours_over_exact']:+.3f} % from exact arithmetic (llama.cpp: "
        f"{100 * measures['llama_over_exact']:+.3f} %). First choices are equal at "
        f"{100 * measures['equal_share']:.2f} % of all positions. Rounding activations moves the "
        f"gap between the two likeliest tokens by {noise['ours']['median']:.3f} in the median and "
        f"{noise['ours']['percentile_99']:.3f} at the 99th percentile (llama.cpp: "
        f"{noise['llama']['median']:.3f}, {noise['llama']['percentile_99']:.3f})."
        f"{_kv_types(measures)}",
        "",
    ]
    for key, words in (("first_choices", "first choices"), ("greedy", "greedy texts")):
        agreement = measures[key]
        found = agreement["disagreements"]
        widest = max((item["exact_gap"] for item in found), default=0.0)
        lines.append(
            f"- {words}: {agreement['num_equal']} of {agreement['num_positions']} equal, "
            f"{agreement['num_explained']} of {len(found)} disagreements explained by noise, "
            f"widest exact gap {widest:.3f}"
        )
    return lines


def _suite(record: Json) -> list[str]:
    rows = [
        [
            name,
            f"{item['num_equal']} of {item['num_prompts']}",
            f"{item['plain_rate']:.1f}",
            f"{item['speculative_rate']:.1f}",
            f"{item['speed_up']:.2f}",
            f"{item['acceptance_length']:.2f}",
            " ".join(f"{100 * share:.0f}" for share in item["accepted_by_depth"][:8]),
            spread(item["ttft_ms"]) if "ttft_ms" in item else "",
        ]
        for name, item in record["measures"]["sets"].items()
    ]
    head = ["prompts", "equal texts", "plain, tok/s", "speculative", "speed-up", "AL"]
    head += ["accepted by depth, %", "first token, ms"]
    settings = record["settings"]
    drafting = record["measures"]["drafting"]
    temperature = settings.get("temperature", 0)
    how = f"T = {temperature:g}, the same seed for both" if temperature else "Greedy"
    note = f"{how}, at most {settings['num_tokens']} tokens; drafts: {drafting}."
    return [*table(head, rows), "", note]


def _context(record: Json) -> list[str]:
    measures = record["measures"]
    rows = [
        [
            depth,
            f"{row['num_equal']} of {row['num_texts']}",
            spread(row["plain"]),
            spread(row["speculative"]),
            _ratio(row["speed_up"]),
            f"{row['acceptance_length']:.2f}",
            spread(row["plain_ttft_ms"]),
            spread(row["ttft_ms"]),
        ]
        for depth, row in measures["depths"].items()
    ]
    head = ["depth", "equal texts", "plain, tok/s", "speculative", "speed-up", "AL"]
    head += ["first token, ms, plain", "speculative"]
    note = (
        f"On the {measures['device']}; {record['settings']['num_tokens']} tokens after a text of "
        f"so many, three times in each round; drafts: {measures['drafting']}."
    )
    return [*table(head, rows), "", note]


def _budget(record: Json) -> list[str]:
    measures, settings = record["measures"], record["settings"]
    rows = [
        [
            f"**{name}**" if name == measures["best"] else name,
            f"{row['num_equal']} of {row['num_texts']}",
            spread(row["rate"]),
            _ratio(row["speed_up"]),
            f"{row['acceptance_length']:.2f}",
            f"{row['nodes_per_round']:.1f}",
        ]
        for name, row in measures["budgets"].items()
    ]
    head = ["budget", "equal texts", "tok/s", "over plain (0)", "AL", "nodes a round"]
    note = (
        f"The best here is {measures['best']}, of the fixed ones {measures['best_fixed']}. On the "
        f"{measures['device']}; {measures['num_prompts']} prompts ({', '.join(settings['sets'])}), "
        f"at most {settings['num_tokens']} tokens each, {settings['passes']} passes through all "
        f"budgets; drafts: {measures['drafting']}."
    )
    refused = [f"Refused: {name} ({why})." for name, why in measures["refused"].items()]
    return [*table(head, rows), "", " ".join([note, *refused])]


def _overhead(record: Json) -> list[str]:
    measures, settings = record["measures"], record["settings"]
    rows = [
        [words, spread(measures[side]), spread(measures[f"{side}_ttft_ms"])]
        for side, words in (("server", "`draftree serve`"), ("direct", "in one process"))
    ]
    note = (
        f"The server has {_ratio(measures['ratio'], 3)} of the engine's rate, from message to last "
        f"word, and {_ratio(measures['decode_ratio'], 3)} from the first word on; "
        f"{measures['num_equal']} of {measures['num_replies']} replies are equal. In turns, "
        f"{settings['limit']} prompts in each of {settings['rounds']} rounds, at most "
        f"{settings['num_tokens']} tokens, {settings['threads']} threads."
    )
    return [*table(["", "whole reply, tok/s", "first token, ms"], rows), "", note]


def _multiturn(record: Json) -> list[str]:
    measures = record["measures"]
    names = {
        "first_ms": f"first turn, a text of {measures['context']} tokens",
        "second_ms": "second turn",
        "returned_ms": "third turn, after another conversation",
        "fresh_ms": "the third turn's prompt with nothing cached",
        "save_ms": "copying a conversation away",
    }
    rows = [[words, spread(measures[key])] for key, words in names.items()]
    second, returned = (
        _ratio(measures[key], 3) for key in ("second_over_first", "returned_over_fresh")
    )
    lengths = measures["acceptance_length"]
    note = (
        f"Second turn over the first: {second}; third turn over the same prompt uncached: "
        f"{returned}. {measures['num_equal']} of {measures['num_replies']} replies after a hit "
        f"have the text and the rounds of one without; AL {lengths['hit']:.2f} and "
        f"{lengths['fresh']:.2f}. A conversation takes {spread(measures['kept_mib'])} MiB."
    )
    return [*table(["to the first token", "ms"], rows), "", note]


def _agent(record: Json) -> list[str]:
    return agent(record["measures"], record["settings"])


SECTIONS: Final[tuple[tuple[str, str, Section], ...]] = (
    ("peers", "Beside llama.cpp", _peers),
    ("decode", "Decoding", _decode),
    ("prefill", "Prefill", _prefill),
    ("operations", "Operations of a pass", _operations),
    ("memory", "Memory", _memory),
    ("start", "Start", _start),
    ("parity", "Agreement with llama.cpp", _parity),
    ("kv-quality", "Formats of keys and values", kv_quality),
    ("suite", "Speculation", _suite),
    ("suite-sampled", "Speculation in sampled texts", _suite),
    ("context", "Depth of context", _context),
    ("budget", "Budgets", _budget),
    ("multiturn", "Turns of a conversation", _multiturn),
    ("agent", "A session of a coding agent", _agent),
    ("overhead", "Cost of the server", _overhead),
    ("http", "Many clients", http),
    ("gpu", "A GPU with synthetic weights", gpu),
    ("gpu-depth", "Long texts on a GPU", gpu_depth),
    ("gpu-phases", "Phases of a pass on a GPU", gpu_phases),
    ("gpu-requests", "Requests on a GPU", gpu_requests),
    ("gpu-shapes", "Clients and long prompts on a GPU", gpu_shapes),
    ("cluster", "Replicas", cluster),
)


def _ratio(ratio: Json, digits: int = 2) -> str:
    value, low, high = (f"{ratio[key]:.{digits}f}" for key in ("value", "low", "high"))
    return f"{value} [{low} to {high}]"


def _features(system: str) -> str:
    """The names that llama.cpp lists with `= 1`."""
    parts = system.replace("CPU :", "").split("|")
    return ", ".join(part.split("=")[0].strip() for part in parts if "= 1" in part)
