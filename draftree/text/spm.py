"""SentencePiece BPE: spaces are written as U+2581, and the best-scored neighbours merge first.

In: a vocabulary, its texts and one score a token. Characters without a token become byte tokens.
It does not know about special tokens.
"""

import re
from heapq import heapify, heappop, heappush

from draftree.errors import TokenizerError
from draftree.text.vocabulary import TokenType, Vocabulary

SPACE = "\u2581"
_WORD = re.compile(f"{SPACE}+[^{SPACE}]*|[^{SPACE}]+")
_BYTE = re.compile("<0x([0-9A-Fa-f]{2})>")
_MAX_CACHED_WORDS = 50_000
_MAX_CACHED_LENGTH = 64


class SentencePiece:
    """Encodes text that holds no special tokens."""

    def __init__(
        self, vocabulary: Vocabulary, ids: dict[str, int], scores: list[float], prefixes_space: bool
    ) -> None:
        self.prefixes_space = prefixes_space
        self._vocabulary, self._ids, self._scores = vocabulary, ids, scores
        self._tokens = list(ids)
        # Words can be merged one by one, and remembered, if no token reaches over their border.
        self._is_split = not any(SPACE in text.lstrip(SPACE) for text in ids)
        self._words: dict[str, list[int]] = {}

    def encode(self, text: str, starts_text: bool) -> list[int]:
        """starts_text: the text follows nothing, or a special token."""
        if self.prefixes_space and starts_text:
            text = " " + text
        text = text.replace(" ", SPACE)
        if not self._is_split:
            return self._merge(text)
        return [token_id for word in _WORD.findall(text) for token_id in self._encode_word(word)]

    def token_bytes(self, token_id: int) -> bytes:
        text = self._tokens[token_id]
        if self._vocabulary.type_of(token_id) is TokenType.BYTE:
            match = _BYTE.fullmatch(text)
            return bytes([int(match[1], 16)]) if match else text.encode()
        return text.replace(SPACE, " ").encode()

    def text_of(self, token_id: int) -> str:
        return self._tokens[token_id]

    def find(self, text: str) -> int | None:
        return self._ids.get(text)

    def _encode_word(self, word: str) -> list[int]:
        known = self._words.get(word)
        if known is not None:
            return known
        ids = self._merge(word)
        if len(word) <= _MAX_CACHED_LENGTH and len(self._words) < _MAX_CACHED_WORDS:
            self._words[word] = ids
        return ids

    def _merge(self, text: str) -> list[int]:
        """Merge the best-scored pair until none is a token; of equals, the leftmost."""
        ids, scores = self._ids, self._scores
        symbols = list(text)
        after = list(range(1, len(symbols) + 1))
        before = list(range(-1, len(symbols)))
        heap: list[tuple[float, int, int, str]] = []
        for left in range(len(symbols) - 1):
            merged = symbols[left] + symbols[left + 1]
            if merged in ids:
                heap.append((-scores[ids[merged]], left, left + 1, merged))
        heapify(heap)
        while heap:
            _, left, right, merged = heappop(heap)
            if not symbols[right] or symbols[left] + symbols[right] != merged:
                continue  # one of the two has been merged with another neighbour since
            symbols[left], symbols[right] = merged, ""
            after[left] = after[right]
            before[after[right]] = left
            for first, second in ((before[left], left), (left, after[left])):
                if first < 0 or second >= len(symbols):
                    continue
                candidate = symbols[first] + symbols[second]
                if candidate in ids:
                    heappush(heap, (-scores[ids[candidate]], first, second, candidate))
        return [token_id for symbol in symbols if symbol for token_id in self._symbol_ids(symbol)]

    def _symbol_ids(self, symbol: str) -> list[int]:
        ids = self._ids
        if symbol in ids:
            return [ids[symbol]]
        found = []
        for byte in symbol.encode():
            token_id = ids.get(f"<0x{byte:02X}>", self._vocabulary.unknown_id)
            if token_id is None:
                raise TokenizerError(
                    f"The vocabulary has no token for {symbol!r}, nor for byte {byte:#04x} of it."
                )
            found.append(token_id)
        return found
