"""A grammar over token ids, for targets without text: what may follow hangs on a running state."""

from collections.abc import Sequence

import numpy as np

from draftree.core import FreeSpan, TokenMatcher


class RuleGrammar:
    """In each of some states random tokens are allowed; every token leads to another state.

    share: of the tokens that a state allows; in every fourth state it is a single one. length: the
    reply is complete after that many tokens.
    """

    def __init__(
        self, vocab_size: int, seed: int, *, share: float = 0.3, length: int | None = None
    ) -> None:
        rng = np.random.default_rng(seed)
        self.allowed = rng.random((16, vocab_size)) < share
        self.allowed[np.arange(16), rng.integers(0, vocab_size, 16)] = True
        for state in range(0, 16, 4):
            self.allowed[state] = False
            self.allowed[state, rng.integers(0, vocab_size)] = True
        self.length = length

    def new_matcher(self) -> TokenMatcher:
        return RuleMatcher(self)

    def follows(self, tokens: Sequence[int]) -> bool:
        """Whether a reply may begin with these tokens."""
        matcher = RuleMatcher(self)
        for token in tokens:
            if matcher.count_valid((token,)) == 0:
                return False
            matcher.advance(token)
        return True


class RuleMatcher:
    def __init__(self, grammar: RuleGrammar) -> None:
        self._grammar = grammar
        self._state = self._count = 0

    @property
    def is_complete(self) -> bool:
        return self._count == self._grammar.length

    def copy(self) -> "RuleMatcher":
        other = RuleMatcher(self._grammar)
        other._state, other._count = self._state, self._count
        return other

    def find_free(self) -> FreeSpan | None:
        return None

    def fill_mask(self, bits: np.ndarray) -> bool:
        allowed = self._grammar.allowed[self._state]
        packed = np.zeros(len(bits) * 4, dtype=np.uint8)
        packed[: (len(allowed) + 7) // 8] = np.packbits(allowed, bitorder="little")
        bits[:] = packed.view(np.uint32)
        return True

    def count_valid(self, tokens: Sequence[int]) -> int:
        state = self._state
        for i, token in enumerate(tokens):
            if not self._grammar.allowed[state, token]:
                return i
            state = self._next(state, token)
        return len(tokens)

    def propose_forced(self) -> list[int]:
        forced: list[int] = []
        state = self._state
        while self._grammar.allowed[state].sum() == 1 and len(forced) < 5:
            forced.append(int(self._grammar.allowed[state].argmax()))
            state = self._next(state, forced[-1])
        return forced

    def advance(self, token: int) -> None:
        self._state = self._next(self._state, token)
        self._count += 1

    @staticmethod
    def _next(state: int, token: int) -> int:
        return (5 * state + token + 1) % 16


class TriggerGrammar:
    """Free text in which some tokens switch a RuleGrammar on, until so many tokens are written."""

    def __init__(
        self, rules: RuleGrammar, triggers: frozenset[int], length: int, span: int | None = None
    ) -> None:
        self.rules, self.triggers, self.length, self.span = rules, triggers, length, span

    def new_matcher(self) -> TokenMatcher:
        return TriggerMatcher(self)


class TriggerMatcher:
    is_complete = False

    def __init__(self, grammar: TriggerGrammar) -> None:
        self._grammar = grammar
        self._inner: RuleMatcher | None = None
        self._left = 0
        self.num_asked = 0

    def copy(self) -> "TriggerMatcher":
        other = TriggerMatcher(self._grammar)
        other._inner = self._inner.copy() if self._inner is not None else None
        other._left = self._left
        return other

    def find_free(self) -> FreeSpan | None:
        grammar = self._grammar
        return FreeSpan(grammar.triggers, grammar.span) if self._inner is None else None

    def fill_mask(self, bits: np.ndarray) -> bool:
        self.num_asked += 1
        return self._inner is not None and self._inner.fill_mask(bits)

    def count_valid(self, tokens: Sequence[int]) -> int:
        if self._inner is None:
            return len(tokens)
        return min(
            self._inner.count_valid(tokens[: self._left]) + len(tokens[self._left :]), len(tokens)
        )

    def propose_forced(self) -> list[int]:
        return self._inner.propose_forced()[: self._left] if self._inner is not None else []

    def advance(self, token: int) -> None:
        if self._inner is None:
            if token in self._grammar.triggers:
                self._inner, self._left = RuleMatcher(self._grammar.rules), self._grammar.length
            return
        self._inner.advance(token)
        self._left -= 1
        if self._left == 0:
            self._inner = None
