"""Calls between tags, found in text as it arrives: the same calls however the text is cut.

A call that is known to follow its grammar is passed on piece by piece; any other is held back until
it is whole, or malformed: then it is text, and calls are looked for in what follows its tag.
"""

from collections.abc import Callable, Mapping
from typing import NamedTuple, Protocol

from draftree.text.detokenize import held_back
from draftree.text.grammar import Recognizer
from draftree.text.tools.dialect import Piece, ToolCallDelta, WrittenCall


class CallStyle(NamedTuple):
    """How a dialect's calls look."""

    opening: str
    closing: str
    headers: Mapping[str, str]  # what a trusted call begins with after the tag -> its tool's name
    read_call: Callable[[str], WrittenCall | None]  # a whole body; None: malformed
    new_reader: "Callable[[str], ArgumentReader]"  # for the arguments of a trusted call, by name
    rules: str = ""  # Lark rules of a body and its closing tag; empty: there are trusted calls only


class ArgumentReader(Protocol):
    """Turns the rest of a trusted call into JSON text."""

    is_done: bool

    def push(self, text: str) -> tuple[str, str]:
        """Arguments, and what follows them."""
        ...


class TagParser:
    """White space before calls belongs to nothing and is dropped; after them, unless there was text
    before that it sets apart from more text.
    """

    def __init__(self, style: CallStyle, is_trusted: bool, new_id: Callable[[], str]) -> None:
        self._style, self._new_id = style, new_id
        self._is_trusted = is_trusted
        self._num_calls = 0
        self._is_fresh = False  # there was no text since the last call
        self._has_text = False
        self._held = ""
        self._spaces: str | None = None  # before the call that the text is in; None: outside
        self._recognizer: Recognizer | None = None  # of a call that is not known to be one
        self._num_read = 0  # how much of what is held it has read
        self._tries_headers = False
        self._reader: ArgumentReader | None = None

    def push(self, text: str) -> list[Piece]:
        self._held += text
        pieces: list[Piece] = []
        while self._take(pieces):
            pass
        return pieces

    def finish(self) -> list[Piece]:
        held, self._held = self._held, ""
        if self._reader is not None:
            return []  # cut short; its arguments have been passed on as far as they came
        if self._spaces is not None:
            held = self._spaces + self._style.opening + held
        elif self._is_fresh and not held.strip():
            return []
        pieces: list[Piece] = []
        self._say(held, pieces)
        return pieces

    def _take(self, pieces: list[Piece]) -> bool:
        """Deal with the beginning of what is held; False: more must arrive first."""
        if self._spaces is None:
            return self._take_text(pieces)
        if self._reader is not None:
            return self._take_arguments(self._reader, pieces)
        if self._tries_headers:
            return self._take_header(pieces)
        return self._take_whole(pieces)

    def _take_text(self, pieces: list[Piece]) -> bool:
        opening = self._style.opening
        before, tag, after = self._held.partition(opening)
        end = len(before) if tag else len(before) - held_back(before, (opening,))
        text = before[:end].rstrip()
        self._say(text, pieces)
        if not tag:
            self._held = before[len(text) :]
            return False
        self._spaces, self._held, self._num_read = before[len(text) :], after, 0
        self._recognizer = Recognizer(self._style.rules) if self._style.rules else None
        self._tries_headers = self._is_trusted
        return True

    def _take_header(self, pieces: list[Piece]) -> bool:
        held, headers = self._held, self._style.headers
        header = next((header for header in headers if held.startswith(header)), None)
        if header is None:
            self._tries_headers = any(known.startswith(held) for known in headers)
            return not self._tries_headers
        name = headers[header]
        self._held, self._reader = held[len(header) :], self._style.new_reader(name)
        pieces.append(Piece("", ToolCallDelta(self._num_calls, self._new_id(), name, "")))
        return True

    def _take_arguments(self, reader: ArgumentReader, pieces: list[Piece]) -> bool:
        if not reader.is_done:
            arguments, self._held = reader.push(self._held)
            if arguments:
                pieces.append(Piece("", ToolCallDelta(self._num_calls, None, None, arguments)))
            if not reader.is_done:
                return False
        _, tag, after = self._held.partition(self._style.closing)
        if not tag:
            return False
        self._end_call(after)
        return True

    def _take_whole(self, pieces: list[Piece]) -> bool:
        held, recognizer = self._held, self._recognizer
        opening, closing = self._style.opening, self._style.closing
        rest = recognizer.push(held[self._num_read :]) if recognizer is not None else None
        self._num_read = len(held)
        if recognizer is None or rest is None:
            self._say(f"{self._spaces}{opening}", pieces)
            self._spaces = None
            return True
        if not recognizer.is_complete:
            return False
        body = held[: len(held) - len(rest) - len(closing)]
        call = self._style.read_call(body)
        if call is None:
            self._say(f"{self._spaces}{opening}{body}{closing}", pieces)
            self._spaces, self._held = None, rest
        else:
            delta = ToolCallDelta(self._num_calls, self._new_id(), call.name, call.arguments)
            pieces.append(Piece("", delta))
            self._end_call(rest)
        return True

    def _say(self, text: str, pieces: list[Piece]) -> None:
        if self._is_fresh and not self._has_text:
            text = text.lstrip()
        if text:
            pieces.append(Piece(text))
            self._is_fresh, self._has_text = False, True

    def _end_call(self, after: str) -> None:
        self._num_calls += 1
        self._is_fresh = True
        self._spaces, self._reader, self._held = None, None, after


class JsonReader:
    """Arguments that are a JSON object already: finds where it ends."""

    def __init__(self) -> None:
        self.is_done = False
        self._depth = 0
        self._is_quoted = False
        self._is_escaped = False

    def push(self, text: str) -> tuple[str, str]:
        for i, character in enumerate(text):
            if self._is_quoted:
                if self._is_escaped:
                    self._is_escaped = False
                elif character == "\\":
                    self._is_escaped = True
                elif character == '"':
                    self._is_quoted = False
            elif character == '"':
                self._is_quoted = True
            elif character in "{[":
                self._depth += 1
            elif character in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.is_done = True
                    return text[: i + 1], text[i + 1 :]
        return text, ""
