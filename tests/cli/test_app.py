"""How the command line starts and how its failures end, in processes of its own."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FAKE = """
import sys
sys.path.insert(0, {root!r})
from tests.cli import fake
engine = fake.Engine(words={words!r})
fake.install(engine)
from draftree.cli import main
main({arguments!r})
"""


def run_process(*arguments, stdin=None, **options):
    command = [sys.executable, "-m", "draftree", *map(str, arguments)]
    return subprocess.run(
        command, cwd=ROOT, capture_output=True, text=True, timeout=600, input=stdin, **options
    )


def fake_command(words, *arguments):
    code = FAKE.format(root=str(ROOT), words=words, arguments=list(arguments))
    return [sys.executable, "-c", code]


def assert_one_sentence(result, status):
    assert result.returncode == status, result.stderr
    assert result.stdout == ""
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: ")
    assert line.endswith((".", "?"))
    return line


def test_version():
    from draftree import __version__

    result = run_process("--version")
    assert (result.returncode, result.stdout) == (0, f"draftree {__version__}\n")


def test_no_command_shows_help(draftree):
    result = draftree()
    assert result.exit_code == 0
    assert "inspect" in result.stdout


def test_unknown_command_suggests_one(draftree):
    result = draftree("rnu")
    assert result.exit_code == 2
    assert "'run'" in result.stderr


HOSTILE = {
    "empty": b"",
    "text": b"this is not a model\n" * 10,
    "magic": b"GGUF",
    "huge-counts": b"GGUF" + (3).to_bytes(4, "little") + b"\xff" * 16,
    "old-version": b"GGUF" + (1).to_bytes(4, "little") + bytes(64),
}
OTHER_HOSTILE = ("text", "magic", "old-version")  # tests/weights has them without a process


@pytest.mark.parametrize(
    ("kind", "command"),
    [
        *(("empty", "inspect"), ("huge-counts", "inspect"), ("magic", "run")),
        *(pytest.param(kind, "inspect", marks=pytest.mark.long) for kind in OTHER_HOSTILE),
    ],
)
def test_hostile_file_is_one_sentence(tmp_path, command, kind):
    path = tmp_path / "model.gguf"
    path.write_bytes(HOSTILE[kind])
    options = ["-p", "x"] if command == "run" else []
    line = assert_one_sentence(run_process(command, path, *options), 1)
    assert "Internal error" not in line


def test_missing_file_is_one_sentence(tmp_path):
    line = assert_one_sentence(run_process("inspect", tmp_path / "nothing.gguf"), 1)
    assert "nothing.gguf" in line


def test_debug_shows_the_traceback(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    result = run_process("--debug", "inspect", path)
    assert result.returncode == 1
    assert "Traceback" in result.stderr


def test_internal_errors_are_sentences_too(draftree, engine, monkeypatch):
    monkeypatch.setattr(engine, "generate", lambda *_, **__: [][1])
    result = draftree("run", "-p", "x")
    assert result.exit_code == 1
    assert result.stderr.startswith("error: Internal error (IndexError: ")
    assert len(result.stderr.splitlines()) == 1


def test_closed_pipe_ends_quietly():
    process = subprocess.Popen(
        fake_command(["line\n", *["<slow>"] * 500], "run", "-p", "x"),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdout.readline() == "line\n"
    process.stdout.close()
    assert process.wait(timeout=600) == 141
    assert process.stderr.read() == ""


def test_text_that_stdout_cannot_encode_is_replaced():
    result = subprocess.run(
        fake_command(["caf\u00e9"], "run", "-p", "x"),
        capture_output=True,
        timeout=600,
        env={**os.environ, "PYTHONIOENCODING": "ascii"},
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout == b"caf?\n"


def test_starts_without_heavy_imports():
    heavy = "torch numba numpy prompt_toolkit huggingface_hub gguf safetensors tokenizers jinja2"
    code = f"import sys, draftree.cli.app; print(*(set({heavy.split()}) & set(sys.modules)))"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == []


def test_real_model_writes_the_same_with_and_without_speculation(smollm2_path):
    prompt = "1 2 3 4 5 6 7 1 2 3 4 5 6 7 1 2 3"
    texts = []
    for options in (["--ngram", "on"], ["--ngram", "off"]):
        result = run_process(
            "run", smollm2_path, "-p", prompt, "-n", 16, "--draft", "none", *options
        )
        assert result.returncode == 0, result.stderr
        assert result.stderr.splitlines()[-1].startswith("16 tokens in ")
        assert ("AL " in result.stderr) is (options[1] == "on")
        texts.append(result.stdout)
    assert texts[0] == texts[1]
    assert texts[0].split()
