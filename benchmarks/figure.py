"""How each picture is drawn. In: an empty figure and the results of one model by kind. Out: marks
on it. Colours are told apart by the colour-blind too, on light pages and on dark ones.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Final

from draftree.bench.record import Json

Group = Mapping[str, Json]
INK: Final = "#1f2430"  # becomes the colour of the page's text where the picture is part of one
BLUE, ORANGE, GREEN, PURPLE, RED, GREY = (
    *("#3f7fd9", "#e0862a", "#2b9f78", "#9467c9", "#d0566b", "#8d939e"),
)
_COLOURS: Final = (BLUE, ORANGE, GREEN, PURPLE, RED, GREY, "#b8a13a", "#5ab4c4")
_MAX_DEPTH: Final = 12
_PHASES: Final = {"work_us": "work", "wait_us": "wait", "idle_us": "idle"}
_STAGE_COLOURS: Final = {
    "verify": BLUE,
    "draft": ORANGE,
    "tree": GREEN,
    "accept": PURPLE,
    "commit": RED,
    "rest": GREY,
}


def draw_peers(figure: Any, group: Group) -> None:
    measures, settings = group["peers"]["measures"], group["peers"]["settings"]
    duels = {f"decode\n{settings['decode_tokens']} tokens": measures["decode"]}
    duels |= {f"prefill\n{length} tokens": duel for length, duel in measures["prefill"].items()}
    axes = figure.subplots()
    ratios = [duel["ratio"] for duel in duels.values()]
    _bars(axes, list(duels), [r["value"] for r in ratios], "{:.1f} ×")
    _whiskers(axes, [(r["value"], r["low"], r["high"]) for r in ratios])
    _even_line(axes, "llama.cpp")
    axes.set_ylabel("tok/s over llama.cpp's, ×")


def draw_passes(figure: Any, group: Group) -> None:
    _cost_of_passes(figure.subplots(), group["decode"]["measures"]["forward_ms"])


def draw_operations(figure: Any, group: Group) -> None:
    shares = group["operations"]["measures"]["shares"]
    names = list(dict.fromkeys(name for item in shares.values() for name in item["groups"]))
    labels = ["1 token" if width == "1" else f"{width} tokens" for width in shares]
    axes = figure.subplots()
    rows = {n: [100 * item["groups"].get(n, 0.0) for item in shares.values()] for n in names}
    _stack(axes, labels, rows, dict(zip(names, _COLOURS, strict=False)))
    axes.set_xlabel("% of a pass, operations run one at a time")
    axes.set_xlim(0, 100)


def draw_speed_up(figure: Any, group: Group) -> None:
    sets = group["suite"]["measures"]["sets"]
    axes = figure.subplots()
    labels = [
        f"{name}\n{item['plain_rate']:.0f} → {item['speculative_rate']:.0f} tok/s"
        for name, item in sets.items()
    ]
    _bars(axes, labels, [item["speed_up"] for item in sets.values()], "{:.2f} ×")
    _even_line(axes, "plain decoding")
    axes.set_ylabel("speed-up, ×")


def draw_rounds(figure: Any, group: Group) -> None:
    """Left, how many tokens rounds gave; right, how far down a tree its path got."""
    sets = group["suite"]["measures"]["sets"]
    left, right = figure.subplots(1, 2)
    longest = max(len(item["rounds_by_length"]) for item in sets.values())
    counts = [
        sum(_at(item["rounds_by_length"], i) for item in sets.values()) for i in range(longest)
    ]
    total = sum(counts)
    left.bar(range(1, longest + 1), [100 * count / total for count in counts], color=BLUE)
    mean = sum(i * count for i, count in enumerate(counts, 1)) / total
    left.axvline(mean, color=ORANGE, linestyle="--", linewidth=1.2)
    _annotate(left, f"mean {mean:.2f}", (mean, 0.92), ("data", "axes fraction"), (6, 0), ORANGE)
    left.set(xlabel="tokens of a round", ylabel="% of rounds", title="Rounds, all prompts")
    left.xaxis.get_major_locator().set_params(integer=True)
    for (name, item), colour in zip(sets.items(), _COLOURS, strict=False):
        shares = [100 * share for share in item["accepted_by_depth"][:_MAX_DEPTH]]
        label = f"{name}, AL {item['acceptance_length']:.2f}"
        depths = range(1, len(shares) + 1)
        right.plot(depths, shares, marker="o", markersize=4, color=colour, label=label)
    right.set(xlabel="depth in the tree", ylabel="% of trees so deep", title="Accepted by depth")
    right.set_ylim(0, 105)
    right.xaxis.get_major_locator().set_params(integer=True)
    right.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
    _grid(left, right)


def draw_stages(figure: Any, group: Group) -> None:
    """Bars: speculative decoding by stage; the marks beside them: plain decoding."""
    sets = group["suite"]["measures"]["sets"]
    axes = figure.subplots()
    rows = {
        stage: [item["stage_ms"][stage] / item["num_tokens"] for item in sets.values()]
        for stage in _STAGE_COLOURS
    }
    _stack(axes, list(sets), rows, _STAGE_COLOURS)
    for index, item in enumerate(sets.values()):
        plain = 1000.0 / item["plain_rate"]
        ends = (index - 0.4, index + 0.4)
        label = "plain decoding" if index == 0 else None
        axes.plot((plain, plain), ends, color=INK, linewidth=2, label=label)
    axes.set_xlabel("ms a token")
    _legend_below(axes)


def apart_from_verify(item: Json) -> list[float]:
    return [item["stage_ms"][stage] for stage in ("draft", "tree", "accept", "commit")]


def draw_context(figure: Any, group: Group) -> None:
    depths = group["context"]["measures"]["depths"]
    places = [int(depth) for depth in depths]
    left, right = figure.subplots(1, 2)
    for axes, names, title in (
        (left, ("plain", "speculative"), "Decoding"),
        (right, ("plain_ttft_ms", "ttft_ms"), "Time to the first token"),
    ):
        scale = 1.0 if axes is left else 0.001
        for name, label, colour in zip(names, ("plain", "speculative"), (GREY, BLUE), strict=True):
            rows = [row[name] for row in depths.values()]
            _line(axes, places, rows, label, colour, scale)
        axes.set_xscale("log", base=2)
        axes.set_xticks(places, [str(place) for place in places])
        axes.set_ylim(bottom=0)
        axes.set(xlabel="tokens of context", title=title)
        axes.legend()
    left.set_ylabel("tok/s")
    right.set_ylabel("s")
    _grid(left, right)


def draw_budgets(figure: Any, group: Group) -> None:
    measures = group["budget"]["measures"]
    rows = measures["budgets"]
    left, right = figure.subplots(1, 2)
    rates = [row["rate"] for row in rows.values()]
    colours = [ORANGE if name == measures["best"] else BLUE for name in rows]
    left.bar(list(rows), [rate["median"] for rate in rates], color=colours, width=0.7)
    _whiskers(left, [(rate["median"], rate["low"], rate["high"]) for rate in rates])
    left.axhline(rows["0"]["rate"]["median"], color=GREY, linestyle="--", linewidth=1)
    left.set(ylabel="tok/s", title=f"Decoding; best: {measures['best']}")
    lengths = [row["acceptance_length"] for row in rows.values()]
    right.bar(list(rows), lengths, color=colours, width=0.7)
    right.set(ylabel="AL, tokens a round", title="Acceptance length")
    for axes in (left, right):
        axes.set_xlabel("budget, nodes")
    _grid(left, right)


def draw_clients(figure: Any, group: Group) -> None:
    levels = group["http"]["measures"]["levels"]
    left, right = figure.subplots(1, 2)
    _bars(left, list(levels), [level["throughput"] for level in levels.values()], "{:.0f}")
    left.set(ylabel="tok/s of all clients", title="Throughput", xlabel="clients at a time")
    for name, label, colour in (("median", "median", BLUE), ("p95", "95th percentile", ORANGE)):
        values = [level["ttft"][name] / 1000 for level in levels.values()]
        right.plot(list(levels), values, marker="o", markersize=4, color=colour, label=label)
    right.set(ylabel="s", title="Time to the first token", xlabel="clients at a time")
    right.set_ylim(bottom=0)
    right.legend()
    _grid(right)


def draw_gpu(figure: Any, group: Group) -> None:
    measures = group["gpu"]["measures"]
    left, right = figure.subplots(1, 2)
    _cost_of_passes(left, measures["forward_ms"])
    left.set_title("One pass")
    depths = measures["plain"]
    places = [int(depth) for depth in depths]
    _line(right, places, list(depths.values()), "plain decoding", BLUE, 1.0)
    right.set_xscale("log", base=2)
    right.set_xticks(places, [str(place) for place in places])
    right.set_ylim(bottom=0)
    right.set(xlabel="tokens of context", ylabel="tok/s", title="Plain decoding")
    _grid(right)


def draw_phases(figure: Any, group: Group) -> None:
    """Bars: a layer of the single kernel by operation; the marks: the graph, and reading alone."""
    measures = group["gpu-phases"]["measures"]
    colours = dict(zip(_PHASES, (BLUE, ORANGE, GREY), strict=True))
    for axes, (rows, each) in zip(
        figure.subplots(1, len(measures["passes"]), squeeze=False)[0],
        measures["passes"].items(),
        strict=True,
    ):
        phases = each["phases"]
        _stack(
            axes,
            list(phases),
            {words: [phase[key] for phase in phases.values()] for key, words in _PHASES.items()},
            {words: colours[key] for key, words in _PHASES.items()},
        )
        axes.set_title(
            f"pass of {rows}: {each['persistent_us']['median']:.0f} µs a layer, as a graph "
            f"{each['graph_us']['median']:.0f}, reading {measures['read_us']:.0f}"
        )
        axes.set_xlabel("µs in a layer")


def draw_first_tokens(figure: Any, group: Group) -> None:
    """By length of the prompt, whole and compressed."""
    parts, axes = group["gpu-shapes"]["measures"]["parts"], figure.subplots()
    words = {"full": "whole", "compress": "0.6B scorer", "compress self": "own scores"}
    for (part, label), colour in zip(words.items(), _COLOURS, strict=False):
        rows = parts.get(part, {}).get("lengths", {})
        firsts = [row["first_s"] for row in rows.values()]
        if firsts:
            _line(axes, [int(length) for length in rows], firsts, label, colour, 1.0)
    axes.set(xlabel="tokens of the prompt", ylabel="s to the first token", ylim=(0, None))
    axes.legend()
    _grid(axes)


def _cost_of_passes(axes: Any, forward_ms: Json) -> None:
    places = [int(width) for width in forward_ms]
    _line(axes, places, list(forward_ms.values()), "median, lowest to highest", BLUE, 1.0)
    axes.set(xlabel="tokens in a pass", ylabel="ms")
    axes.set_ylim(bottom=0)
    axes.legend()
    _grid(axes)


def _line(
    axes: Any, places: Sequence[int], rows: Sequence[Json], label: str, colour: str, scale: float
) -> None:
    """Medians, with a band from the lowest to the highest sample."""
    middle, low, high = ([scale * row[key] for row in rows] for key in ("median", "low", "high"))
    axes.fill_between(places, low, high, color=colour, alpha=0.18, linewidth=0)
    axes.plot(places, middle, marker="o", markersize=4, color=colour, label=label)


def _bars(axes: Any, labels: Sequence[str], values: Sequence[float], form: str) -> None:
    drawn = axes.bar(list(labels), list(values), color=BLUE, width=0.6)
    words = [form.format(value) for value in values]
    axes.bar_label(drawn, words, label_type="center", color="white", fontweight="bold")
    _grid(axes)


def _whiskers(axes: Any, rows: Sequence[tuple[float, float, float]]) -> None:
    middle, low, high = (list(column) for column in zip(*rows, strict=True))
    spread = [
        [max(m - v, 0.0) for m, v in zip(middle, low, strict=True)],
        [max(v - m, 0.0) for m, v in zip(middle, high, strict=True)],
    ]
    axes.errorbar(range(len(rows)), middle, spread, fmt="none", ecolor=GREY, capsize=3)


def _even_line(axes: Any, words: str) -> None:
    axes.axhline(1.0, color=GREY, linestyle="--", linewidth=1)
    place = (1.0, 1.0), ("axes fraction", "data"), (4, 0)
    _annotate(axes, words, *place, GREY, va="center", fontsize=8)


def _annotate(
    axes: Any,
    words: str,
    place: tuple[float, float],
    units: tuple[str, str],
    offset: tuple[int, int],
    colour: str,
    **style: Any,
) -> None:
    options = {"xycoords": units, "xytext": offset, "textcoords": "offset points"}
    axes.annotate(words, place, color=colour, **options, **style)


def _stack(
    axes: Any, labels: Sequence[str], rows: Mapping[str, list[float]], colours: Mapping[str, str]
) -> None:
    """Horizontal bars of parts, the first label on top."""
    left = [0.0] * len(labels)
    for name, values in rows.items():
        if any(values):
            axes.barh(list(labels), values, left=left, label=name, color=colours.get(name, GREY))
            left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    _legend_below(axes)


def _legend_below(axes: Any) -> None:
    axes.legend(ncols=4, loc="upper center", bbox_to_anchor=(0.5, -0.2))


def _grid(*panels: Any) -> None:
    for axes in panels:
        axes.grid(axis="y", alpha=0.25, linewidth=0.6)


def _at(counts: Sequence[int], index: int) -> int:
    return counts[index] if index < len(counts) else 0
