"""Plots for the page: cost of a pass by its number of tokens, and shares of operations. Needs
matplotlib.
"""

from collections.abc import Iterable
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from draftree.bench.fault import BenchError
from draftree.bench.record import Json

PLOT_KINDS: Final = ("decode-passes", "decode-operations")
NO_MATPLOTLIB: Final = (
    "Plots need the package matplotlib; run `pip install 'draftree[bench]'`, or use --no-plots."
)


def plot_name(kind: str, record: Json) -> str:
    return f"{kind}-{record['model']['name']}.png"


def draw_plots(records: Iterable[Json], folder: Path) -> list[str]:
    """Write a picture for every result that has one, and return their names."""
    try:
        # By name, so that type checkers do not need it either.
        import_module("matplotlib").use("Agg")
        pyplot = import_module("matplotlib.pyplot")
    except ImportError:
        raise BenchError(NO_MATPLOTLIB) from None
    names = []
    by_model: dict[str, dict[str, Json]] = {}
    for record in records:
        by_model.setdefault(record["model"]["name"], {})[record["kind"]] = record
    for kinds in by_model.values():
        if "decode" not in kinds:
            continue
        decode = kinds["decode"]
        shares = dict(decode["measures"]["shares"])
        if "prefill" in kinds:
            shares |= kinds["prefill"]["measures"]["shares"]
        for kind, draw, data in (
            (PLOT_KINDS[0], _draw_passes, decode["measures"]["forward_ms"]),
            (PLOT_KINDS[1], _draw_operations, shares),
        ):
            figure, axes = pyplot.subplots(figsize=(6.4, 3.6), layout="constrained")
            draw(axes, data)
            axes.set_title(decode["model"]["file"], fontsize=9)
            folder.mkdir(parents=True, exist_ok=True)
            name = plot_name(kind, decode)
            # No date and no version inside, so that the same figures give the same file.
            figure.savefig(folder / name, dpi=120, metadata={"Software": None})
            pyplot.close(figure)
            names.append(name)
    return names


def _draw_passes(axes: Any, forward_ms: dict[str, Any]) -> None:
    widths = [int(width) for width in forward_ms]
    medians = [cost["median"] for cost in forward_ms.values()]
    lows = [cost["low"] for cost in forward_ms.values()]
    axes.plot(widths, medians, marker="o", label="median")
    axes.plot(widths, lows, linestyle=":", label="lowest")
    axes.set_xlabel("tokens in a pass")
    axes.set_ylabel("ms")
    axes.set_ylim(bottom=0)
    axes.grid(alpha=0.3)
    axes.legend()


def _draw_operations(axes: Any, shares: dict[str, Any]) -> None:
    names = list(dict.fromkeys(name for item in shares.values() for name in item["groups"]))
    labels = [f"{width} tokens" if width != "1" else "1 token" for width in shares]
    left = [0.0] * len(labels)
    for name in names:
        values = [100 * item["groups"].get(name, 0.0) for item in shares.values()]
        axes.barh(labels, values, left=left, label=name)
        left = [a + b for a, b in zip(left, values, strict=True)]
    axes.invert_yaxis()
    axes.set_xlabel("% of the time of a pass, operations run one at a time")
    axes.legend(fontsize=7, ncols=3, loc="upper center", bbox_to_anchor=(0.5, -0.18))
