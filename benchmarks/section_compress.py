"""Sections of the page of results: what prompt compression keeps, and what is answered then."""

from collections.abc import Iterator, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from benchmarks.compress import AUTO, FULL, ORIGINAL
from benchmarks.compress_case import KINDS
from benchmarks.markdown import table
from draftree.compress import AUTO_TOKENS


def make_section(result: Mapping[str, Any]) -> list[str]:
    """Markdown: cases whose needed places are kept, and how well the target answers."""
    shares = result["settings"]["shares"]
    rows = []
    for name in result["score_ms"]:
        for rules, words in (("rules", "scores and rules"), ("scores", "scores alone")):
            cells = [
                _cells(result["kept"], [f"{kind}/{name}/{rules}/{share}" for kind in KINDS])
                for share in (0.0, *shares)
            ]
            rows.append([name, words, *cells])
    head = ["scorer", "kept by", "rules only", *(f"share {share:g}" for share in shares)]
    lines = [*table(head, rows), "", "Cases with every needed place kept, of all; share of the "]
    lines[-1] += "text that was kept, ends and whole lines included."
    by_kind = [
        [name, kind, _cells(result["replies"], [f"{kind}/{FULL}"])]
        + [_cells(result["replies"], [f"{kind}/{name}/{key}"]) for key in (*shares, AUTO)]
        for name in result["score_ms"]
        for kind in KINDS
        if f"{kind}/{name}/{AUTO}" in result["replies"]
    ]
    if by_kind:
        head = ["scorer", "answered by the target", "full"]
        head += [*(f"share {share:g}" for share in shares), AUTO]
        lines += ["", *table(head, by_kind), "", "Right replies, of all, and the share that was "]
        lines[-1] += "kept; of several answers, and of a module's words about itself, the share."
    lines += [*_compare_positions(result), *_list_changes(result)]
    return [*lines, "", _note(result)]


def _compare_positions(result: Mapping[str, Any]) -> Iterator[str]:
    """Fresh positions beside original ones, where both were measured."""
    replies, suffix = result["replies"], f"/{ORIGINAL}"
    settings = {key.split("/", 1)[1] for key in replies if key.endswith(suffix)}
    rows = []
    for setting in sorted(settings):
        fresh = setting.removesuffix(suffix)
        name, share = fresh.rsplit("/", 1)
        kinds = [kind for kind in KINDS if f"{kind}/{setting}" in replies]
        both = [[replies[f"{kind}/{key}"] for kind in kinds] for key in (fresh, setting)]
        scores = [f"{sum(tally['score'] for tally in found):.1f}" for found in both]
        parts = [
            f"{kind} {old['score']:g} / {new['score']:g}"
            for kind, old, new in zip(kinds, *both, strict=True)
            if old["score"] != new["score"]
        ]
        total = sum(tally["num_cases"] for tally in both[0])
        rows.append([name, share, *scores, str(total), ", ".join(parts)])
    if rows:
        head = ["scorer", "share", "fresh positions", "original ones", "of", "kinds that differ"]
        yield from ("", *table(head, rows))


def _list_changes(result: Mapping[str, Any]) -> Iterator[str]:
    """Cases that `auto` shortened and that were then answered otherwise."""
    rows = []
    for name in result["score_ms"]:
        for kind in KINDS:
            found = [
                row
                for row in result.get("auto", ())
                if row["scorer"] == name and row["kind"] == kind
            ]
            lost = [row for row in found if row["score"] < row["whole"]]
            won = [row for row in found if row["score"] > row["whole"]]
            dropped = sum(not row["is_kept"] for row in lost)
            if lost or won:
                counts = map(str, (len(found), len(won), len(lost), dropped))
                rows.append([name, kind, *counts])
    if rows:
        head = ["scorer", "kind", "shortened by `auto`", "better then", "worse", "a place missing"]
        yield from ("", *table(head, rows))


def worst_of_auto(result: Mapping[str, Any]) -> float:
    """Score of `auto` over that of the whole text, of the worst kind and scorer."""
    replies = result["replies"]
    ratios = [
        replies[f"{kind}/{name}/{AUTO}"]["score"] / replies[f"{kind}/{FULL}"]["score"]
        for kind in KINDS
        for name in result["score_ms"]
        if f"{kind}/{name}/{AUTO}" in replies and replies[f"{kind}/{FULL}"]["score"]
    ]
    return round(min(ratios), 4)


def draw_quality(result: Mapping[str, Any], path: Path) -> None:
    """Score over that of the whole text, against the share that was kept, kind by kind."""
    figure = import_module("matplotlib.figure").Figure(figsize=(9, 3.4), layout="constrained")
    names, replies = list(result["score_ms"]), result["replies"]
    for axes, name in zip(figure.subplots(1, len(names), squeeze=False)[0], names, strict=True):
        for kind in KINDS:
            whole = _mean_score(replies.get(f"{kind}/{FULL}"))
            if not whole:
                continue
            found = [replies[f"{kind}/{name}/{share}"] for share in result["settings"]["shares"]]
            kept = [sum(tally["kept_shares"]) / tally["num_cases"] for tally in found]
            axes.plot(kept, [_mean_score(t) / whole for t in found], marker="o", label=kind)
        axes.axhline(1.0, color="#888888", linewidth=0.8)
        axes.set(xlabel="share of the text that was kept", ylabel="score over the whole text's")
        axes.set_title(f"scored by: {name}", fontsize=9)
    axes.legend(fontsize=7)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110, metadata={"Software": None})


def _mean_score(tally: Mapping[str, Any] | None) -> float:
    return float(tally["score"]) / tally["num_cases"] if tally else 0.0


def _cells(tallies: Mapping[str, Any], keys: Sequence[str]) -> str:
    found = [tallies[key] for key in keys if key in tallies]
    if not found:
        return ""
    score, total = (sum(tally[name] for tally in found) for name in ("score", "num_cases"))
    kept = [share for tally in found for share in tally["kept_shares"]]
    return f"{round(score, 1):g} of {total}, {100 * sum(kept) / len(kept):.0f} %"


def _note(result: Mapping[str, Any]) -> str:
    settings = result["settings"]
    times = ", ".join(
        f"{name} {sum(values) / len(values) / 1000:.2f} s"
        for name, values in result["score_ms"].items()
    )
    own_share = settings.get("auto_own_share", settings["auto_share"])
    own = "" if own_share == settings["auto_share"] else f" (by own scores {own_share:g})"
    apart = "".join(
        f" {kind}: measured apart, {where['timestamp'][:16]}, on {_place(where['settings'])}, "
        f"texts of {_lengths(where['settings'])} characters."
        for kind, where in result.get("apart", {}).items()
    )
    return (
        f"Target {settings['target']}, scored by {_drafters(settings)}; texts of "
        f"{_lengths(settings)} characters; `auto` takes a share of {settings['auto_share']:g}"
        f"{own}, and leaves alone texts of up to {AUTO_TOKENS:,} tokens and questions about the "
        f"whole. Mean time of scoring a text, on {_place(settings)}: {times}.{apart}"
    )


def _lengths(settings: Mapping[str, Any]) -> str:
    return ", ".join(f"{count:,}" for count in settings["num_chars"])


def _place(settings: Mapping[str, Any]) -> str:
    return "a shared machine" if settings["device"] == "cpu" else "a GPU"


def _drafters(settings: Mapping[str, Any]) -> str:
    return ", ".join(settings["drafters"] if "drafters" in settings else [settings["drafter"]])
