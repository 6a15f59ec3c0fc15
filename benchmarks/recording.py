"""A recording of a terminal as an SVG that moves: what a command prints, when it prints it.

In: a command, run for real on a terminal of its own. Out: one file that fetches nothing and stands
still where the reader asks for that. Times are stretched to be watched; figures of time are left
out, since a picture is no measurement.
"""

import fcntl
import os
import pty
import re
import struct
import termios
import time
from collections.abc import Iterable, Sequence
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Final, NamedTuple

from draftree.errors import BenchError

COLUMNS: Final = 96
_TYPE_S, _PAUSE_S, _HOLD_S, _TOTAL_S = 0.045, 0.7, 5.0, 20.0
_WIDTH, _HEIGHT, _MARGIN, _TOP = 8.4, 20, 20, 52  # of a character, of a line, around, above
_COLOURS: Final = {
    "32": "#74d09b",
    "33": "#e8b968",
    "34": "#86c1f2",
    "35": "#c7a4ff",
    "36": "#7fd6d6",
    "1": "#ffffff",
    "2": "#7d8781",
}
_SGR: Final = re.compile(r"\x1b\[([\d;]*)m")
_TIMES: Final = re.compile(r"^draft .* ms\n| in [\d.]+ s \([^)]*\)|; prompt of .*(?=\n)", re.M)


class Span(NamedTuple):
    """Text in one colour, where and when it appears."""

    time_s: float
    row: int
    column: int
    text: str
    colour: str


def capture(command: Sequence[str]) -> list[tuple[float, str]]:
    """What it prints on a terminal, each piece with the seconds since the start."""
    pid, terminal = pty.fork()
    if pid == 0:
        os.execvp(command[0], list(command))
    fcntl.ioctl(terminal, termios.TIOCSWINSZ, struct.pack("HHHH", 50, COLUMNS, 0, 0))
    start_s, pieces = time.perf_counter(), []
    while True:
        try:
            data = os.read(terminal, 2**16)
        except OSError:  # Linux says so when the other end is closed
            break
        if not data:
            break
        pieces.append((time.perf_counter() - start_s, data.decode("utf-8", "replace")))
    _, status = os.waitpid(pid, 0)
    os.close(terminal)
    if status:
        raise BenchError(f"{' '.join(command)} failed: {''.join(text for _, text in pieces)}")
    return pieces


def slow_down(prompt: str, pieces: Sequence[tuple[float, str]]) -> list[tuple[float, str]]:
    """The command as if typed, then what it printed, so that all fits the recording's time."""
    typed = [(_TYPE_S * i, letter) for i, letter in enumerate(f"$ {prompt}")]
    begin_s = _TYPE_S * len(typed) + _PAUSE_S
    first_s, last_s = pieces[0][0], pieces[-1][0]
    scale = (_TOTAL_S - _HOLD_S - begin_s) / max(last_s - first_s, 0.001)
    return [
        *typed,
        (begin_s, "\n"),
        *((begin_s + scale * (time_s - first_s), _without_times(text)) for time_s, text in pieces),
    ]


def _without_times(text: str) -> str:
    return _TIMES.sub("", text.replace("\r\n", "\n"))


def lay_out(pieces: Iterable[tuple[float, str]]) -> list[Span]:
    """Where the text stands: lines end at the last column, colours last until they are reset."""
    spans, row, column, colour = [], 0, 0, ""
    for time_s, text in pieces:
        for i, part in enumerate(_SGR.split(text)):
            if i % 2:
                colour = next((_COLOURS[code] for code in part.split(";") if code in _COLOURS), "")
                continue
            for line in re.findall(r"\n|[^\n]+", part):
                rest = line
                while rest and rest != "\n":
                    if column == COLUMNS:
                        row, column = row + 1, 0
                    taken, rest = rest[: COLUMNS - column], rest[COLUMNS - column :]
                    spans.append(Span(time_s, row, column, taken, colour))
                    column += len(taken)
                if line == "\n":
                    row, column = row + 1, 0
    return [span for span in spans if span.text.strip()]


def draw(spans: Sequence[Span]) -> str:
    """A window; what appears at one time is a group that waits for it, again and again."""
    height = _TOP + _HEIGHT * (1 + max(span.row for span in spans))
    width = 2 * _MARGIN + _WIDTH * COLUMNS
    rules, groups = [], []
    for i, (time_s, together) in enumerate(groupby(spans, key=lambda span: round(span.time_s, 2))):
        share = f"{100 * time_s / _TOTAL_S:.2f}%"
        rules.append(f"@keyframes k{i}{{0%{{opacity:0}}{share},100%{{opacity:1}}}}")
        rules.append(f".k{i}{{animation:k{i} {_TOTAL_S:g}s step-end infinite}}")
        groups.append(f'<g class="k{i}">{"".join(map(_draw_span, together))}</g>')
    style = (
        "text{font:14px ui-monospace,SFMono-Regular,Menlo,Consolas,'DejaVu Sans Mono',monospace;"
        "fill:#e6e9e5;white-space:pre}"
        + "".join(rules)
        + "@media(prefers-reduced-motion:reduce){g{animation:none!important}}"
    )
    dots = "".join(f'<circle cx="{24 + 20 * i}" cy="22" r="6" fill="#3e4741"/>' for i in range(3))
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width:g} {height}" '
        f'width="{width:g}" height="{height}"><title>A terminal: draftree run --show-tree</title>'
        f"<style>{style}</style>"
        f'<rect width="{width:g}" height="{height}" rx="10" fill="#131614"/>{dots}\n'
        + "\n".join(groups)
        + "\n</svg>\n"
    )


def _draw_span(span: Span) -> str:
    left = len(span.text) - len(span.text.lstrip())
    text = span.text.strip()
    x = _MARGIN + _WIDTH * (span.column + left)
    fill = f' style="fill:{span.colour}"' if span.colour else ""
    place = f'x="{x:.1f}" y="{_TOP + _HEIGHT * span.row}" textLength="{_WIDTH * len(text):.1f}"'
    return f'<text {place} lengthAdjust="spacingAndGlyphs"{fill}>{escape(text)}</text>'


def record(prompt: str, command: Sequence[str], path: Path) -> None:
    """prompt: the command as a reader would type it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(draw(lay_out(slow_down(prompt, capture(command)))), encoding="utf-8")
