"""What of a conversation may be shortened, and how a text is cut: by lines or words, in order, with
a mark wherever something is left out.

In: messages; scores of a text's chunks. Out: the texts that may be cut, each with its question; the
shortened text. Knows no model: whoever has one scores the chunks.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from math import ceil
from typing import Final, NamedTuple

from draftree.text.template import plain_content
from draftree.text.tokenizer import Tokenizer
from draftree.text.tools.dialect import Message

_FIRST, _LAST = 8, 24  # chunks of a long text that are always kept, at its ends
_MAX_QUESTION: Final = 1000  # characters
_MOST_NAMES: Final = 16  # places of a name; a word that is everywhere names nothing
_MOST_COPIES: Final = 4  # of four words in a row that are rare
_REACH: Final = 120  # characters to the end of a line or sentence
_LEAST_GAP: Final = 80  # characters: a mark is hardly shorter
_QUOTED = re.compile(r'"([^"\n]{3,80})"|`([^`\n]{2,80})`|“([^”\n]{3,80})”|\'([^\'\n]{3,80})\'')
_NAME = re.compile(r"[A-Za-z0-9_][\w./\\:-]*\w|\d+")
_WORD = re.compile(r"\w+")
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


def chunk_places(tokenizer: Tokenizer, text: str, ids: Sequence[int], chunk_len: int) -> list[int]:
    """The character that each chunk of tokens begins at, and the end."""
    raw = text.encode("utf-8", "replace")
    skipped = 1 if tokenizer.prefixes_space and not text.startswith(" ") else 0
    ends, total = [], -skipped
    for token in ids:
        total += len(tokenizer.token_bytes(token))
        ends.append(max(total, 0))
    scale = len(raw) / total if total > 0 and total != len(raw) else 1.0  # an unusual spelling
    starts = [0, *(ends[i - 1] for i in range(chunk_len, len(ids), chunk_len))]
    lengths = [len(raw[: round(at * scale)].decode("utf-8", "ignore")) for at in starts]
    return [*lengths, len(text)]


def choose_chunks(
    scores: Sequence[float], share: float, places: Sequence[int], text: str, asked: LongText
) -> list[bool]:
    """The share of the chunks with the highest scores, and all that is kept in any case: both ends
    of the text, its question, and what the question names or repeats.
    """
    count = len(scores)
    forced = [False] * count
    first, last = min(_FIRST, count // 32 + 1), min(_LAST, count // 16 + 1)
    forced[:first] = [True] * len(forced[:first])
    forced[count - last :] = [True] * len(forced[count - last :])
    for start, end in (asked.kept, *_named_places(text, asked)):
        for chunk in range(count):
            if start < places[chunk + 1] and places[chunk] < end:
                forced[chunk] = True
    free = [chunk for chunk in range(count) if not forced[chunk]]
    best = sorted(free, key=lambda chunk: -scores[chunk])[: ceil(share * count)]
    for chunk in best:
        forced[chunk] = True
    return forced


def _named_places(text: str, asked: LongText) -> list[tuple[int, int]]:
    """Where the text has what the question quotes, names, or says in the same four words."""
    question = asked.question
    quoted = {next(filter(None, match.groups())) for match in _QUOTED.finditer(question)}
    names = {name for name in _NAME.findall(question) if _is_name(name)}
    sentence_starts = {match.group() for match in re.finditer(r"(?:(?<=[.!?]\s)|^)\w+", question)}
    places: list[tuple[int, int]] = []
    for name in quoted | (names - {start for start in sentence_starts if start.istitle()}):
        pattern = re.compile(rf"(?<!\w){re.escape(name)}(?!\w)")
        if len(found := [match.span() for match in pattern.finditer(text)]) <= _MOST_NAMES:
            places += found
    words = [match.group().lower() for match in _WORD.finditer(question)]
    phrases = {" ".join(words[i : i + 4]) for i in range(len(words) - 3)}
    spots = [(match.group().lower(), *match.span()) for match in _WORD.finditer(text)]
    copies: dict[str, list[tuple[int, int]]] = {}
    for i in range(len(spots) - 3):
        phrase = " ".join(spot[0] for spot in spots[i : i + 4])
        if phrase in phrases:
            copies.setdefault(phrase, []).append((spots[i][1], spots[i + 3][2]))
    for found in copies.values():
        if len(found) <= _MOST_COPIES:
            places += [(max(start - _REACH, 0), end + _REACH) for start, end in found]
    return places


def _is_name(word: str) -> bool:
    """An identifier, a file, a number, or a word with a capital."""
    return bool(re.search(r"[_./\\:\d]|[a-z][A-Z]", word)) or (word[:1].isupper() and len(word) > 2)


def cut_text(
    text: str, places: Sequence[int], is_kept: Sequence[bool], count: Callable[[str], int]
) -> tuple[str, int]:
    """The kept chunks, widened to whole lines, sentences or words, and the number of spans that
    they make. count: tokens of a text, for the marks.
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


def _mark(text: str, start: int, end: int, count: Callable[[str], int]) -> str:
    words = f"[… {count(text[start:end]):,} tokens left out …]"
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
