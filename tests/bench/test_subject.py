"""The engine as a subject: what is timed is what was asked for."""

import pytest

from draftree.bench.decode import measure_decode
from draftree.bench.prefill import measure_prefill
from draftree.bench.subject import PLAIN, Subject
from draftree.bench.worker import Child
from draftree.config import EngineConfig


@pytest.fixture(scope="module")
def subject(tiny_path):
    subject = Subject(tiny_path, EngineConfig(**PLAIN | {"budget": 15}, threads=1, max_ctx=512))
    yield subject
    subject.close()


def test_text_is_of_this_vocabulary(subject):
    window = subject.window(64)
    assert len(window) == 64
    assert max(window) < subject.tokens.model_config.vocab_size


def test_a_pass_leaves_the_text_as_it_was(subject):
    ids = subject.window(40)
    subject.prefill(ids)
    assert subject.forward(8) > 0.0
    assert subject.target.state.tokens == ids


def test_every_step_is_timed(subject):
    ids = subject.window(16)
    steps = subject.decode_steps(ids, 5)
    assert len(steps) == 5
    assert min(steps) > 0.0


def test_worker_does_the_same(tiny_path, subject):
    ids = subject.window(20)
    with Child("draftree.bench.subject", "draftree") as child:
        assert child.ask("load", path=str(tiny_path), threads=1, max_ctx=256, **PLAIN) > 0.0
        assert child.ask("window", window_len=20) == ids
        assert child.ask("decode", ids=ids, num_tokens=4) > 0.0
        assert child.ask("prefill", ids=ids) > 0.0


def test_decode_measures(tiny_path, say):
    measures = measure_decode(tiny_path, 1, 1, say, depths=(16,))
    assert list(measures.forward_ms) == ["1", "2", "4", "8", "16", "24", "32", "64"]
    assert list(measures.by_depth) == ["16"]
    ratio = measures.forward_ms["8"].median / measures.forward_ms["1"].median
    assert measures.eight_over_one.value == pytest.approx(ratio, abs=1e-3)
    assert measures.headline()["forward_ms"]["8"] == measures.forward_ms["8"].median


def test_prefill_measures(tiny_path, say):
    measures = measure_prefill(tiny_path, 1, 1, say, lens=(16, 48))
    assert list(measures.by_len) == list(measures.headline()["tokens_per_second"]) == ["16", "48"]
