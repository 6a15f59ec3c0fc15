"""Ours beside llama.cpp: the arithmetic, and all of it on a tiny model if xllamacpp is there."""

import sys

import pytest
from typer.testing import CliRunner

from draftree.bench.fault import BenchError
from draftree.bench.parity import ParityOptions, measure_parity
from draftree.bench.peers import PeerOptions, judge, measure_peers, open_peer
from draftree.bench.subject import Subject, wide_config
from draftree.cli.app import app
from tests.needs import needs_package

needs_peer = needs_package("xllamacpp")
WITHOUT = """#!/bin/sh
exec {python} -c 'import runpy, sys; sys.modules["xllamacpp"] = None
runpy.run_module(sys.argv[2], run_name="__main__", alter_sys=True)' "$@"
"""


def test_times_become_rates_and_a_ratio():
    duel = judge(100, [500.0, 400.0], [800.0, 1000.0], {"server": 1000.0, "library": 800.0})
    assert duel.llama_way == "library"
    assert duel.trial["server"].samples == (100.0,)
    assert (duel.ours.median, duel.llama.median) == (225.0, 112.5)
    assert (duel.ratio.value, duel.ratio.low, duel.ratio.high) == (2.0, 1.6, 2.5)


@pytest.fixture
def bare_python(tmp_path):
    """An interpreter without xllamacpp."""
    python = tmp_path / "python"
    python.write_text(WITHOUT.format(python=sys.executable))
    python.chmod(0o755)
    return str(python)


def test_missing_package_is_said(bare_python):
    with pytest.raises(BenchError, match=r"not installed for .*draftree\[peers\]"):
        open_peer(bare_python)


@pytest.mark.parametrize("command", ["peers", "parity"])
def test_commands_say_it_in_one_sentence(tmp_path, tiny_path, bare_python, command):
    arguments = ["--results", str(tmp_path / "results"), "--peer-python", bare_python]
    result = CliRunner().invoke(app, ["bench", command, str(tiny_path), *arguments])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: llama.cpp cannot be measured")
    assert not (tmp_path / "results").exists()


@needs_peer
def test_peers_on_a_tiny_model(tiny_path, say):
    options = PeerOptions(threads=1, rounds=2, decode_tokens=4, prefill_lens=(40,))
    measures = measure_peers(tiny_path, options, say)
    assert len(measures.decode.ours.samples) == 2
    assert list(measures.prefill) == ["40"]
    assert measures.decode.ratio.value > 0.0
    assert measures.peer["version"]
    assert (measures.kv_type, measures.peer["kv"]) == ("f32", "f16")


@needs_peer
def test_llama_says_what_our_exact_arithmetic_says(tiny_path):
    subject = Subject(tiny_path, wide_config(threads=2, max_ctx=512, exact=True))
    try:
        (ids,) = subject.windows(1, 96)
        ours = subject.score(ids)
    finally:
        subject.close()
    peer, _ = open_peer()
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
