"""The Makefile says what is wrong when it cannot set up."""

import os
import re
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


@pytest.fixture
def project(tmp_path, monkeypatch):
    """A folder whose .venv holds stand-ins that write down what they are asked to do."""
    for name in ("Makefile", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, tmp_path)
    tools = tmp_path / ".venv" / "bin"
    tools.mkdir(parents=True)
    for name in ("python", "draftree", "ruff", "mypy", "twine"):
        (tools / name).write_text(f'#!/bin/sh\necho "{name} $*" >> {tmp_path}/calls\n')
        (tools / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'path'}:{os.environ['PATH']}")
    return tmp_path


def _installed(project, target):
    """What pip is asked for by a target."""
    (project / "calls").write_text("")
    done = subprocess.run(["make", target], cwd=project, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return re.findall(r"-m pip install .* -e (\S+)", (project / "calls").read_text())


def _has_driver():
    return Path("/proc/driver/nvidia/version").exists() or shutil.which("nvidia-smi")


@pytest.mark.skipif(_has_driver(), reason="there is an NVIDIA driver")
def test_each_target_installs_what_it_needs_once(project):
    assert _installed(project, "run") == ["."]
    assert "draftree run smollm2-135m" in (project / "calls").read_text()
    assert _installed(project, "chat") == []
    assert _installed(project, "lint") == [".[dev]"]
    assert _installed(project, "test") == []
    assert _installed(project, "bench") == [".[bench,peers]"]
    assert _installed(project, "package") == [".[package]"]
    assert _installed(project, "package") == []


def test_a_driver_brings_what_a_gpu_needs(project):
    (project / "path").mkdir()
    (project / "path" / "nvidia-smi").write_text("#!/bin/sh\n")
    (project / "path" / "nvidia-smi").chmod(0o755)
    assert _installed(project, "test") == [".[dev,gpu]"], "and not the base after it"
    assert _installed(project, "run") == []
    os.utime(project / ".venv" / ".base-gpu", (0, 0))
    assert _installed(project, "run") == [".[gpu]"]


def test_newer_inputs_are_installed_again(project):
    assert len(_installed(project, "test")) == 1
    for stamp in (project / ".venv").glob(".[bd]*"):
        os.utime(stamp, (1, 1))
    assert len(_installed(project, "test")) == 1


def test_a_failed_install_stops_and_is_tried_again(project):
    python = project / ".venv" / "bin" / "python"
    working = python.read_text()
    python.write_text('#!/bin/sh\ncase "$*" in *"pip install"*) exit 3;; esac\n')
    done = subprocess.run(["make", "run"], cwd=project, capture_output=True, text=True)
    assert done.returncode != 0 and not (project / "calls").exists()
    python.write_text(working)
    assert len(_installed(project, "run")) == 1
