"""Long messages of a conversation, shortened before the target reads them.

In: messages. Out: the same with parts of long contents left out, and what that saved. A text is
shortened once and remembered by its content and its question, so that a conversation's prompt
begins with the one before; what was read whole, the cache of conversations has. Knows neither
templates nor requests.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Container, Mapping, Sequence
from hashlib import sha256
from typing import Final, NamedTuple

import numpy as np

from draftree.config import COMPRESS_NAMES, EngineConfig, is_share
from draftree.core import Compression
from draftree.engine.engine import TokenEngine
from draftree.engine.locate import locate
from draftree.engine.scoring import CHUNK_LEN, WINDOW_LEN, Scorer
from draftree.text.compress import (
    LongText,
    choose_chunks,
    cut_text,
    find_long_texts,
    replace_content,
    token_places,
)
from draftree.text.template import plain_content
from draftree.text.tokenizer import Tokenizer
from draftree.text.tools.dialect import Message

AUTO_TOKENS: Final = 4096  # a text must have more, for the time it saves to be worth a risk
LEAST_TOKENS: Final = 1024  # where compression was asked for in any case
AUTO_SHARE: Final = 0.2  # twice what kept every needle of the benchmark
AUTO_OWN_SHARE: Final = 0.3  # by the target's first layers, which miss more
_MOST_TEXTS: Final = 512  # that are remembered
_REPLY: Final = b"reply"


class Shortened(NamedTuple):
    text: str | None  # None: nothing was gained, the text stays whole
    num_spans: int
    tokens_before: int
    tokens_kept: int


class Compressor:
    """The scoring model is opened when the first long text comes, or to warm up."""

    def __init__(self, tokens: TokenEngine, tokenizer: Tokenizer, config: EngineConfig) -> None:
        self._tokens, self._tokenizer, self._config = tokens, tokenizer, config
        self._model = config.compress_with
        self._scorer: Scorer | None = None
        self._scorer_tokenizer = tokenizer
        self._known: OrderedDict[bytes, Shortened] = OrderedDict()
        self._read: OrderedDict[bytes, None] = OrderedDict()  # conversations up to a whole text
        self._lock = threading.Lock()

    def warm_up(self) -> None:
        """On a GPU, which makes passes ready when their size comes a first and a second time."""
        config = self._config
        if config.warm_up and config.compress != "off" and self._tokens.plan.gpu is not None:
            self.open()[0].score([0] * 2 * WINDOW_LEN, [0])

    def reset(self) -> None:
        """Know no texts, as a new one does."""
        self._known.clear()
        self._read.clear()

    @property
    def is_self(self) -> bool:
        return self._model == "self"

    def shorten(
        self,
        messages: Sequence[Message],
        mode: str | None = None,
        keep: float | str | None = None,
        has_tools: bool = False,
        has_room: bool = True,
    ) -> tuple[Sequence[Message], Compression | None]:
        """mode, keep: of this request; None is as the engine was opened. The last user's own text
        is read whole where there are tools, and by "auto" where the target itself would have to
        read it first. has_room: "auto" may leave texts whole that were read so, since reading them
        again, though shorter, would take longer.
        """
        mode = self._config.compress if mode is None else mode
        keep = self._config.compress_keep if keep is None else keep
        if mode not in COMPRESS_NAMES:
            raise ValueError("compress must be off, auto or always")
        if not is_share(keep):
            raise ValueError("compress_keep must be auto or a number above 0 and at most 1")
        if mode == "off":
            return messages, None
        is_eager = mode == "always"
        least = LEAST_TOKENS if is_eager else AUTO_TOKENS
        is_own = not has_tools and (is_eager or not self.is_self)
        auto_share = AUTO_OWN_SHARE if self.is_self else AUTO_SHARE
        share = auto_share if keep == "auto" else float(keep)
        long_texts = find_long_texts(messages, least, is_eager=is_eager, is_own=is_own)
        report, texts, keys = Compression(), {}, self._find_keys(messages, least, is_eager)
        with self._lock:
            for long_text in long_texts:
                if has_room and keys.get(long_text.message) in self._read:
                    continue
                done = self._shorten(long_text, share, least, report)
                if done.text is not None:
                    texts[long_text.message] = done.text
                    report.num_texts += 1
                    report.num_spans += done.num_spans
                    report.tokens_before += done.tokens_before
                    report.tokens_kept += done.tokens_kept
            self._remember_read(keys, texts)
        return replace_content(messages, texts), report

    def _find_keys(
        self, messages: Sequence[Message], least: int, is_eager: bool
    ) -> dict[int, bytes]:
        """What stands for the conversation up to each long text, and up to the reply to come; none
        without a cache of conversations, and where all is to be shortened.
        """
        if is_eager or self._config.prefix_bytes == 0:
            return {}
        digest, keys = sha256(), {}
        for index, message in enumerate(messages):
            asked = digest.digest() + _REPLY
            digest.update(repr(message).encode("utf-8", "replace"))
            if len(plain_content(message.get("content")) or "") > least:
                is_reply = message.get("role") == "assistant"
                keys[index] = asked if is_reply else digest.digest()
        return {**keys, len(messages): digest.digest() + _REPLY}

    def _remember_read(self, keys: Mapping[int, bytes], shortened: Container[int]) -> None:
        for index, key in keys.items():
            self._read.pop(key, None)
            if index not in shortened:
                self._read[key] = None
        while len(self._read) > _MOST_TEXTS:
            self._read.popitem(last=False)

    def _shorten(self, asked: LongText, share: float, least: int, report: Compression) -> Shortened:
        settings = f"{share}\0{least}\0{asked.kept}\0{asked.question}\0{asked.text}"
        key = sha256(settings.encode("utf-8", "replace")).digest()
        known = self._known.get(key)
        if known is not None:
            self._known.move_to_end(key)
            report.num_cached += known.text is not None
            return known
        watch = _Watch(report)
        done = self._score_and_cut(asked, share, least, watch)
        watch.stop("select_ms")
        self._known[key] = done
        if len(self._known) > _MOST_TEXTS:
            self._known.popitem(last=False)
        return done

    def _score_and_cut(
        self, asked: LongText, share: float, least: int, watch: "_Watch"
    ) -> Shortened:
        text = asked.text
        own = self._encode(self._tokenizer, text)
        before = len(own)
        if before <= least:
            return Shortened(None, 0, before, before)
        watch.stop("select_ms")
        scorer, tokenizer = self.open()
        watch.stop("load_ms")
        own_places = token_places(self._tokenizer, text, own)
        ids, places = own, own_places
        if tokenizer is not self._tokenizer:
            ids = self._encode(tokenizer, text)
            places = token_places(tokenizer, text, ids)
        question = self._encode(tokenizer, f"\n\n{asked.question}", starts_text=False)
        watch.stop("select_ms")
        scores = scorer.score(ids, question).tolist()
        watch.stop("read_ms")
        chunks = [*places[:-1:CHUNK_LEN].tolist(), len(text)]
        is_kept = choose_chunks(scores, share, chunks, text, asked)
        starts = own_places[:-1]

        def count(first: int, end: int) -> int:
            return int(np.subtract(*np.searchsorted(starts, (end, first))))

        shorter, num_spans = cut_text(text, chunks, is_kept, count)
        kept = len(self._encode(self._tokenizer, shorter))
        if kept >= before:
            return Shortened(None, 0, before, before)
        return Shortened(shorter, num_spans, before, kept)

    @staticmethod
    def _encode(tokenizer: Tokenizer, text: str, *, starts_text: bool = True) -> list[int]:
        return tokenizer.encode(
            text, add_special=False, parse_special=False, starts_text=starts_text
        )

    def open(self) -> tuple[Scorer, Tokenizer]:
        if self._scorer is None:
            checkpoint = None
            if not self.is_self:
                checkpoint = locate(self._model, "none").checkpoint
                self._scorer_tokenizer = Tokenizer.from_metadata(checkpoint.metadata)
            self._scorer = self._tokens.new_scorer(checkpoint)
        return self._scorer, self._scorer_tokenizer


class _Watch:
    """Adds the time since it was last stopped to a part of the report, and to all of it."""

    def __init__(self, report: Compression) -> None:
        self._report, self._last = report, time.perf_counter()

    def stop(self, part: str) -> None:
        now = time.perf_counter()
        for name in (part, "score_ms"):
            setattr(self._report, name, getattr(self._report, name) + 1000 * (now - self._last))
        self._last = now
