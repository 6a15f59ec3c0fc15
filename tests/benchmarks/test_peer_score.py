"""What llama.cpp says beside what we say, where xllamacpp is installed."""

import sys

import pytest
from typer.testing import CliRunner

from benchmarks.app import app
from benchmarks.parity import ParityOptions, measure_parity
from benchmarks.score import Scores
from benchmarks.scorer import WIDE, Scorer
from draftree.bench.peers import open_wheel
from draftree.config import EngineConfig
from tests.bench.test_peers import bare_python, needs_peer

__all__ = ["bare_python"]


def test_parity_needs_the_wheel(tmp_path, tiny_path, bare_python):
    arguments = ["--results", str(tmp_path / "results"), "--peer-python", bare_python]
    result = CliRunner().invoke(app, ["parity", str(tiny_path), *arguments])
    assert result.exit_code == 1
    assert result.stderr.splitlines()[-1].startswith("error: llama.cpp cannot be measured")
    assert not (tmp_path / "results").exists()


@needs_peer
def test_llama_says_what_our_exact_arithmetic_says(tiny_path):
    subject = Scorer(tiny_path, EngineConfig(**WIDE, threads=1, max_ctx=512, math="exact"))
    try:
        ids = subject.window(96)
        ours = Scores(**subject.score(ids))
    finally:
        subject.close()
    peer, _ = open_wheel(module="benchmarks.peer_score")
    with peer:
        peer.ask("load", path=str(tiny_path), threads=1, max_ctx=512, use_server=False)
        theirs = peer.ask("score", ids=ids)
        text = peer.ask("greedy", ids=ids, num_tokens=3)
    assert len(text) == 3
    assert text[0] == theirs["best"][-1]
    assert theirs["log_probs"] == pytest.approx(ours.log_probs, abs=0.03)
    assert theirs["gaps"] == pytest.approx(ours.gaps, abs=0.03)


@needs_peer
def test_parity_on_a_tiny_model(tiny_path, say, tmp_path):
    options = ParityOptions(1, sys.executable, tmp_path, 1024, 1, num_prompts=2, greedy_tokens=4)
    measures = measure_parity(tiny_path, "hash", options, say)
    assert measures.first_choices.num_positions == 512
    assert len(measures.ours.samples) == 2
    assert abs(measures.ours_over_llama) < 0.005
    assert abs(measures.ours_over_exact) < 0.005
    assert measures.equal_share > 0.9
    assert measures.noise.ours.median <= measures.noise.ours.percentile_99
    assert measures.greedy.num_positions == 8
    # What llama.cpp said is kept, and so is not asked again.
    assert "llama.cpp: window 2 of 2" in say.lines
    say.lines.clear()
    assert measure_parity(tiny_path, "hash", options, say) == measures
    assert not any(line.startswith("llama.cpp") for line in say.lines)
