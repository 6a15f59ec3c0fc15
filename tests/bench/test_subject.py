"""The engine as a subject: what it says about a text agrees with what it writes."""

import pytest

from draftree.bench.decode import measure_decode
from draftree.bench.memory import measure_memory
from draftree.bench.prefill import measure_prefill
from draftree.bench.subject import Subject, resident_bytes, wide_config
from draftree.bench.worker import Child


@pytest.fixture(scope="module")
def subject(tiny_path):
    subject = Subject(tiny_path, wide_config(threads=2, max_ctx=512))
    yield subject
    subject.close()


def test_windows_are_of_this_vocabulary(subject):
    (window,) = subject.windows(1, 64)
    assert len(window) == 64
    assert max(window) < subject.tokens.facts.vocab_size


def test_first_choices_are_the_greedy_text(subject):
    (ids,) = subject.windows(1, 150)  # more than one pass of logits
    text = subject.greedy(ids, 6)
    scores = subject.score([*ids, *text])
    assert scores.best[149:155] == text
    assert len(scores.log_probs) == 155
    assert all(value <= 0.0 for value in scores.log_probs)


def test_pairs_are_asked_by_position(subject):
    (ids,) = subject.windows(1, 140)
    scores = subject.score(ids)
    pairs = [[pair] for pair in zip(scores.best, scores.second, strict=True)]
    assert subject.score(ids, pairs).pair_gaps == [[gap] for gap in scores.gaps]


def test_a_pass_leaves_the_text_as_it_was(subject):
    (ids,) = subject.windows(1, 40)
    subject.prefill(ids)
    assert subject.forward(8) > 0.0
    assert subject.target.state.tokens == ids


def test_every_step_is_timed(subject):
    (ids,) = subject.windows(1, 16)
    steps = subject.decode_steps(ids, 5)
    assert len(steps) == 5
    assert min(steps) > 0.0


def test_resident_bytes():
    resident = resident_bytes()
    assert resident["peak"] >= resident["now"] > 2**20


def test_worker_does_the_same(tiny_path, subject):
    (ids,) = subject.windows(1, 20)
    with Child("draftree.bench.subject", "draftree") as child:
        child.ask("load", path=str(tiny_path), threads=2, max_ctx=256, kind="wide")
        assert child.ask("windows", num_windows=1, window_len=20) == [ids]
        assert child.ask("greedy", ids=ids, num_tokens=4) == subject.greedy(ids, 4)
        assert child.ask("decode", ids=ids, num_tokens=4) > 0.0
        assert child.ask("prefill", ids=ids) > 0.0


def test_decode_measures(tiny_path, say):
    measures = measure_decode(tiny_path, 2, 1, say, depths=(16,))
    assert list(measures.forward_ms) == ["1", "2", "4", "8", "16", "24", "32", "64"]
    assert list(measures.by_depth) == ["16"]
    ratio = measures.forward_ms["8"].median / measures.forward_ms["1"].median
    assert measures.eight_over_one.value == pytest.approx(ratio, abs=1e-3)
    assert sum(measures.shares["1"].groups.values()) == pytest.approx(1.0, abs=1e-3)
    assert measures.shares["8"].groups.keys() >= {"matmul", "attention", "norms", "rotary"}


def test_prefill_measures(tiny_path, say):
    measures = measure_prefill(tiny_path, 2, 1, say, lens=(16, 48))
    assert list(measures.by_len) == ["16", "48"]
    assert list(measures.shares) == ["48"]
    assert measures.shares["48"].total_ms >= measures.shares["48"].head_ms > 0.0


def test_memory_measures(tiny_path, say):
    measures = measure_memory(tiny_path, 2, 1, say, context=128)
    size = tiny_path.stat().st_size / 2**20
    assert measures.ratio.median == pytest.approx(measures.filled_mib.median / size, rel=0.01)
    assert measures.files_mib == pytest.approx(size, abs=0.1)  # it has no draft
    assert measures.plain_ratio.median > 0.0
    assert measures.peak_ratio.median >= measures.ratio.median
    assert measures.imports_mib.median > 10.0
