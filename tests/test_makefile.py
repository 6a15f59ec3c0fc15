"""The Makefile says what is wrong when it cannot set up."""

import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.skipif(shutil.which("make") is None, reason="system: there is no make")


def run_make(folder, *arguments):
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder)
    return subprocess.run(
        ["make", *arguments], cwd=folder, capture_output=True, text=True, timeout=600
    )


def test_missing_python_is_said(tmp_path):
    result = run_make(tmp_path, "setup", "PYTHON=no-such-python")
    assert result.returncode != 0
    assert "'no-such-python' was not found" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_old_python_is_said(tmp_path):
    old = tmp_path / "old-python"
    # Runs the given code on this interpreter, with another version number.
    code = "import sys; sys.version_info = (3, 9); exec(sys.argv[1])"
    old.write_text(f'#!/bin/sh\nexec python3 -c "{code}" "$2"\n')
    old.chmod(0o755)
    result = run_make(tmp_path, "setup", "PYTHON=./old-python")
    assert result.returncode != 0
    assert "is Python 3.9, draftree needs 3.11 or newer" in result.stderr
    assert not (tmp_path / ".venv").exists()


def test_help_lists_the_targets(tmp_path):
    result = run_make(tmp_path)
    assert result.returncode == 0
    assert all(name in result.stdout for name in ("run", "chat", "test", "lint", "bench", "clean"))


def test_prompt_is_quoted(tmp_path):
    result = run_make(tmp_path, "-n", "run", "PROMPT=it's $$HOME")
    assert result.returncode == 0, result.stderr
    assert r"--prompt 'it'\''s $HOME'" in result.stdout
