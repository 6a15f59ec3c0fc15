"""What a whole reply may be, token by token: reasoning, then content, with tool calls in between.

In: tags as tokens, a budget, compiled grammars for content and calls. Out: a TokenGrammar for the
engine. Where nothing is asked of a part, its tokens are free and cost next to nothing.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum, auto

import numpy as np

from draftree.core import FreeSpan, TokenMatcher
from draftree.text.grammar import Cursor
from draftree.text.segments import CLOSING, OPENING
from draftree.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Reasoning:
    """How the model thinks before it answers."""

    is_open: bool  # the prompt ends with the opening tag
    budget: int | None = None  # tokens; then the closing tag is written for the model


@dataclass(frozen=True, slots=True)
class CallTrigger:
    """A token after which a tool call must follow."""

    token: int
    call: Cursor
    is_single: bool  # the reply ends after the call


class ReplyGrammar:
    """content: the grammar of all that follows the reasoning; None: free text, but for calls."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        reasoning: Reasoning | None = None,
        content: Cursor | None = None,
        trigger: CallTrigger | None = None,
    ) -> None:
        self.tokenizer = tokenizer
        self.reasoning, self.content, self.trigger = reasoning, content, trigger
        self.opening_id = tokenizer.find(OPENING) if reasoning else None
        self.ending = f"\n{CLOSING}\n\n" if reasoning else ""

    def new_matcher(self) -> TokenMatcher:
        return ReplyMatcher(self)


class _Phase(Enum):
    OPENING = auto()  # reasoning may begin
    REASONING = auto()
    CLOSING = auto()  # the budget is used up: only one token may follow
    CONTENT = auto()
    CALL = auto()
    END = auto()


class ReplyMatcher:
    """One reply's place in a ReplyGrammar."""

    def __init__(self, grammar: ReplyGrammar) -> None:
        self._grammar = grammar
        self._stop_ids = grammar.tokenizer.stop_ids
        self._cursor = grammar.content.copy() if grammar.content is not None else None
        self._text = b""  # what may still become a tag
        self._num_thought = 0
        self._ending: list[int] = []
        self._phase = _Phase.CONTENT
        if grammar.reasoning is not None:
            self._phase = _Phase.OPENING
            if grammar.reasoning.is_open:
                self._think()

    def copy(self) -> "ReplyMatcher":
        other = ReplyMatcher.__new__(ReplyMatcher)
        other.__dict__.update(self.__dict__)  # what is changed in place is the cursor alone
        if self._cursor is not None:
            other._cursor = self._cursor.copy()
        return other

    def find_free(self) -> FreeSpan | None:
        if self._cursor is not None or self._phase in (_Phase.CLOSING, _Phase.END):
            return None
        reasoning, trigger = self._grammar.reasoning, self._grammar.trigger
        end_ids = frozenset((trigger.token,) if trigger is not None else ())
        if self._phase is _Phase.CONTENT or reasoning is None or reasoning.budget is None:
            return FreeSpan(end_ids)
        has_opened = self._phase is _Phase.REASONING  # else the tag is a token at least
        return FreeSpan(end_ids, reasoning.budget - self._num_thought + (not has_opened))

    @property
    def is_complete(self) -> bool:
        if self._phase is _Phase.CONTENT:
            return self._cursor is not None and self._cursor.is_complete
        return self._phase is _Phase.END

    def fill_mask(self, bits: np.ndarray) -> bool:
        match self._phase:
            case _Phase.CLOSING:
                bits[:] = 0
                _allow(bits, self._ending[0])
                return True
            case _Phase.REASONING:
                if self._cursor is None:
                    return False
                bits[:] = 0xFFFFFFFF  # the reply must not end before its content
                for token in self._stop_ids:
                    bits[token // 32] &= ~np.uint32(1 << token % 32)
                return True
        if self._cursor is None:
            return False
        self._cursor.fill_mask(bits)
        if self._phase is _Phase.OPENING and self._grammar.opening_id is not None:
            _allow(bits, self._grammar.opening_id)
        return True

    def count_valid(self, tokens: Sequence[int]) -> int:
        if self._phase is _Phase.CONTENT and self._cursor is not None:  # the most often
            return self._cursor.count_valid(tokens)
        match self._phase:
            case _Phase.CLOSING:
                pairs = zip(tokens, self._ending, strict=False)
                wrong = (i for i, (token, needed) in enumerate(pairs) if token != needed)
                return next(wrong, len(tokens))
            case _Phase.REASONING:
                is_refused = self._cursor is not None and tokens[0] in self._stop_ids
                return 0 if is_refused else len(tokens)
            case _Phase.OPENING if tokens[0] == self._grammar.opening_id:
                return len(tokens)
        return len(tokens) if self._cursor is None else self._cursor.count_valid(tokens)

    def propose_forced(self) -> Sequence[int]:
        if self._phase is _Phase.CLOSING:
            return self._ending
        is_strict = self._phase in (_Phase.CONTENT, _Phase.CALL) and self._cursor is not None
        return self._cursor.propose_forced() if self._cursor is not None and is_strict else ()

    def advance(self, token: int) -> None:
        if token in self._stop_ids:
            self._phase = _Phase.END
            return
        if self._phase is _Phase.CONTENT:
            self._write(token)
            return
        match self._phase:
            case _Phase.OPENING:
                self._open(token)
            case _Phase.REASONING:
                self._reason(token)
            case _Phase.CLOSING:
                self._ending = self._ending[1:]
                if not self._ending:
                    self._phase = _Phase.CONTENT
            case _Phase.CALL:
                self._write(token)

    def _open(self, token: int) -> None:
        """The reply begins with the opening tag, or there is no reasoning."""
        grammar, opening = self._grammar, OPENING.encode()
        self._text += grammar.tokenizer.written_bytes(token)
        start = self._text.lstrip()
        if token == grammar.opening_id or start.startswith(opening):
            self._think()
        elif self._cursor is not None or not opening.startswith(start):
            self._phase = _Phase.CONTENT
            self._write(token)

    def _think(self) -> None:
        self._phase, self._text = _Phase.REASONING, b""
        self._spend(0)

    def _reason(self, token: int) -> None:
        closing, written = CLOSING.encode(), self._grammar.tokenizer.written_bytes(token)
        self._text = self._text[1 - len(closing) :] + written
        if closing in self._text:
            self._phase = _Phase.CONTENT
            return
        self._spend(1)

    def _spend(self, count: int) -> None:
        grammar = self._grammar
        assert grammar.reasoning is not None
        self._num_thought += count
        budget = grammar.reasoning.budget
        if budget is not None and self._num_thought >= budget:
            self._phase = _Phase.CLOSING
            self._ending = grammar.tokenizer.encode(
                grammar.ending, add_special=False, starts_text=False
            )

    def _write(self, token: int) -> None:
        trigger = self._grammar.trigger
        if self._cursor is not None:
            self._cursor.advance(token)
            if self._phase is _Phase.CALL and self._cursor.is_complete:
                assert trigger is not None
                self._cursor = None
                self._phase = _Phase.END if trigger.is_single else _Phase.CONTENT
        elif trigger is not None and token == trigger.token:
            self._phase, self._cursor = _Phase.CALL, trigger.call.copy()


def _allow(bits: np.ndarray, token: int) -> None:
    bits[token // 32] |= np.uint32(1 << token % 32)
