"""Ours beside llama.cpp: the arithmetic, a stand-in for `llama-bench`, the wheel if it is there."""

import json
import sys
from types import SimpleNamespace
from unittest.mock import MagicMock

import pytest
from typer.testing import CliRunner

from draftree.bench import peer_wheel
from draftree.bench.peer_native import NativeBuild, read_output
from draftree.bench.peer_wheel import WheelWorker
from draftree.bench.peers import PeerOptions, judge, measure_peers, open_wheel
from draftree.cli.app import app
from draftree.errors import BenchError
from tests.needs import needs_package

needs_peer = needs_package("xllamacpp")
WITHOUT = """#!/bin/sh
exec {python} -c 'import runpy, sys; sys.modules["xllamacpp"] = None
runpy.run_module(sys.argv[2], run_name="__main__", alter_sys=True)' "$@"
"""
# Tells its arguments to a file, and that a run took 2 ms.
STAND_IN = """#!{python}
import json, sys
from pathlib import Path
with Path({log!r}).open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
print(json.dumps([{{"samples_ns": [2_000_000], "build_commit": "abc", "build_number": 7,
                   "backends": "CPU", "cpu_info": "x", "n_threads": 1}}]))
"""


def test_times_become_rates_and_a_ratio_to_the_faster_build():
    times = {"ours": [500.0, 400.0], "wheel": [1600.0, 2000.0], "native": [800.0, 1000.0]}
    duel = judge(100, times, {"server": 1000.0, "library": 800.0})
    assert duel.faster == "native" and list(duel.llama) == ["wheel", "native"]
    assert duel.trial["server"].samples == (100.0,)
    assert (duel.ours.median, duel.llama["native"].median) == (225.0, 112.5)
    assert (duel.ratio.value, duel.ratio.low, duel.ratio.high) == (2.0, 1.6, 2.5)
    slower = times | {"native": [9000.0, 9000.0]}
    assert judge(100, slower, {}).faster == "wheel"


@pytest.fixture
def bare_python(tmp_path):
    """An interpreter without xllamacpp."""
    python = tmp_path / "python"
    python.write_text(WITHOUT.format(python=sys.executable))
    python.chmod(0o755)
    return str(python)


@pytest.fixture
def llama_bench(tmp_path):
    program = tmp_path / "llama-bench"
    program.write_text(STAND_IN.format(python=sys.executable, log=str(tmp_path / "log")))
    program.chmod(0o755)
    return program


def test_missing_package_is_said(bare_python):
    with pytest.raises(BenchError, match=r"not installed for .*draftree\[peers\].*--llama-bench"):
        open_wheel(bare_python)


def test_command_says_it_in_one_sentence(tmp_path, tiny_path, bare_python):
    arguments = ["--results", str(tmp_path / "results"), "--peer-python", bare_python]
    result = CliRunner().invoke(app, ["bench", "peers", str(tiny_path), *arguments])
    assert result.exit_code == 1
    assert result.stdout == ""
    assert result.stderr.splitlines()[-1].startswith("error: llama.cpp cannot be measured")
    assert not (tmp_path / "results").exists()


def test_a_native_build_does_without_the_wheel(tmp_path, tiny_path, bare_python, llama_bench, say):
    options = PeerOptions(1, 2, 4, (40,), bare_python, llama_bench)
    measures = measure_peers(tiny_path, options, say)
    assert list(measures.builds) == ["native"] and measures.builds["native"]["build_number"] == "7"
    assert measures.decode.llama["native"].samples == (2000.0, 2000.0)  # 4 tokens in 2 ms
    assert measures.prefill["40"].llama["native"].samples == (20_000.0, 20_000.0)
    assert (measures.decode.faster, measures.decode.trial) == ("native", {})
    assert any("without the wheel" in line for line in say.lines)
    calls = [json.loads(line) for line in (tmp_path / "log").read_text().splitlines()]
    assert calls[0][:2] == ["-m", str(tiny_path.resolve())]
    assert calls[0][-6:] == ["-p", "0", "-n", "4", "-d", "32"]
    assert calls[-1][-4:] == ["-p", "40", "-n", "0"] and len(calls) == 4
    assert calls[0][calls[0].index("-t") + 1] == "1"


@pytest.mark.parametrize("text", ["", "{}", "[]", "[{}]", '[{"samples_ns": [1, 2]}]', "no JSON"])
def test_other_programs_are_refused(text):
    with pytest.raises(BenchError, match="is it `llama-bench`"):
        read_output(text, "cat")


def test_a_program_that_fails_is_a_sentence(tmp_path, tiny_path):
    with pytest.raises(BenchError, match="could not be started: No such file"):
        NativeBuild(tmp_path / "nothing", tiny_path, 1).prefill([1])
    program = tmp_path / "failing"
    program.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    program.chmod(0o755)
    with pytest.raises(BenchError, match="ended with status 3: no such model"):
        NativeBuild(program, tiny_path, 1).prefill([1])


@needs_peer
def test_peers_on_a_tiny_model(tiny_path, llama_bench, say):
    options = PeerOptions(1, 2, decode_tokens=4, prefill_lens=(40,), llama_bench=llama_bench)
    measures = measure_peers(tiny_path, options, say)
    assert len(measures.decode.ours.samples) == len(measures.decode.llama["wheel"].samples) == 2
    assert list(measures.prefill) == ["40"] and list(measures.builds) == ["wheel", "native"]
    assert measures.decode.ratio.value > 0.0
    assert list(measures.decode.trial) == ["server", "library"]
    assert measures.headline()["faster_build"] in measures.builds


@pytest.mark.parametrize("way", ["server", "library"])
def test_a_process_holds_the_server_or_the_library(way, monkeypatch):
    made = []
    wheel = SimpleNamespace(CommonParams=MagicMock, Server=lambda params: made.append("server"))
    monkeypatch.setitem(sys.modules, "xllamacpp", wheel)
    monkeypatch.setattr(peer_wheel, "Library", lambda path, threads: made.append("library"))
    WheelWorker().load("model.gguf", 1, 512, use_server=way == "server")
    assert made == [way]
