"""A prompt may be cut anywhere: state, features and what follows are the same to the bit."""

import numpy as np
import pytest

from draftree.core import DraftTree
from draftree.prefill.chunked import prefill
from tests.made import DRAFT_FEATURE_LAYERS
from tests.tiny import open_target, run_chain, same_state, tiny_path

PROMPT = np.random.default_rng(9).integers(0, 500, 70).tolist()


@pytest.mark.parametrize("name", ["llama", "qwen35-mtp"])
def test_chunks_do_not_change_a_bit(name: str) -> None:
    target = open_target(tiny_path(name), num_threads=1, feature_layers=DRAFT_FEATURE_LAYERS[:2])
    expected = None
    for chunk_len in (128, 70, 64, 17, 16, 1):
        target.state.reset()
        rows: list[np.ndarray] = []
        before = target.num_forwards
        prefill(target, PROMPT, chunk_len, lambda features, rows=rows: rows.append(features.copy()))
        assert target.num_forwards - before == -(-len(PROMPT) // chunk_len) == len(rows)
        assert max(len(features) for features in rows) <= chunk_len
        state, logits = target.state.snapshot(), run_chain(target, [3, 4])
        if expected is None:
            expected = state, np.concatenate(rows), logits
        assert state.tokens == tuple(PROMPT)
        assert same_state(state, expected[0])
        assert np.array_equal(np.concatenate(rows), expected[1])
        assert np.array_equal(logits, expected[2])


def test_prefill_goes_on_after_a_tree() -> None:
    """Chunks that follow a committed path, as in the second message of a conversation."""
    target = open_target(tiny_path("qwen35-mtp"), num_threads=1)
    tree = DraftTree((5, 6, 7, 8, 9), (-1, 0, 0, 2, 2), (0, 1, 1, 2, 2))
    prefill(target, PROMPT[:20], 8)
    target.state.begin(tree)
    target.forward(range(5))
    target.state.commit((0, 2, 4))
    prefill(target, PROMPT[20:40], 8)
    found = target.state.snapshot()
    target.state.reset()
    prefill(target, [*PROMPT[:20], 5, 7, 9, *PROMPT[20:40]], 64)
    assert same_state(target.state.snapshot(), found)


def test_nothing_to_prefill() -> None:
    target = open_target(tiny_path("llama"), num_threads=1)
    prefill(target, (), 8)
    assert target.num_forwards == 0 and target.state.committed == 0
