"""What a grammar leaves no choice about, and nothing more."""

from dataclasses import replace

import numpy as np
import pytest

from draftree.core import Request, TokenMatcher
from draftree.decode.beginning import find_beginning, find_only
from tests.decode.rule import RuleGrammar

VOCAB_SIZE = 70


class _Fixed(RuleGrammar):
    """Allows one token in each of its first states, and claims to force more."""

    def __init__(self, forced: tuple[int, ...], num_certain: int, length: int | None = None):
        super().__init__(VOCAB_SIZE, 1, length=length)
        self.forced, self.num_certain = forced, num_certain

    def new_matcher(self) -> TokenMatcher:
        grammar = self

        class Matcher:
            count = 0

            @property
            def is_complete(self) -> bool:
                return self.count == grammar.length

            def propose_forced(self) -> tuple[int, ...]:
                return grammar.forced[self.count :]

            def fill_mask(self, bits: np.ndarray) -> bool:
                bits[:] = 0
                token = grammar.forced[self.count]
                bits[token // 32] = 1 << token % 32
                bits[2] |= np.uint32(self.count >= grammar.num_certain)  # token 64
                return True

            def advance(self, token: int) -> None:
                self.count += 1

        return Matcher()  # type: ignore[return-value]


FORCED = (3, 40, 69, 7)


def test_all_that_is_certain() -> None:
    request = Request((1,), 20, grammar=_Fixed(FORCED, 9))
    assert find_beginning(request, VOCAB_SIZE) == FORCED
    assert find_beginning(replace(request, max_tokens=2), VOCAB_SIZE) == FORCED[:2]


def test_what_is_only_likely_is_left() -> None:
    request = Request((1,), 20, grammar=_Fixed(FORCED, 2))
    assert find_beginning(request, VOCAB_SIZE) == FORCED[:2]


def test_the_end_of_a_reply_is_left_to_a_round() -> None:
    request = Request((1,), 20, grammar=_Fixed(FORCED, 9, length=4))
    assert find_beginning(request, VOCAB_SIZE) == FORCED[:3]
    request = Request((1,), 20, stop_ids=frozenset((69,)), grammar=_Fixed(FORCED, 9))
    assert find_beginning(request, VOCAB_SIZE) == FORCED[:2]


def test_nothing_where_there_is_no_grammar_or_scores_are_asked_for() -> None:
    assert find_beginning(Request((1,), 20), VOCAB_SIZE) == ()
    request = Request((1,), 20, logprobs=1, grammar=_Fixed(FORCED, 9))
    assert find_beginning(request, VOCAB_SIZE) == ()


@pytest.mark.parametrize("tokens", [(), (0,), (31,), (63,), (3, 4), (3, 64)])
def test_the_only_bit(tokens: tuple[int, ...]) -> None:
    bits = np.zeros(3, dtype=np.uint32)
    for token in tokens:
        bits[token // 32] |= np.uint32(1 << token % 32)
    assert find_only(bits) == (tokens[0] if len(tokens) == 1 else None)
