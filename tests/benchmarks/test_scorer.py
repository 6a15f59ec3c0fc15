"""What the engine says about a text agrees with what it writes."""

import pytest

from benchmarks.memory import measure_memory
from benchmarks.operation import measure_operations
from benchmarks.score import Scores
from benchmarks.scorer import WIDE, Scorer, resident_bytes
from draftree.bench.worker import Child
from draftree.config import EngineConfig


@pytest.fixture(scope="module")
def subject(tiny_path):
    subject = Scorer(tiny_path, EngineConfig(**WIDE, threads=1, max_ctx=512))
    yield subject
    subject.close()


def test_first_choices_are_the_greedy_text(subject):
    ids = subject.window(150)  # more than one pass of logits
    text = subject.greedy(ids, 6)
    scores = Scores(**subject.score([*ids, *text]))
    assert scores.best[149:155] == text
    assert len(scores.log_probs) == 155
    assert all(value <= 0.0 for value in scores.log_probs)


def test_pairs_are_asked_by_position(subject):
    ids = subject.window(140)
    scores = Scores(**subject.score(ids))
    pairs = [[pair] for pair in zip(scores.best, scores.second, strict=True)]
    assert subject.score(ids, pairs)["pair_gaps"] == [[gap] for gap in scores.gaps]


def test_resident_bytes():
    resident = resident_bytes()
    assert resident["peak"] >= resident["now"] > 2**20


def test_worker_says_the_same(tiny_path, subject):
    ids = subject.window(20)
    with Child("benchmarks.scorer", "draftree") as child:
        assert child.ask("resident")["now"] > 2**20  # before anything is loaded
        child.ask("load", path=str(tiny_path), threads=1, max_ctx=256, **WIDE)
        assert child.ask("greedy", ids=ids, num_tokens=4) == subject.greedy(ids, 4)
        assert child.ask("score", ids=ids) == subject.score(ids)


def test_operations_are_all_of_a_pass(tiny_path, say):
    measures = measure_operations(tiny_path, 1, 1, say)
    assert list(measures.shares)[:2] == ["1", "8"] and len(measures.shares) == 3
    for item in measures.shares.values():
        assert sum(item.groups.values()) == pytest.approx(1.0, abs=1e-3)
        assert item.total_ms >= item.head_ms > 0.0
    assert measures.shares["8"].groups.keys() >= {"matmul", "attention", "norms", "rotary"}


def test_memory_measures(tiny_path, say):
    measures = measure_memory(tiny_path, 1, 1, say, context=128)
    size = tiny_path.stat().st_size / 2**20
    assert measures.ratio.median == pytest.approx(measures.filled_mib.median / size, rel=0.01)
    assert measures.files_mib == pytest.approx(size, abs=0.1)  # it has no draft
    assert measures.plain_ratio.median > 0.0
    assert measures.peak_ratio.median >= measures.ratio.median
    assert measures.imports_mib.median > 10.0
