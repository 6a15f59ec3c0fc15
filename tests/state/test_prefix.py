"""The store of prefixes returns what was put in, shares beginnings, and keeps to its bound."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.state.prefix import Match, PrefixStore
from draftree.state.span import Parts

TOKEN_BYTES = 8 + 8  # an id, and what _Source makes of a position
MARK_BYTES = 64
LARGE = 1 << 30


class _Source:
    """A sequence whose keys and values are its tokens, and whose recurrent state is the text."""

    def __init__(self, tokens: list[int]) -> None:
        self.tokens = tokens
        self.copied: list[tuple[int, int]] = []

    def copy(self, start: int, end: int) -> Parts:
        self.copied.append((start, end))
        return ((np.array(self.tokens[start:end], np.int64),),)

    def copy_recurrent(self) -> Parts:
        return ((_fixed_state(self.tokens),),)


def _fixed_state(tokens: list[int]) -> np.ndarray:
    state = np.zeros(MARK_BYTES // 8, np.int64)
    state[:2] = len(tokens), hash(tuple(tokens)) & 0xFFFF
    return state


def _insert(store: PrefixStore, tokens: list[int], cut: int = 0) -> list[tuple[int, int]]:
    """What was copied for it."""
    source = _Source(tokens)
    store.insert(tokens, source.copy, source.copy_recurrent, cut)
    return source.copied


def _check_match(match: Match, tokens: list[int], *, is_recurrent: bool) -> None:
    """The spans hold the tokens up to the length, and the state is the one at that length."""
    known: list[int] = []
    for span in match.spans:
        assert span.start == len(known) and span.end > span.start
        known += span.parts[0][0][: span.end - span.start].tolist()
    assert known == tokens[: len(known)], "a span reaches behind a fork"
    assert len(known) >= match.length
    assert match.length <= match.shared <= len(tokens)
    if is_recurrent and match.length:
        assert np.array_equal(match.recurrent[0][0], _fixed_state(tokens[: match.length]))
    else:
        assert match.recurrent == ()


def _count(store: PrefixStore) -> int:
    """Bytes of all that hangs on the tree."""
    total, nodes, checkpoints = 0, [store._root], set()
    while nodes:
        node = nodes.pop()
        total += node.copy.num_bytes + node.tokens.nbytes
        total += sum(copy.num_bytes for copy in node.checkpoints.values())
        checkpoints |= {(node, at) for at in node.checkpoints}
        nodes += node.children.values()
        assert all(child.parent is node for child in node.children.values())
        assert node.children or node.checkpoints or node is store._root, "a node that leads nowhere"
    assert checkpoints == set(store._checkpoints)
    return total


TEXTS = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 2), max_size=24)), min_size=1, max_size=24
)


@pytest.mark.parametrize("is_recurrent", [False, True])
@settings(max_examples=80, deadline=None)
@given(texts=TEXTS, span_len=st.integers(1, 9), max_bytes=st.integers(0, 1200) | st.just(LARGE))
def test_finds_what_was_inserted_within_the_bound(
    is_recurrent: bool, texts: list[tuple[bool, list[int]]], span_len: int, max_bytes: int
) -> None:
    store = PrefixStore(max_bytes, is_recurrent=is_recurrent, span_len=span_len)
    inserted: list[list[int]] = []
    for is_insert, tokens in texts:
        if is_insert:
            _insert(store, tokens)
            inserted.append(tokens)
        match = store.find(tokens)
        _check_match(match, tokens, is_recurrent=is_recurrent)
        assert store.num_bytes == _count(store) <= max_bytes
        if is_recurrent:
            whole = [known for known in inserted if known == tokens[: len(known)]]
            best = max(map(len, whole), default=0)
        else:
            best = max((_common(known, tokens) for known in inserted), default=0)
        assert match.length == best if max_bytes == LARGE else match.length <= best


def _common(a: list[int], b: list[int]) -> int:
    return next((i for i, (x, y) in enumerate(zip(a, b)) if x != y), min(len(a), len(b)))  # noqa: B905


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_only_what_is_new_is_copied(is_recurrent: bool) -> None:
    store = PrefixStore(LARGE, is_recurrent=is_recurrent, span_len=100)
    first = list(range(50))
    assert _insert(store, first) == [(0, 50)]
    assert _insert(store, first) == []
    assert _insert(store, [*first, *range(90, 120)]) == [(50, 80)]
    assert _insert(store, [*first[:30], *range(200, 210)]) == [(30, 40)]  # forks inside a span
    assert _insert(store, first[:20]) == []
    num_marks = 4 if is_recurrent else 0
    assert store.num_bytes == (50 + 30 + 10) * TOKEN_BYTES + num_marks * MARK_BYTES
    long = [*first, *range(90, 320)]
    assert _insert(store, long) == [(80, 180), (180, 280)]


def test_a_position_inside_a_span_can_be_marked() -> None:
    store = PrefixStore(LARGE, is_recurrent=True)
    tokens = list(range(40))
    _insert(store, tokens)
    assert store.find(tokens[:30]) == Match(shared=30)
    _insert(store, tokens[:25])
    match = store.find(tokens[:30])
    assert (match.length, match.shared) == (25, 30)
    _check_match(match, tokens, is_recurrent=True)


def test_ends_go_before_beginnings_and_old_before_new() -> None:
    room = 100 * TOKEN_BYTES
    store = PrefixStore(room, is_recurrent=False, span_len=10)
    a, b = list(range(40)), list(range(100, 140))
    _insert(store, a)
    _insert(store, b)
    assert store.find(a).length == store.find(b).length == 40
    store.find(a)
    _insert(store, list(range(200, 240)))  # 20 positions too many: the end of b goes
    assert [store.find(x).length for x in (a, b)] == [40, 20]
    assert store.num_bytes == room


def test_the_beginning_of_what_is_too_long_is_kept_unless_it_is_worth_nothing() -> None:
    tokens = list(range(200))
    plain = PrefixStore(55 * TOKEN_BYTES, is_recurrent=False, span_len=10)
    _insert(plain, tokens)
    assert plain.find(tokens).length == 50
    recurrent = PrefixStore(55 * TOKEN_BYTES + 2 * MARK_BYTES, is_recurrent=True, span_len=10)
    _insert(recurrent, tokens[:30])
    _insert(recurrent, tokens)  # cannot fit: not even begun, and nothing is given up for it
    assert recurrent.find(tokens).length == 30
    assert recurrent.num_bytes == 30 * TOKEN_BYTES + MARK_BYTES


def test_old_marks_go_before_the_text_they_are_in() -> None:
    """A long conversation with a mark at each turn keeps its newest ones."""
    room = 50 * TOKEN_BYTES + 2 * MARK_BYTES
    store = PrefixStore(room, is_recurrent=True)
    tokens = list(range(50))
    for length in (10, 20, 30, 40, 50):
        _insert(store, tokens[:length])
    assert store.num_bytes == room
    assert store.find(tokens).length == 50
    assert store.find(tokens[:49]).length == 40
    assert store.find(tokens[:39]) == Match(shared=39)


def test_what_the_owner_reserves_is_not_used() -> None:
    store = PrefixStore(100 * TOKEN_BYTES, is_recurrent=False, span_len=10)
    _insert(store, list(range(90)))
    store.reserve(50 * TOKEN_BYTES)
    assert store.num_bytes == 50 * TOKEN_BYTES
    _insert(store, list(range(500, 510)))
    assert store.num_bytes == 50 * TOKEN_BYTES
    store.reserve(100 * TOKEN_BYTES)
    assert store.num_bytes == 0
    assert _insert(store, list(range(600, 610))) == []


def test_a_copy_that_fails_leaves_nothing_behind() -> None:
    store = PrefixStore(LARGE, is_recurrent=True, span_len=10)
    source = _Source(list(range(30)))

    def fail() -> Parts:
        raise MemoryError

    with pytest.raises(MemoryError):
        store.insert(source.tokens, source.copy, fail)
    assert store.num_bytes == _count(store) == 0
    _insert(store, source.tokens)
    assert store.find(source.tokens).length == 30


def test_a_bound_of_zero_keeps_and_copies_nothing() -> None:
    for is_recurrent in (False, True):
        store = PrefixStore(0, is_recurrent=is_recurrent)
        assert _insert(store, [1, 2, 3]) == []
        assert store.find([1, 2, 3]) == Match()


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_no_span_goes_across_a_cut(is_recurrent: bool) -> None:
    tokens = list(range(50))
    for cut, copied in {
        0: [(0, 20), (20, 40), (40, 50)],
        13: [(0, 13), (13, 33), (33, 50)],
        40: [(0, 20), (20, 40), (40, 50)],
        60: [(0, 20), (20, 40), (40, 50)],
    }.items():
        store = PrefixStore(LARGE, is_recurrent=is_recurrent, span_len=20)
        assert _insert(store, tokens, cut) == copied
        _check_match(store.find(tokens), tokens, is_recurrent=is_recurrent)
