"""Sections of the page of results: requests of every kind, clients and long prompts on a GPU. Parts
that were not measured are left out.
"""

from statistics import median

from benchmarks.compress_session import make_section as session_section
from benchmarks.markdown import short, spread, table
from draftree.bench.record import Json


def _ratio(row: Json) -> str:
    value, low, high = (row["ratio"][key] for key in ("value", "low", "high"))
    return f"{value:.3f} [{low:.3f} to {high:.3f}]"


def gpu_requests(record: Json) -> list[str]:
    parts = record["measures"]["parts"]
    lines = [
        f"On one {record['measures']['device']}; at most {record['settings']['num_tokens']} tokens "
        f"a text, {record['settings']['limit']} prompts of each set; requests that are compared "
        "take turns.",
        "",
    ]
    if "kinds" in parts:
        rows = [
            [name, spread(row["free"]), spread(row["asked"]), _ratio(row)]
            for name, row in parts["kinds"]["kinds"].items()
        ]
        lines += [*table(["the same text with", "free, tok/s", "with it", "ratio"], rows), ""]
    if "rounds" in parts:
        lines += _rounds(parts["rounds"])
    for name in ("auto", "auto, T = 0.8"):
        if name in parts:
            lines += _budgets(name, parts[name])
    if "lookup" in parts:
        rows = [
            [name, spread(row["off"]), spread(row["on"]), _ratio(row)]
            for name, row in parts["lookup"].items()
        ]
        lines += [*table(["lookup", "off, tok/s", "on", "ratio"], rows), ""]
    if "copy" in parts:
        rows = [
            [name, spread(row["plain"]), spread(row["lookup"]), _ratio(row)]
            + [f"{row['acceptance_length']:.2f}", f"{row['num_equal']} of {row['num_texts']}"]
            for name, row in parts["copy"].items()
        ]
        head = ["a file of 4,096 tokens", "plain, tok/s", "lookup alone", "ratio", "AL", "equal"]
        lines += [*table(head, rows), ""]
    return [*lines, *_sentences(parts)]


def _rounds(part: Json) -> list[str]:
    rows = [
        [name, spread(row["round_ms"]), f"{row['over_free']:.3f}"]
        + [f"{row['acceptance_length']:.2f}"]
        for name, row in part["kinds"].items()
    ]
    head = [f"drafted rounds of budget {part['budget']}", "ms", "over free ones", "AL"]
    return [*table(head, rows), ""]


def _budgets(name: str, part: Json) -> list[str]:
    engines = list(next(iter(part.values()))["rates"])
    rows = [
        [key, *(spread(row["rates"][engine]) for engine in engines), row["best"], _ratio(row)]
        + [f"{row['num_equal']} of {row['num_texts']}"]
        for key, row in part.items()
    ]
    words = "T = 0.8" if name.endswith("0.8") else "greedy"
    head = [f"tok/s, {words}", *engines, "best fixed", "auto over it", "equal texts"]
    return [*table(head, rows), ""]


def _sentences(parts: Json) -> list[str]:
    words = []
    if "first" in parts:
        first = parts["first"]
        words.append(
            f"The first request after ready has its first word after {spread(first['first_ms'])} "
            f"ms, the tenth after {spread(first['tenth_ms'])} ms."
        )
    if "equal" in parts:
        rows = parts["equal"]["kinds"]
        equal, total = (sum(r[key] for r in rows.values()) for key in ("num_equal", "num_texts"))
        unequal = [
            f"{name} ({', '.join(r['unequal'])})" for name, r in rows.items() if r["unequal"]
        ]
        words.append(
            f"{equal} of {total} texts of {len(rows)} kinds of requests, with every budget, read "
            "cold and after a hit, are those of plain decoding"
            + (f"; others: {'; '.join(unequal)}." if unequal else ".")
        )
    if "limits" in parts:
        limits = parts["limits"]
        words.append(
            f"Under less memory, with chunks of {limits['chunks'][1]} instead of "
            f"{limits['chunks'][0]}, {limits['num_equal']} of {limits['num_texts']} are the same."
        )
    return [" ".join(words)] if words else []


