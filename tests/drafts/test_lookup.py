"""Prompt lookup proposes what followed the longest repeat."""

import tracemalloc

import numpy as np

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


def _propose_slowly(text: list[int], max_tokens: int) -> tuple[tuple[int, ...], int]:
    for length in range(6, 2, -1):
        for end in range(len(text) - 1, length - 1, -1):
            if text[end - length : end] == text[len(text) - length :]:
                return tuple(text[end : end + max_tokens]), length
    return (), 0


def test_the_newest_of_the_longest_matches_whatever_was_asked_before() -> None:
    rng = np.random.default_rng(3)
    index, text = LookupIndex(), list[int]()
    matched = set()
    for _ in range(300):
        new = rng.integers(0, 3, rng.integers(0, 4)).tolist()
        index.extend(new)
        text += new
        found = index.propose(4)
        assert found == _propose_slowly(text, 4)
        matched.add(found[1])
    assert matched >= {0, 4, 5, 6}


def test_a_long_text_takes_no_index() -> None:
    """A request that looks something up once pays for one search of its prompt."""
    index = LookupIndex()
    text = np.random.default_rng(5).integers(0, 50_000, 100_000).tolist()
    index.extend([*text, *text[500:504]])
    tracemalloc.start()
    assert index.propose(3) == (tuple(text[504:507]), 4)
    assert tracemalloc.get_traced_memory()[1] < 64 * len(text)
    tracemalloc.stop()
