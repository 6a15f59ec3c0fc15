"""Byte-level BPE: text <-> tokens whose texts spell each byte as one printable character.

In: GGUF metadata and a way of cutting words. The merging itself is the `tokenizers` library's. It
does not know about special tokens.
"""

import gc
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import cache
from itertools import chain, repeat
from typing import Any, Final

from draftree.errors import TokenizerError
from draftree.text.pretokenize import Pretokenizer
from draftree.text.vocabulary import read_ids, read_strings

_PIECE_LEN: Final = 16384  # characters of a long text that a thread encodes
_LINE_END = re.compile(r"[!-~]\n(?=[!-~])")  # which no scheme's words reach over


@cache
def byte_of_character() -> dict[str, int]:
    """The character that stands for each byte: itself if printable, else one from U+0100 on."""
    printable = (*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100))
    others = [byte for byte in range(256) if byte not in printable]
    table = {chr(byte): byte for byte in printable}
    return table | {chr(0x100 + index): byte for index, byte in enumerate(others)}


class ByteLevelBpe:
    """Encodes text that holds no special tokens. The library alone keeps the vocabulary."""

    prefixes_space = False

    def __init__(self, metadata: Mapping[str, Any], pretokenizer: Pretokenizer) -> None:
        from tokenizers import Regex, Tokenizer, pre_tokenizers

        # One object that stays, made while the texts of all tokens are there, keeps a megabyte of
        # theirs. So nothing is, and what the interpreter holds for reuse goes before more is made.
        model = _build_model(metadata, pretokenizer.whole_words_first)
        gc.collect()
        self._merger: Any = Tokenizer(model)
        self._merger.pre_tokenizer = pre_tokenizers.Sequence(
            [
                *(pre_tokenizers.Split(Regex(p), "isolated") for p in pretokenizer.patterns),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    def encode(self, text: str, starts_text: bool) -> list[int]:
        # Unlike `encode`, this lets other threads run meanwhile, and is itself run by several.
        found = self._merger.encode_batch_fast(_cut_lines(text), add_special_tokens=False)
        return list(chain.from_iterable(encoding.ids for encoding in found))

    def token_bytes(self, token_id: int) -> bytes:
        text = self.text_of(token_id)
        try:
            return bytes(map(byte_of_character().__getitem__, text))
        except KeyError:  # a plain token outside the byte alphabet can only mean its own text
            return text.encode()

    def text_of(self, token_id: int) -> str:
        text: str = self._merger.id_to_token(token_id)
        return text

    def find(self, text: str) -> int | None:
        token_id: int | None = self._merger.token_to_id(text)
        return token_id


def _cut_lines(text: str) -> list[str]:
    """Pieces whose tokens are those of the whole."""
    cuts = [0]
    while match := _LINE_END.search(text, cuts[-1] + _PIECE_LEN):
        cuts.append(match.end())
    return [text[start:end] for start, end in zip(cuts, [*cuts[1:], len(text)], strict=True)]


def _build_model(metadata: Mapping[str, Any], whole_words_first: bool) -> Any:
    from tokenizers import models

    ids = read_ids(metadata)
    pairs = _split_merges(read_strings(metadata, "merges"), _most_bytes(ids))
    try:
        return models.BPE(ids, pairs, ignore_merges=whole_words_first)
    except Exception as error:  # the library's only one: a token is unknown
        texts = (text for left, right in pairs for text in (left, right, left + right))
        raise _lacks(next(t for t in texts if t not in ids)) from error


class _Pairs(Sequence[tuple[str, str]]):
    """Neighbours in a list, made one after the other: the library copies each of them anyway."""

    def __init__(self, parts: list[str]) -> None:
        self._parts = parts

    def __len__(self) -> int:
        return len(self._parts) // 2

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[tuple[str, str]]:
        return zip(self._parts[::2], self._parts[1::2], strict=True)


def _split_merges(merges: list[str], most_bytes: int) -> _Pairs:
    """Pairs, first mention first. To cut one long string is much faster than to cut each merge."""
    distinct = list(dict.fromkeys(merges))
    if not distinct:
        return _Pairs([])
    lines = "\n".join(distinct)
    parts = lines.replace("\n", " ").split(" ")
    if set(map(str.count, distinct, repeat(" "))) != {1} or len(parts) != 2 * len(distinct):
        bad = next(m for m in distinct if m.count(" ") != 1 or "\n" in m)
        raise TokenizerError(f"The merge {bad!r} in the model file is not two tokens and a space.")
    if _most_bytes(distinct) - 1 > most_bytes:
        longest = max(distinct, key=lambda merge: len(merge.encode()))
        raise _lacks(longest.replace(" ", ""))  # the library would panic
    return _Pairs(parts)


def _most_bytes(texts: Iterable[str]) -> int:
    return max(map(len, map(str.encode, texts)))


def _lacks(token: str) -> TokenizerError:
    return TokenizerError(f"A merge in the model file needs the token {token!r}, which it lacks.")