def agent(measures: Json, settings: Json) -> list[str]:
    speeds = measures["tokens_per_second"]
    rows = []
    for kind, speed in speeds.items():
        own = [turn for turn in measures["turns"][1:] if turn["kind"] == kind]
        names = ("prompt_tokens", "cached_tokens", "first_ms", "cold_first_ms")
        middles = [median(turn[name] for turn in own) for name in names] if own else []
        rows.append([kind, str(len(own)), *map(short, middles), f"{speed:.1f}"])
    head = ["turn", "count", "prompt", "cached", "first token, ms", "read cold, ms", "tok/s"]
    note = (
        f"A session of {settings['num_turns']} turns with {settings['pause_s']:g} s between them, "
        f"medians of all but the first: the first token comes after "
        f"{measures['first_over_cold']['median']:.3f} of the time that the same prompt takes cold, "
        f"and {measures['cached_share']:.1%} of the prompts' tokens were cached."
    )
    if measures.get("peer"):
        peer = measures["peer"]
        note += (
            f" With llama.cpp's server the turns take {_waited_s(peer):.1f} s in all, here "
            f"{_waited_s(measures):.1f}: {measures['waited_over_peer']:.3f} of it. Of the prompts' "
            f"tokens it had {peer['cached_share']:.1%} cached, and a first token came after "
            f"{peer['first_over_cold']['median']:.3f} of the time for the prompt read cold."
        )
    return [*table(head, rows), "", note]


def _waited_s(measures: Json) -> float:
    return sum(float(turn["total_ms"]) for turn in measures["turns"]) / 1000


def gpu_shapes(record: Json) -> list[str]:
    parts, settings = record["measures"]["parts"], record["settings"]
    lines = []
    if "schema" in parts:
        lines += _rounds(parts["schema"])
    if "agent" in parts:
        lines += [*agent(parts["agent"], parts["agent"]["settings"]), ""]
    if "session" in parts:
        lines += [*session_section(parts["session"]), ""]
    rows = [
        [length, words, spread(row["first_s"]), f"{row['score_s']:.2f}", str(row["prompt_tokens"])]
        for part, words in (
            ("compress", "compressed, 0.6B scorer"),
            ("compress self", "compressed, own scores"),
            ("full", "whole"),
        )
        for length, row in parts.get(part, {}).get("lengths", {}).items()
    ]
    if rows:
        head = ["prompt", "read", "first token, s", "of it scoring", "tokens read"]
        lines += [*table(head, rows), ""]
    words = [f"On one {record['measures']['device']}, random weights."]
    if "clients" in parts:
        one, together = parts["clients"]["one"], parts["clients"]["all"]
        words.append(
            f"{parts['clients']['num_clients']} clients have {spread(together)} tok/s in all, in "
            f"turns or shared passes, one client {spread(one)}."
        )
    if "beside" in parts:
        words.append(
            f"Beside {parts['beside']['num_writers']} writers, a request of "
            f"{settings['short_len']} tokens has its first token after "
            f"{spread(parts['beside']['first_s'])} s (alone {spread(parts['beside']['alone_s'])})."
        )
    if "behind" in parts:
        words.append(
            f"Behind a prompt of {settings['long_len']} tokens that is being read it has it after "
            f"{spread(parts['behind']['first_s'])} s."
        )
    peaks = [f"{parts[n]['peak_gib']:.1f}" for n in ("compress", "compress self") if n in parts]
    if peaks:
        words.append(
            f"Compressed prompts keep {settings['keep']:.0%}, under a limit of "
            f"{settings['memory']:g} GiB (peak {', '.join(peaks)}); times begin with the text, so "
            "tokenising and scoring are in them."
        )
    return [*lines, " ".join(words)]
