"""Prompt lookup proposes what followed the longest repeat."""

from draftree.drafts.lookup import LookupIndex


def test_continues_a_repeat() -> None:
    index = LookupIndex()
    index.extend([1, 2, 3, 4, 5, 6, 7, 8, 9, 1, 2, 3])
    assert index.propose(4) == ((4, 5, 6, 7), 3)
    assert index.propose(2) == ((4, 5), 3)


def test_prefers_the_longest_match() -> None:
    index = LookupIndex()
    index.extend([5, 1, 2, 3, 40, 9, 9, 7, 1, 2, 3, 50, 5, 1, 2, 3])
    tokens, length = index.propose(1)
    assert (tokens, length) == ((40,), 4)


def test_silent_without_a_repeat() -> None:
    index = LookupIndex()
    index.extend(range(50))
    assert index.propose(8) == ((), 0)
    assert LookupIndex().propose(8) == ((), 0)


def test_a_loop_is_followed_to_the_end_of_what_is_known() -> None:
    index = LookupIndex()
    index.extend([1, 2, 3, 1, 2, 3])
    tokens, length = index.propose(10)
    assert length >= 3 and tokens == (1, 2, 3)[: len(tokens)] and len(tokens) == 3
