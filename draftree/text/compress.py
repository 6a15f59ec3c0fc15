"""What of a conversation may be shortened, and how a text is cut: by lines or words, in order, with
a mark wherever something is left out.

In: messages; scores of a text's chunks. Out: the texts that may be cut, each with its question; the
shortened text. Knows no model: whoever has one scores the chunks.
"""

import re
from bisect import bisect_left, bisect_right
from collections import Counter, deque
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Final, NamedTuple

import numpy as np

from draftree.text.template import plain_content
from draftree.text.tokenizer import Tokenizer
from draftree.text.tools.dialect import Message

_FIRST, _LAST = 8, 24  # chunks of a long text that are always kept, at its ends
_MAX_QUESTION: Final = 1000  # characters
_MOST_NAMES: Final = 16  # places of a name; a word that is everywhere names nothing
_MOST_COPIES: Final = 4  # of four words in a row, or of an identifier, that are rare
_MOST_FOLLOWED, _MOST_LOOKED_FOR = 16, 128  # identifiers beside those that the question names
_REACH: Final = 120  # characters to the end of a line or sentence
_LEAST_GAP: Final = 80  # characters: a mark is hardly shorter
_QUOTED = re.compile(r'"([^"\n]{3,80})"|`([^`\n]{2,80})`|“([^”\n]{3,80})”|\'([^\'\n]{3,80})\'')
_NAME = re.compile(r"[A-Za-z0-9_][\w./\\:-]*\w|\d+")
_WORD = re.compile(r"\w+")
_IDENTIFIER = re.compile(r"(?=\w*[A-Za-z])(?:\w*[_\d]|\w*[a-z][A-Z])\w*")
_DEFINED = re.compile(
    r"\b(?:class|def|enum|fn|func|function|interface|struct|trait|type)\s+(\w+)\s*[(:{<\[]"
)
_SENTENCE = re.compile(r"(?<=[.!?])\s+")
# Questions about a text as a whole, which no part of it answers.
_WHOLE = re.compile(
    r"summar|translat|rewrit|refactor|review|proofread|how (many|often|long)|\b(count|every|each"
    r"|overall|entire|whole)\b|\b(list|all) (of|the)\b",
    re.IGNORECASE,
)


class LongText(NamedTuple):
    """The content of a message that may be shortened. kept: characters of it that must stay."""

    message: int
    text: str
    question: str
    kept: tuple[int, int] = (0, 0)


def find_long_texts(
    messages: Sequence[Message], least_len: int, *, is_eager: bool, is_own: bool
) -> list[LongText]:
    """Of at least so many characters. What is found of a message does not change when others
    follow, once a user has answered it. is_eager: also where a question must be guessed; is_own:
    also the last user's text, by its own question.
    """
    plain = [plain_content(message.get("content")) or "" for message in messages]
    roles = [message.get("role") for message in messages]
    users = [index for index, role in enumerate(roles) if role == "user"]
    found: list[LongText] = []
    for index, text in enumerate(plain):
        if len(text) < least_len or roles[index] not in ("user", "assistant", "tool"):
            continue
        later = next((user for user in users if user > index), None)
        own = _find_question(text, is_eager) if roles[index] == "user" and is_own else None
        if own is not None:
            start, end = own
            found.append(LongText(index, text, text[start:end], own))
        elif later is not None:
            question = plain[later]
            if len(question) > _MAX_QUESTION:
                start, end = _find_question(question, is_eager=True) or (0, 0)
                question = question[start:end]
            if is_eager or not _WHOLE.search(question):
                found.append(LongText(index, text, question))
    return found


