"""A picture of a terminal: what `draftree run --show-tree` prints, as SVG for the README."""

import re
from pathlib import Path

from rich.console import Console
from rich.text import Text

from draftree.chat import Engine
from draftree.cli.printer import SOURCE_STYLES, show_controls
from draftree.cli.summary import summary_line

_WIDTH = 96


def draw_run(model: str, prompt: str, budget: int, max_tokens: int, path: Path) -> None:
    """Tokens coloured by who proposed them, a bar between rounds, and what it cost."""
    engine, styles = Engine.open(model, budget=budget, ngram="off"), dict(SOURCE_STYLES)
    shown, last_round = Text(prompt, style="bold"), 0
    generation = engine.generate(prompt, max_tokens=max_tokens)
    for delta in generation:
        if last_round and delta.round_index != last_round:
            shown.append("|", style="dim")
        last_round = delta.round_index
        shown.append(show_controls(delta.text), style=styles[delta.source])
    engine.close()
    usage = generation.usage
    legend = Text()
    for source, style in SOURCE_STYLES:
        if source in ("chain", "sibling", "bonus"):
            legend.append(f"{source} ", style=style)
    legend.append("| between rounds", style="dim")
    console = Console(record=True, width=_WIDTH, file=Path("/dev/null").open("w"))  # noqa: SIM115
    console.print(Text(f"$ draftree run {model} --show-tree --budget {budget} -p '{prompt}'"))
    console.print(shown)
    console.print(legend)
    console.print(Text(_without_times(summary_line(usage)), style="dim"))
    path.parent.mkdir(parents=True, exist_ok=True)
    picture = re.sub(r"@font-face \{.*?\}", "", console.export_svg(title="draftree"), flags=re.S)
    path.write_text(picture, encoding="utf-8")  # the reader's own fonts: nothing is fetched


def _without_times(line: str) -> str:
    """A picture is no measurement."""
    words = line.split("; ")[0]
    tokens, _, rest = words.partition(" in ")
    return f"{tokens}{rest[rest.index(', AL') :]}" if ", AL" in rest else tokens
