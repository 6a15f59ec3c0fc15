"""Text of a reply on its way to stdout, plain or coloured by who proposed each token.

In: deltas. Out: characters. On a terminal control characters are shown instead of obeyed, since a
model may emit any.
"""

import sys
from typing import TYPE_CHECKING, Final

from draftree.core import TokenSource

if TYPE_CHECKING:
    from draftree.chat import Delta

_HARMLESS: Final = frozenset("\n\t")
SOURCE_STYLES: Final = (
    (TokenSource.PLAIN, "default"),
    (TokenSource.CHAIN, "green"),
    (TokenSource.SIBLING, "cyan"),
    (TokenSource.NGRAM, "magenta"),
    (TokenSource.GRAMMAR, "blue"),
    (TokenSource.BONUS, "yellow"),
)


class PlainPrinter:
    """The text and nothing else."""

    def __init__(self) -> None:
        self._is_terminal = sys.stdout.isatty()
        self._last = "\n"

    def write(self, delta: "Delta") -> None:
        self.write_text(delta.text)

    def write_text(self, text: str, before: str = "", after: str = "") -> None:
        """before and after are terminal codes around the text, left out of files and pipes."""
        if not text:
            return
        shown = f"{before}{show_controls(text)}{after}" if self._is_terminal else text
        sys.stdout.write(shown)
        sys.stdout.flush()
        self._last = text[-1]

    def end(self) -> None:
        """Finish the last line."""
        if self._last != "\n":
            sys.stdout.write("\n")
        sys.stdout.flush()
        self._last = "\n"


class TreePrinter:
    """Colours by source, and a bar between rounds."""

    def __init__(self) -> None:
        from rich.console import Console

        self._console = Console(highlight=False, soft_wrap=True)
        self._last: Delta | None = None

    def write(self, delta: "Delta") -> None:
        from rich.text import Text

        if self._last and self._is_boundary(self._last, delta):
            self._console.print(Text("|", style="dim"), end="")
        self._last = delta
        style = next(style for source, style in SOURCE_STYLES if source == delta.source)
        self._console.print(Text(show_controls(delta.text), style=style), end="")

    @staticmethod
    def _is_boundary(last: "Delta", delta: "Delta") -> bool:
        """Plain tokens are a round each, and bars between them would say nothing."""
        is_plain = last.source == delta.source == TokenSource.PLAIN
        return delta.round_index != last.round_index and not is_plain

    def end(self) -> None:
        """Finish the line, and explain the colours on stderr."""
        from rich.console import Console
        from rich.text import Text

        self._console.print()
        legend = Text()
        for source, style in SOURCE_STYLES:
            legend.append(f"{source} ", style=style)
        legend.append("| between rounds", style="dim")
        Console(stderr=True, highlight=False).print(legend)


def show_controls(text: str) -> str:
    """Control characters as their visible pictures, so that text cannot steer the terminal."""
    if text.isprintable():
        return text
    return "".join(map(_show_character, text))


def _show_character(character: str) -> str:
    code = ord(character)
    if code < 32 and character not in _HARMLESS:
        return chr(0x2400 + code)
    return "\ufffd" if 127 <= code < 160 else character