def _find_question(text: str, is_eager: bool) -> tuple[int, int] | None:
    """Where a user's text asks about itself: its last or first paragraph, or line."""
    body_end, body_start = len(text.rstrip()), len(text) - len(text.lstrip())
    for gap in ("\n\n", "\n"):
        last = text.rfind(gap, 0, body_end)
        first = text.find(gap, body_start)
        for start, end in ((last + 1, body_end), (body_start, first)):
            piece = text[start:end]
            if "?" in piece and len(piece) <= _MAX_QUESTION:
                return (start, end) if is_eager or not _WHOLE.search(piece) else None
    return (max(body_end - _MAX_QUESTION // 2, 0), body_end) if is_eager else None


def token_places(tokenizer: Tokenizer, text: str, ids: Sequence[int]) -> np.ndarray:
    """The character that each token begins at, and the end."""
    raw = np.frombuffer(text.encode("utf-8", "replace"), np.uint8)
    used, which = np.unique(np.asarray(ids, np.int64), return_inverse=True)
    lengths = np.array([len(tokenizer.token_bytes(token)) for token in used.tolist()], np.int64)
    ends = np.cumsum(lengths[which])
    if tokenizer.prefixes_space and not text.startswith(" "):
        ends -= 1
    total = int(ends[-1]) if len(ends) else 0
    if total > 0 and total != len(raw):  # an unusual spelling
        ends = np.rint(ends * (len(raw) / total)).astype(np.int64)
    places = np.concatenate(([0], np.clip(ends, 0, len(raw))))
    if len(raw) != len(text):  # some characters have several bytes; one that was cut is not over
        is_first = np.append((raw & 0xC0) != 0x80, True)
        places = np.cumsum(is_first)[places] - 1
    places[-1] = len(text)
    return places


def choose_chunks(
    scores: Sequence[float], share: float, places: Sequence[int], text: str, asked: LongText
) -> list[bool]:
    """The share of the chunks with the highest scores, and all that is kept in any case: both ends
    of the text, its question, and what the question names or repeats.
    """
    count = len(scores)
    head, tail = min(_FIRST, count // 32 + 1), min(_LAST, count // 16 + 1)
    forced = [chunk < head or chunk >= count - tail for chunk in range(count)]
    for start, end in (asked.kept, *_named_places(text, asked)):
        first, behind = max(bisect_right(places, start) - 1, 0), bisect_left(places, end)
        for chunk in range(first, min(behind, count)):
            forced[chunk] = True
    free = [chunk for chunk in range(count) if not forced[chunk]]
    best = sorted(free, key=lambda chunk: -scores[chunk])[: ceil(share * count)]
    for chunk in best:
        forced[chunk] = True
    return forced


def _named_places(text: str, asked: LongText) -> list[tuple[int, int]]:
    """Where the text has what the question quotes, names, or says in the same four words, where
    code defines one of its words, and where names lead to.
    """
    question = asked.question
    quoted = {next(filter(None, match.groups())) for match in _QUOTED.finditer(question)}
    names = {name for name in _NAME.findall(question) if _is_name(name)}
    sentence_starts = {match.group() for match in re.finditer(r"(?:(?<=[.!?]\s)|^)\w+", question)}
    places: list[tuple[int, int]] = []
    for name in quoted | (names - {start for start in sentence_starts if start.istitle()}):
        places += _find_name(text, name)
    places += _follow_names(text, places)
    asked_words = set(_WORD.findall(question))
    defined = [match for match in _DEFINED.finditer(text) if match[1] in asked_words]
    most = Counter(match[1] for match in defined)
    places += [match.span() for match in defined if most[match[1]] <= _MOST_NAMES]
    for found in _find_copies(text, question).values():
        if len(found) <= _MOST_COPIES:
            places += [(max(start - _REACH, 0), end + _REACH) for start, end in found]
    return places


def _find_name(text: str, name: str) -> list[tuple[int, int]]:
    """As a word of its own; nowhere, where it is everywhere."""
    found: list[tuple[int, int]] = []
    start = text.find(name)
    while start >= 0 and len(found) <= _MOST_NAMES:
        end = start + len(name)
        is_inside = _WORD.match(text, start - 1, start) if start else None
        if is_inside or _WORD.match(text, end, end + 1):
            end = start + 1
        else:
            found.append((start, end))
        start = text.find(name, end)
    return found if len(found) <= _MOST_NAMES else []


def _follow_names(text: str, places: Sequence[tuple[int, int]]) -> list[tuple[int, int]]:
    """Where rare identifiers are that stand in a line with one of these places, and so on: what a
    name is made from, or what is made from it.
    """
    found: list[tuple[int, int]] = []
    waiting, seen, num_followed = deque(sorted(places)), set[str](), 0
    while waiting and num_followed < _MOST_FOLLOWED and len(seen) < _MOST_LOOKED_FOR:
        start, end = waiting.popleft()
        line = text[_line_start(text, start) : _line_end(text, end)]
        names = [name for name in dict.fromkeys(_IDENTIFIER.findall(line)) if name not in seen]
        seen.update(names)
        for others in (_find_name(text, name) for name in names):
            if num_followed < _MOST_FOLLOWED and 1 < len(others) <= _MOST_COPIES:
                num_followed += 1
                found += others
                waiting += others
    return found


def _find_copies(text: str, question: str) -> dict[str, list[tuple[int, int]]]:
    """Where the text has four words in a row of the question."""
    asked = [word.lower() for word in _WORD.findall(question)]
    phrases, known = {" ".join(asked[i : i + 4]) for i in range(len(asked) - 3)}, set(asked)
    words = [word.lower() for word in _WORD.findall(text)]
    is_known = np.fromiter((word in known for word in words), bool, len(words))
    in_row = is_known[:-3] & is_known[1:-2] & is_known[2:-1] & is_known[3:]
    starts = {i: " ".join(words[i : i + 4]) for i in np.flatnonzero(in_row).tolist()}
    starts = {i: phrase for i, phrase in starts.items() if phrase in phrases}
    copies: dict[str, list[tuple[int, int]]] = {}
    spans = [match.span() for match in _WORD.finditer(text)] if starts else []
    for i, phrase in starts.items():
        copies.setdefault(phrase, []).append((spans[i][0], spans[i + 3][1]))
    return copies


def _is_name(word: str) -> bool:
    """An identifier, a file, a number, or a word with a capital."""
    return bool(re.search(r"[_./\\:\d]|[a-z][A-Z]", word)) or (word[:1].isupper() and len(word) > 2)


def cut_text(
    text: str, places: Sequence[int], is_kept: Sequence[bool], count: Callable[[int, int], int]
) -> tuple[str, int]:
    """The kept chunks, widened to whole lines, sentences or words, and the number of spans that
    they make. count: tokens from a character to another, for the marks.
    """
    spans: list[list[int]] = []
    for chunk, kept in enumerate(is_kept):
        if not kept:
            continue
        start, end = _line_start(text, places[chunk]), _line_end(text, places[chunk + 1])
        if spans and start - spans[-1][1] < _LEAST_GAP:
            spans[-1][1] = max(end, spans[-1][1])
        else:
            spans.append([start, end])
    if spans and len(text) - spans[-1][1] < _LEAST_GAP:
        spans[-1][1] = len(text)
    if spans and spans[0][0] < _LEAST_GAP:
        spans[0][0] = 0
    pieces: list[str] = []
    at = 0
    for start, end in (*spans, [len(text), len(text)]):
        if start > at:
            pieces.append(_mark(text, at, start, count))
        pieces.append(text[start:end])
        at = end
    return "".join(pieces), len(spans)


def _mark(text: str, start: int, end: int, count: Callable[[int, int], int]) -> str:
    words = f"[… {count(start, end):,} tokens left out …]"
    is_line = start == 0 or text[start - 1] == "\n"
    before = "" if is_line or text[start - 1].isspace() else " "
    after = "" if end == len(text) else "\n" if text[end - 1] == "\n" else " "
    return f"{before}{words}{after}"


def _line_start(text: str, at: int) -> int:
    """The nearest beginning of a line before, or where that is far, of a sentence, or of a word."""
    low = max(at - _REACH, 0)
    line = text.rfind("\n", low, at)
    if line >= 0 or low == 0:
        return line + 1
    sentences = [match.end() for match in _SENTENCE.finditer(text, low, at)]
    return sentences[-1] if sentences else text.rfind(" ", low, at) + 1 or at


def _line_end(text: str, at: int) -> int:
    """Likewise, the nearest end behind."""
    high = min(at + _REACH, len(text))
    line = text.find("\n", at - 1, high)
    if line >= 0 or high == len(text):
        return line + 1 or high
    sentence = _SENTENCE.search(text, at - 1, high)
    return sentence.end() if sentence else text.find(" ", at - 1, high) + 1 or at


def replace_content(messages: Sequence[Message], texts: Mapping[int, str]) -> list[Message]:
    """The messages with these contents in place of their own, and nothing else changed."""
    return [
        {**message, "content": texts[index]} if index in texts else message
        for index, message in enumerate(messages)
    ]
