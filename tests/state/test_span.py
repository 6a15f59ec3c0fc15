"""Keys and values in spans of any lengths come back bit for bit, and only those that are needed."""

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.models.target import Target
from draftree.state.sequence import Snapshot
from draftree.state.span import Span
from tests.tiny import open_target, run_chain, same_state, tiny_path

TOKENS = np.random.default_rng(5).integers(0, 256, 70).tolist()
OTHERS = np.random.default_rng(6).integers(0, 256, 90).tolist()
KINDS = {
    "attention": ("llama", np.float32),
    "halves": ("llama", np.float16),
    "bytes": ("llama", np.int8),
    "hybrid": ("qwen35", np.float32),
}


@pytest.fixture(scope="module", params=KINDS)
def target(request: pytest.FixtureRequest) -> Target:
    name, kv_dtype = KINDS[request.param]
    return open_target(tiny_path(name), kv_dtype=kv_dtype)


def _spans(target: Target, edges: list[int]) -> tuple[Span, ...]:
    copy = target.state.kv.copy
    return tuple(Span(start, end, copy(start, end)) for start, end in pairwise(edges))


@settings(max_examples=25, deadline=None)
@given(edges=st.sets(st.integers(1, 69)), end=st.integers(1, 70), shared=st.integers(0, 69))
def test_spans_make_up_a_whole(target: Target, edges: set[int], end: int, shared: int) -> None:
    """Cut anywhere, put back up to anywhere, into a sequence that shares some of it."""
    state = target.state
    state.reset()
    run_chain(target, TOKENS[:end])
    expected = state.snapshot()
    after = run_chain(target, [*TOKENS[end:], 7])
    spans = _spans(target, [0, *sorted(edges), len(TOKENS)])

    state.reset()
    run_chain(target, [*TOKENS[:shared], *OTHERS])
    state.restore(Snapshot(tuple(TOKENS[:end]), spans, expected.recurrent))
    assert same_state(state.snapshot(), expected)
    assert np.array_equal(run_chain(target, [*TOKENS[end:], 7]), after)


def test_what_is_still_there_is_not_copied(target: Target, monkeypatch: pytest.MonkeyPatch) -> None:
    state = target.state
    state.reset()
    run_chain(target, TOKENS)
    spans = _spans(target, [0, 20, 40, 70])
    state.reset()
    run_chain(target, TOKENS[:40])
    at_40 = state.snapshot()
    run_chain(target, OTHERS)
    put: list[tuple[int, int]] = []
    restore = type(target._ops).restore

    def counted(
        self: object, store: object, parts: object, start: int = 0, end: int = 0, first: int = 0
    ) -> None:
        if end:
            put.append((first, end))
        restore(self, store, parts, start, end, first)

    monkeypatch.setattr(type(target._ops), "restore", counted)
    state.restore(Snapshot(tuple(TOKENS[:40]), (), at_40.recurrent))
    assert put == [] and same_state(state.snapshot(), at_40)
    if not state.is_recurrent:
        state.restore(Snapshot(tuple(TOKENS), spans))
        assert put == [(40, 70)] * len(state.kv)


def test_spans_that_do_not_reach_are_refused(target: Target) -> None:
    state = target.state
    state.reset()
    run_chain(target, TOKENS)
    spans, recurrent = _spans(target, [0, 20, 40, 70]), state.copy_recurrent()
    for kept in (spans[1:], spans[:2], (spans[0], spans[2])):
        state.reset()
        with pytest.raises(AssertionError):
            state.restore(Snapshot(tuple(TOKENS), kept, recurrent))


def test_marks_are_of_the_sequence_at_hand(target: Target) -> None:
    state = target.state
    state.reset()
    for start in (0, 10, 20):
        run_chain(target, TOKENS[start : start + 10])
        state.save_checkpoint()
    if not state.is_recurrent:
        assert state.checkpoints == {}
        return
    assert sorted(state.checkpoints) == [10, 20, 30]
    state.restore(Snapshot(tuple(TOKENS[:20]), (), state.checkpoints[20]))
    assert sorted(state.checkpoints) == [10, 20]
    run_chain(target, TOKENS[20:30])
    assert same_state(state.snapshot(), _fresh(target, TOKENS[:30]))
    assert state.checkpoints == {}


def _fresh(target: Target, tokens: list[int]) -> Snapshot:
    target.state.reset()
    run_chain(target, tokens)
    return target.state.snapshot()


def test_spans_of_a_gpu_cache() -> None:
    """The same contract for keys and values that lie on a GPU."""
    torch = pytest.importorskip("torch", reason="torch is not installed")
    from draftree.kernels.cuda.kv_cache import KvArena
    from tests.kernels.emulator import emulated_gpu

    source, target = (KvArena(50, emulated_gpu()).new(2, 16) for _ in range(2))
    source.pool.random_(0, 256)
    target.put(source.rows(0, 20), 0)
    target.put(tuple(rows[:, :13] for rows in source.rows(20, 45)), 20)
    for found, expected in zip(target.rows(0, 50), source.rows(0, 50), strict=True):
        assert torch.equal(found[:, :33], expected[:, :33])
        assert not found[:, 33:].any()
