"""Token ids and text as they arrive -> text that can be shown now.

Detokenizer holds back half characters; StopStrings holds back what may become a stop string.
Neither depends on how the stream is cut into pieces.
"""

import codecs
from collections.abc import Sequence

from draftree.text.tokenizer import Tokenizer


class Detokenizer:
    """Decodes one sequence token by token; all pieces together are what `decode` gives, without
    special tokens.

    is_continuation: the tokens go on from others, so a first space is part of the text.
    """

    def __init__(self, tokenizer: Tokenizer, *, is_continuation: bool = False) -> None:
        self.tokenizer = tokenizer
        self._starts_text = not is_continuation
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def push(self, token_id: int) -> str:
        """Text that is complete with this token; never half a character. Rows of a model that are
        no token have none.
        """
        if token_id >= self.tokenizer.vocab_size:
            return ""
        piece = self.tokenizer.piece(token_id, starts_text=self._starts_text, skip_special=True)
        self._starts_text = self.tokenizer.is_marked(token_id)
        return self._decoder.decode(piece)

    def finish(self) -> str:
        """What is left of a character that never became complete, as U+FFFD."""
        return self._decoder.decode(b"", final=True)


class StopStrings:
    """Ends a text before the stop string that is complete first (of those, the longest)."""

    def __init__(self, stops: Sequence[str]) -> None:
        if not all(stops):
            raise ValueError("a stop string must not be empty")
        self._stops = tuple(stops)
        self._held = ""
        self._is_stopped = False

    def push(self, text: str) -> tuple[str, bool]:
        """(text that is safe to show, whether a stop string was met)."""
        if self._is_stopped:
            return "", True
        text = self._held + text
        ends = [(text.find(stop) + len(stop), -len(stop)) for stop in self._stops if stop in text]
        if ends:
            end, minus_length = min(ends)
            self._held, self._is_stopped = "", True
            return text[: end + minus_length], True
        keep = held_back(text, self._stops)
        self._held = text[len(text) - keep :]
        return text[: len(text) - keep], False

    def finish(self) -> str:
        """Text that looked like the beginning of a stop string, but was not."""
        held, self._held = self._held, ""
        return held


def held_back(text: str, words: Sequence[str]) -> int:
    """How many characters at the end of text may be the beginning of one of the words."""
    longest = min(len(text), max((len(word) - 1 for word in words), default=0))
    for length in range(longest, 0, -1):
        end = text[len(text) - length :]
        if any(word.startswith(end) for word in words):
            return length
    return 0
