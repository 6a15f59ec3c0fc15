"""Sections of the page of results: a GPU, and formats of its keys and values."""

from typing import Final

from benchmarks.markdown import spread, table
from draftree.bench.record import Json


def gpu(record: Json) -> list[str]:
    measures = record["measures"]
    passes = [[width, spread(cost)] for width, cost in measures["forward_ms"].items()]
    lengths = [[length, spread(rate)] for length, rate in measures["prefill"].items()]
    depths = [
        [depth, spread(rate), spread(measures["round_ms"][depth])]
        for depth, rate in measures["plain"].items()
    ]
    texts = [
        [name, f"{e['num_equal']} of {e['num_texts']}", f"{e['acceptance_length']:.2f}"]
        for name, e in measures["equality"].items()
    ]
    note = (
        f"On one {measures['gpu']}. Random weights in the shapes and types of a real file, with "
        "a random 16-bit draft: a draft is right by luck alone, so the rounds' cost is what "
        f"counts. Planned memory {measures['planned_gib']:.1f} GiB, peak "
        f"{spread(measures['peak_gib'])} GiB with arrays limited to {measures['memory_gib']:.2f}; "
        f"loading {spread(measures['load_s'])} s."
    )
    if joules := measures.get("joules"):
        note += f" {joules['plain']:.2f} J a plain token, {joules['round']:.2f} J a round."
    return [
        note,
        "",
        *table(["depth", "plain, tok/s", "round of budget 22, ms"], depths),
        "",
        *table(["tokens in a pass", "ms"], passes),
        "",
        *table(["prompt", "prefill, tok/s"], lengths),
        "",
        *table(["sampling", "texts equal to plain decoding's, budgets 8, 22, 40", "AL"], texts),
    ]


def gpu_phases(record: Json) -> list[str]:
    measures = record["measures"]
    lines = [
        f"Eight or more layers with random weights on one {measures['gpu']}; microseconds of a "
        f"layer. Reading its weights takes {measures['read_us']:.1f}. Waits, work and idle times "
        "are those of the single kernel's blocks, on average.",
    ]
    for rows, each in measures["passes"].items():
        lines += [
            "",
            f"A pass of {rows}: {spread(each['graph_us'])} as {each['num_launches']:.1f} kernels "
            f"in a graph, {spread(each['persistent_us'])} as one.",
            "",
        ]
        found = sorted(each["phases"].items(), key=lambda item: -item[1]["work_us"])
        rows_of = [
            [name, f"{p['count']:.2f}", *(f"{p[k]:.2f}" for k in ("work_us", "wait_us", "idle_us"))]
            for name, p in found
        ]
        lines += table(["operation", "in a layer", "work", "wait", "idle"], rows_of)
    return lines


def gpu_depth(record: Json) -> list[str]:
    measures = record["measures"]
    rows = []
    for name, run in measures["runs"].items():
        for depth, rate in run["plain"].items():
            ms = run["round_ms"][depth]
            over = ms["median"] / next(iter(run["round_ms"].values()))["median"]
            row = [name, f"{run['max_ctx']:,}", depth, f"{run['prefill_s'][depth]:.2f}"]
            rows.append([*row, spread(rate), f"{spread(ms)} ({over:.2f})"])
    limits = ", ".join(
        f"{name} {run['peak_gib']:.1f} of {run['planned_gib']:.1f}"
        for name, run in measures["runs"].items()
    )
    head = ["keys and values", "longest context", "depth", "prefill, s", "plain, tok/s"]
    return [
        f"On one {measures['gpu']}, under a limit of {record['settings']['memory']:g} GiB except "
        f"where it says unlimited, with a random {measures['draft']} draft. A context is the "
        f"longest that the plan admits. Peak memory of that planned, GiB: {limits}.",
        "",
        *table([*head, "round of budget 22, ms (over the shallowest)"], rows),
    ]


_ERRORS: Final = ("keys", "values", "output")


def kv_quality(record: Json) -> list[str]:
    lines = []
    for length, measures in record["measures"]["lengths"].items():
        rows = []
        for name, item in measures["formats"].items():
            error = item["error"] or {}
            counts = item["needles"].values()
            row = [name, f"{item['perplexity']:.3f}"]
            row += [f"{100 * item['over_f16']:+.2f} ± {100 * item['stderr']:.2f} %"]
            row += [f"{100 * item['same_choices']:.1f} %"]
            row += [f"{100 * error[key]:.1f} %" if error else "" for key in _ERRORS]
            row += [", ".join(f"{found} of {asked} ({same})" for asked, found, same in counts)]
            rows.append(row)
        head = [f"texts of {length}", "perplexity", "over f16", "same first choice"]
        stops = next(iter(measures["formats"].values()))["needles"]
        head += ["error of keys", "of values", "of attention", f"needles at {', '.join(stops)}"]
        lines += [*table(head, rows), "", f"{measures['num_tokens']} tokens were scored.", ""]
    return [
        *lines,
        f"Text: {record['settings']['text']}. Needles: found of those asked for (as with f16).",
    ]
