"""How llama.cpp is built, with a stand-in for cmake."""

import json
import sys

import pytest

from benchmarks.llama_build import build_llama_bench
from draftree.errors import BenchError

CMAKE = """#!{python}
import json, sys
from pathlib import Path
with Path({log!r}).open("a") as log:
    log.write(json.dumps(sys.argv[1:]) + "\\n")
sys.exit(4 if {fails} and "--build" in sys.argv else 0)
"""


@pytest.fixture
def source(tmp_path):
    (tmp_path / "source" / "tools" / "llama-bench").mkdir(parents=True)
    return tmp_path / "source"


def put_cmake(tmp_path, monkeypatch, fails):
    folder = tmp_path / "programs"
    folder.mkdir()
    cmake = folder / "cmake"
    cmake.write_text(CMAKE.format(python=sys.executable, log=str(tmp_path / "log"), fails=fails))
    cmake.chmod(0o755)
    monkeypatch.setenv("PATH", str(folder))


def test_one_program_is_built_for_this_cpu(tmp_path, source, monkeypatch):
    put_cmake(tmp_path, monkeypatch, fails=False)
    program = build_llama_bench(source, tmp_path / "build", 2)
    assert program == tmp_path / "build" / "bin" / "llama-bench"
    configure, build = (json.loads(line) for line in (tmp_path / "log").read_text().splitlines())
    assert configure[:4] == ["-S", str(source), "-B", str(tmp_path / "build")]
    assert "-DGGML_NATIVE=ON" in configure and "-DCMAKE_BUILD_TYPE=Release" in configure
    assert build[2:] == ["--target", "llama-bench", "-j", "2"]


def test_failures_are_sentences(tmp_path, source, monkeypatch):
    with pytest.raises(BenchError, match=r"not a source tree of llama\.cpp"):
        build_llama_bench(tmp_path, tmp_path / "build", 2)
    put_cmake(tmp_path, monkeypatch, fails=True)
    with pytest.raises(BenchError, match="--target llama-bench -j 2` failed with status 4"):
        build_llama_bench(source, tmp_path / "build", 2)
    monkeypatch.setenv("PATH", str(source))
    with pytest.raises(BenchError, match="needs cmake"):
        build_llama_bench(source, tmp_path / "build", 2)
