"""Pictures of results: which there are, and files or SVG text of them. Needs matplotlib.

In: a folder of results. Out: a PNG for each picture that has data, the same for the same figures,
or SVG whose ink takes the colour of the page it is put in. What they look like is in figure.py.
"""

import io
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import Any, Final

from benchmarks import figure
from benchmarks.result import find_older, read_places
from draftree.bench.record import Json
from draftree.errors import BenchError

NO_MATPLOTLIB: Final = (
    "Plots need the package matplotlib; run `pip install 'draftree[bench]'`, or use --no-plots."
)
_STYLE: Final = {
    "font.size": 9,
    "axes.titlesize": 9,
    "axes.titlelocation": "left",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 8,
    "svg.fonttype": "none",
    **{
        f"{name}color": figure.INK
        for name in ("text.", "axes.edge", "axes.label", "axes.title", "xtick.", "ytick.")
    },
}
_WIDE: Final = (9.0, 3.2)
_NARROW: Final = (6.4, 3.2)
_TALL: Final = (10.0, 4.4)


@dataclass(frozen=True, slots=True)
class Plot:
    """kind: of the result that it belongs to. group: all results of a model by kind."""

    kind: str
    name: str
    size: tuple[float, float]
    draw: Callable[[Any, Mapping[str, Json]], None]
    has_data: Callable[[Json], bool] = lambda measures: True


def _has(*names: str) -> Callable[[Json], bool]:
    return lambda measures: all(n in item for item in measures["sets"].values() for n in names)


def _has_stages(measures: Json) -> bool:
    """On a device that runs whole rounds, stages have no times of their own."""
    return _has("stage_ms")(measures) and any(
        ms for item in measures["sets"].values() for ms in figure.apart_from_verify(item)
    )


PLOTS: Final = (
    Plot("peers", "peers", _NARROW, figure.draw_peers),
    Plot("decode", "decode-passes", _NARROW, figure.draw_passes),
    Plot("operations", "operations", _NARROW, figure.draw_operations),
    Plot("suite", "suite-speed-up", _NARROW, figure.draw_speed_up),
    Plot("suite", "suite-rounds", _WIDE, figure.draw_rounds, _has("rounds_by_length")),
    Plot("suite", "suite-stages", _NARROW, figure.draw_stages, _has_stages),
    Plot("context", "context", _WIDE, figure.draw_context),
    Plot("budget", "budget", _WIDE, figure.draw_budgets),
    Plot("http", "http", _WIDE, figure.draw_clients),
    Plot("gpu", "gpu", _WIDE, figure.draw_gpu),
    Plot(
        *("gpu-shapes", "first-tokens", _NARROW, figure.draw_first_tokens),
        has_data=lambda measures: "compress" in measures["parts"],
    ),
    Plot("gpu-phases", "gpu-phases", _TALL, figure.draw_phases),
)


def plot_name(plot: Plot, record: Json, place: str = "") -> str:
    return f"{plot.name}-{record['model']['name']}{'-' + place if place else ''}.png"


def plots_of(record: Json) -> list[Plot]:
    """The pictures that a result has data for."""
    return [p for p in PLOTS if p.kind == record["kind"] and p.has_data(record["measures"])]


def draw_plots(results: Path, folder: Path) -> list[str]:
    """Write a PNG for every picture, remove those that no result has any more, return the names."""
    names = []
    for name, drawn in _draw_all(results):
        folder.mkdir(parents=True, exist_ok=True)
        # No date and no version inside, so that the same figures give the same file.
        drawn.savefig(folder / name, dpi=110, facecolor="white", metadata={"Software": None})
        names.append(name)
    for path in folder.glob("*.png"):
        if (
            path.name.startswith(tuple(f"{plot.name}-" for plot in PLOTS))
            and path.name not in names
        ):
            path.unlink()
    return names


def draw_pictures(results: Path) -> dict[str, str]:
    """SVG of every picture by the name that its PNG has."""
    pictures = {}
    for name, drawn in _draw_all(results):
        text = io.StringIO()
        drawn.savefig(text, format="svg", transparent=True, metadata={"Date": None})
        svg = text.getvalue()
        svg = re.sub(r"<metadata>.*?</metadata>", "", svg[svg.index("<svg") :], flags=re.DOTALL)
        pictures[name] = svg.replace(figure.INK, "currentColor")
    return pictures


def _draw_all(results: Path) -> Iterator[tuple[str, Any]]:
    try:
        # By name, so that type checkers do not need it either.
        matplotlib = import_module("matplotlib")
        new_figure = import_module("matplotlib.figure").Figure
    except ImportError:
        raise BenchError(NO_MATPLOTLIB) from None
    for place, found in read_places(results).items():
        older = find_older(found)
        records = {name: record for name, record in found.items() if name not in older}
        groups: dict[str, dict[str, Json]] = {}
        for record in records.values():
            groups.setdefault(record["model"]["name"], {})[record["kind"]] = record
        for record in records.values():
            for plot in plots_of(record):
                name = plot_name(plot, record, place)
                with matplotlib.rc_context({**_STYLE, "svg.hashsalt": name}):
                    drawn = new_figure(figsize=plot.size, layout="constrained")
                    plot.draw(drawn, groups[record["model"]["name"]])
                    drawn.suptitle(record["model"]["file"], fontsize=8, x=0.01, ha="left")
                    yield name, drawn
