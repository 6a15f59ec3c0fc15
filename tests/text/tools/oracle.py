"""Whether a text may still become JSON calls, decided letter by letter; and what a whole one is."""

import json
from collections.abc import Collection

SPACES = " \t\r\n"
FENCES = ("```json", "```")


class Dead(Exception):
    """No call can begin like this."""


class Open(Exception):
    """The text ended where more may come."""


class Reader:
    """names: of known tools; empty: any name will do, and members may come in any order."""

    def __init__(self, text: str, names: Collection[str] = ()) -> None:
        self.text, self.names, self.place = text, names, 0

    def peek(self) -> str:
        if self.place == len(self.text):
            raise Open
        return self.text[self.place]

    def take(self, word: str) -> None:
        for letter in word:
            if self.peek() != letter:
                raise Dead
            self.place += 1

    def skip(self, letters: str = SPACES) -> None:
        while self.peek() in letters:
            self.place += 1

    def string(self, known: Collection[str] = ()) -> str:
        """The text between quotes as it is spelled; only a beginning of a known one, if any are."""
        self.take('"')
        start = self.place
        while self.peek() != '"':
            if self.peek() < " ":
                raise Dead
            if self.peek() == "\\":
                self.place += 1
                if self.peek() not in '"\\/bfnrtu':
                    raise Dead
                if self.peek() == "u":
                    for _ in range(4):
                        self.place += 1
                        if self.peek() not in "0123456789abcdefABCDEF":
                            raise Dead
            self.place += 1
            written = self.text[start : self.place]
            if known and not any(name.startswith(written) for name in known):
                raise Dead
        written = self.text[start : self.place]
        if known and written not in known:
            raise Dead
        self.place += 1
        return written

    def listing(self, closing: str, member) -> None:
        """Members between brackets; the opening one is read."""
        self.skip()
        if self.peek() == closing:
            self.place += 1
            return
        while True:
            member()
            self.skip()
            if self.peek() == closing:
                self.place += 1
                return
            self.take(",")
            self.skip()

    def value(self) -> None:
        match self.peek():
            case "{":
                self.take("{")
                self.listing("}", self.member)
            case "[":
                self.take("[")
                self.listing("]", self.value)
            case '"':
                self.string()
            case "t" | "f" | "n":
                words = {"t": "true", "f": "false", "n": "null"}
                self.take(words[self.peek()])
            case letter if letter in "0123456789":  # enough for the texts of these tests
                self.place += 1
            case _:
                raise Dead

    def member(self) -> None:
        self.string()
        self.colon()
        self.value()

    def colon(self) -> None:
        self.skip()
        self.take(":")
        self.skip()

    def call(self) -> None:
        seen: set[str] = set()

        def member() -> None:
            is_first = bool(self.names) and not seen
            key = self.string(("name",) if is_first else ())
            kind = "arguments" if key == "parameters" else key
            if kind in seen & {"name", "arguments"}:
                raise Dead
            seen.add(kind)
            self.colon()
            if kind == "name":
                if not self.string(self.names):
                    raise Dead
            elif kind == "arguments" and self.peek() not in '{"':
                raise Dead
            elif kind == "arguments" and self.peek() == '"':
                self.packed()
            else:
                self.value()

        self.take("{")
        self.skip()
        if self.peek() == "}":
            raise Dead
        self.listing("}", member)
        if not {"name", "arguments"} <= seen:
            raise Dead

    def packed(self) -> None:
        """An object within a string."""
        start = self.place
        self.take('"')
        self.skip(" ")
        if self.peek() != "{":
            raise Dead
        self.place = start
        self.string()

    def reply(self) -> None:
        """Nothing but calls; never done, as more may always follow."""
        self.skip()
        if self.peek() == "`":
            self.take("```")
            if self.peek() == "j":
                self.take("json")
        self.skip()
        self.item()
        while True:
            self.skip(SPACES + ",;")
            if self.peek() == "`":
                self.take("```")
                self.skip()
                raise Dead
            self.item()

    def item(self) -> None:
        if self.peek() != "[":
            self.call()
            return
        self.take("[")
        self.skip()
        if self.peek() == "]":
            raise Dead
        self.listing("]", self.call)


def may_become(text: str, names: Collection[str]) -> bool:
    """Whether a reply that begins so may be nothing but calls."""
    try:
        Reader(text, names).reply()
    except Open:
        return True
    except Dead:
        return False
    raise AssertionError


def may_become_body(text: str) -> bool | None:
    """Whether what follows an opening tag may become a call; None: it is one."""
    reader = Reader(text)
    try:
        reader.skip()
        reader.call()
        reader.skip()
        reader.take("</tool_call>")
    except Open:
        return True
    except Dead:
        return False
    return None


def read_whole(reply: str, names: Collection[str]) -> list[tuple[str, str]]:
    """The calls of a reply that is nothing else."""
    text = reply.strip()
    for fence in FENCES:
        text = text.removeprefix(fence)
    text, calls = text.removesuffix(FENCES[1]), []
    try:
        while text := text.lstrip(SPACES + ",;"):
            value, end = json.JSONDecoder().raw_decode(text)
            text = text[end:]
            for call in value if isinstance(value, list) else [value]:
                arguments = call.get("arguments", call.get("parameters"))
                if isinstance(arguments, str):
                    arguments = json.loads(arguments)
                if call.get("name") not in names or not isinstance(arguments, dict):
                    return []
                calls.append((call["name"], json.dumps(arguments, allow_nan=False)))
    except (ValueError, AttributeError):
        return []
    return calls
