"""Strings <-> token ids, as the model's own file describes them.

In: GGUF metadata. Out: a Tokenizer; ids are those that llama.cpp gives for the same file. Special
tokens are cut out of the text first, longest first; the rest goes to the vocabulary's own scheme.
It does not know about chat: see template.
"""

import threading
from collections import OrderedDict
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any, Protocol, Self

from draftree.errors import TokenizerError
from draftree.text.bpe import ByteLevelBpe
from draftree.text.pretokenize import find_pretokenizer
from draftree.text.spm import SentencePiece
from draftree.text.vocabulary import (
    MARKED_TYPES,
    SPECIAL_TYPES,
    TokenType,
    Vocabulary,
    read_flag,
    read_id,
    read_ids,
    read_numbers,
    read_text,
    read_vocabulary,
)

# What a file of each kind means where it names no special ids.
_DEFAULT_IDS = {
    "llama": {
        "tokenizer.ggml.unknown_token_id": 0,
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
}

_MOST_CHARS, _OVERHEAD = 2**21, 64  # of all texts that are remembered, and more of each


class Scheme(Protocol):
    """How text without special tokens becomes tokens and back."""

    prefixes_space: bool  # a space is put before text that follows nothing or a special token

    def encode(self, text: str, starts_text: bool) -> list[int]: ...

    def token_bytes(self, token_id: int) -> bytes: ...

    def text_of(self, token_id: int) -> str:
        """As the file spells it."""
        ...

    def find(self, text: str) -> int | None:
        """The token that is spelled so."""
        ...


class _RecentTexts:
    """Tokens of texts that were encoded lately: of a conversation, only new messages take time."""

    def __init__(self) -> None:
        self._known: OrderedDict[tuple[str, bool], list[int]] = OrderedDict()
        self._num_chars = 0
        self._lock = threading.Lock()

    def encode(self, scheme: Scheme, text: str, starts_text: bool) -> list[int]:
        key = text, starts_text
        if len(text) > _MOST_CHARS:
            return scheme.encode(text, starts_text)
        with self._lock:
            found = self._known.get(key)
            if found is not None:
                self._known.move_to_end(key)
                return found
        found = scheme.encode(text, starts_text)
        with self._lock:
            self._num_chars += 0 if key in self._known else len(text) + _OVERHEAD
            self._known[key] = found
            while self._num_chars > _MOST_CHARS and len(self._known) > 1:
                (oldest, _), _ = self._known.popitem(last=False)
                self._num_chars -= len(oldest) + _OVERHEAD
        return found


class Tokenizer:
    """One model's vocabulary, ready for use; immutable as far as callers can see."""

    def __init__(
        self,
        vocabulary: Vocabulary,
        scheme: Scheme,
        *,
        adds_bos: bool,
        adds_eos: bool,
        chat_template: str | None,
    ) -> None:
        self.vocab_size = vocabulary.num_tokens
        self.bos_id = vocabulary.bos_id
        self.eos_id = vocabulary.eos_id
        self.mask_id = vocabulary.mask_id
        self.stop_ids = vocabulary.stop_ids
        self.chat_template = chat_template
        self._types = vocabulary.types
        self._scheme, self._recent = scheme, _RecentTexts()
        self._bytes: dict[int, bytes] = {}  # of the tokens asked for so far
        self._prefix = _present(self.bos_id, adds_bos)
        self._suffix = _present(self.eos_id, adds_eos)
        marked = (i for i, kind in vocabulary.types.items() if kind in MARKED_TYPES)
        # Longest first, so that no token hides inside another.
        self._marked = sorted(marked, key=lambda i: len(scheme.text_of(i).encode()), reverse=True)

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, Any], template: str = "") -> Self:
        """template: a chat template instead of the model's own: a name, Jinja or a file."""
        model = read_text(metadata, "tokenizer.ggml.model")
        if model is None:
            raise TokenizerError("The model file has no tokenizer (tokenizer.ggml.model).")
        metadata = {**_DEFAULT_IDS.get(model, {}), **metadata}
        scheme: Scheme
        if model == "gpt2":
            name = read_text(metadata, "tokenizer.ggml.pre") or "default"
            pretokenizer = find_pretokenizer(name)
            scheme = ByteLevelBpe(metadata, pretokenizer)
            num_tokens = len(metadata["tokenizer.ggml.tokens"])
            vocabulary = read_vocabulary(metadata, num_tokens, scheme.find)
            adds_bos = pretokenizer.adds_bos
        elif model == "llama":
            ids = read_ids(metadata)
            vocabulary = read_vocabulary(metadata, len(ids), ids.get)
            scores = read_numbers(metadata, "scores", len(ids))
            if scores is None:
                raise TokenizerError("The model file has no tokenizer.ggml.scores.")
            prefixes_space = read_flag(metadata, "add_space_prefix", True)
            scheme = SentencePiece(vocabulary, ids, scores, prefixes_space)
            adds_bos = True
        else:
            raise TokenizerError(
                f"The model's tokenizer is of the kind {model!r}, which is not supported; "
                "supported are gpt2 (byte-level BPE) and llama (SentencePiece)."
            )
        read_id(metadata, "padding", vocabulary.num_tokens)  # unused, but a bad one is damage
        return cls(
            vocabulary,
            scheme,
            adds_bos=read_flag(metadata, "add_bos_token", adds_bos),
            adds_eos=read_flag(metadata, "add_eos_token", False),
            chat_template=_read_template(template)
            if template
            else read_text(metadata, "tokenizer.chat_template"),
        )

    def encode(
        self,
        text: str,
        *,
        add_special: bool = True,
        parse_special: bool = True,
        starts_text: bool = True,
    ) -> list[int]:
        """add_special: begin and end as the model wants it. parse_special: control tokens that are
        spelled out in the text become those tokens (user-defined tokens always do). starts_text:
        nothing stands before it."""
        try:
            text.encode()
        except UnicodeEncodeError:  # halves of surrogate pairs, from JSON escapes
            text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        ids = list(self._prefix) if add_special else []
        for fragment in self._cut_marked(text, parse_special):
            if isinstance(fragment, int):
                ids.append(fragment)
            else:
                ids += self._recent.encode(self._scheme, fragment, starts_text)
            starts_text = isinstance(fragment, int)
        return ids + list(self._suffix) if add_special else ids

    def encode_chat(self, text: str) -> list[int]:
        """A rendered chat template, which may or may not spell out the first token itself."""
        ids = self.encode(text, add_special=False)
        return ids if tuple(ids[: len(self._prefix)]) == self._prefix else [*self._prefix, *ids]

    def decode(self, ids: Iterable[int], *, skip_special: bool = False) -> str:
        """The text of a whole sequence. Bytes that are not UTF-8 become U+FFFD."""
        pieces = []
        starts_text = True
        for token_id in ids:
            pieces.append(self.piece(token_id, starts_text=starts_text, skip_special=skip_special))
            starts_text = self._scheme.prefixes_space and self.is_marked(token_id)
        return b"".join(pieces).decode("utf-8", "replace")

    def piece(self, token_id: int, *, starts_text: bool, skip_special: bool) -> bytes:
        """What one token adds to a text; starts_text: it follows nothing, or a marked token."""
        piece = self.token_bytes(token_id)
        if skip_special and self.is_special(token_id):
            return b""
        if starts_text and self._scheme.prefixes_space and not self.is_marked(token_id):
            return piece.removeprefix(b" ")  # the one that encode put there
        return piece

    def token_bytes(self, token_id: int) -> bytes:
        """The raw bytes of one token; special tokens give their own text."""
        known = self._bytes.get(token_id)
        if known is None:
            if not 0 <= token_id < self.vocab_size:
                raise TokenizerError(
                    f"There is no token {token_id}; the vocabulary has {self.vocab_size} tokens."
                )
            kind = self._types.get(token_id, TokenType.NORMAL)
            if kind in MARKED_TYPES:
                known = self._scheme.text_of(token_id).encode()
            else:
                known = b"" if kind is TokenType.UNUSED else self._scheme.token_bytes(token_id)
            self._bytes[token_id] = known
        return known

    def written_bytes(self, token_id: int) -> bytes:
        """Of a token that a model chose or drafted: it may have more rows than there are tokens."""
        return self.token_bytes(token_id) if token_id < self.vocab_size else b""

    def is_special(self, token_id: int) -> bool:
        """Whether the token steers the model and is not part of the text it writes."""
        return self._types.get(token_id) in SPECIAL_TYPES

    def is_marked(self, token_id: int) -> bool:
        """Whether encode finds the token's text as a whole: special and user-defined tokens."""
        return self._types.get(token_id) in MARKED_TYPES

    @property
    def prefixes_space(self) -> bool:
        """Whether text that follows nothing, or a marked token, is written with a space before."""
        return self._scheme.prefixes_space

    def find(self, text: str) -> int | None:
        """The id of the token that is spelled so in the vocabulary."""
        return self._scheme.find(text)

    def _cut_marked(self, text: str, parse_special: bool) -> list[str | int]:
        fragments: list[str | int] = [text] if text else []
        for token_id in self._marked:
            token = self._scheme.text_of(token_id)
            if token not in text or (self.is_special(token_id) and not parse_special):
                continue
            cut: list[str | int] = []
            for fragment in fragments:
                if isinstance(fragment, int):
                    cut.append(fragment)
                    continue
                for index, part in enumerate(fragment.split(token)):
                    cut += [token_id] if index else []
                    cut += [part] if part else []
            fragments = cut
        return fragments


def _present(token_id: int | None, is_added: bool) -> tuple[int, ...]:
    return (token_id,) if is_added and token_id is not None else ()


def _read_template(path: str) -> str:
    from draftree.text.named_template import TEMPLATES

    # A sentence is a template as well: one that says the same whatever is asked.
    is_sentence = any(map(str.isspace, path)) and "/" not in path and not Path(path).suffix
    if path in TEMPLATES or "{{" in path or "{%" in path:
        return TEMPLATES.get(path, path)
    if is_sentence and not Path(path).exists():
        return path
    try:
        return Path(path).expanduser().read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        names = ", ".join(TEMPLATES)
        sentence = f"The chat template {path} cannot be read ({error}); known names are {names}."
        raise TokenizerError(sentence) from error
