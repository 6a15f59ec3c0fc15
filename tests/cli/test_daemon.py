"""Servers in the background: pid files that tell the living from the dead."""

import json
import os
import re
import subprocess
import sys

import pytest

from draftree.cli.daemon import Background, find_servers, pid_file, server_folder
from tests.cli.test_app import FAKE, ROOT


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))
    return tmp_path


def server(port=1234, pid=None):
    return Background(pid or os.getpid(), port, f"http://127.0.0.1:{port}", "m", "log")


def test_a_server_is_found_while_it_lives():
    assert find_servers() == []
    with pid_file(server()), pid_file(server(5678)):
        # Another process is asked, since a lock does not keep its own process out.
        code = "from draftree.cli.daemon import find_servers; print(len(find_servers()))"
        result = subprocess.run(
            [sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT
        )
        assert result.stdout == "2\n", result.stderr
    assert list(server_folder().iterdir()) == []


def test_files_that_were_left_behind_are_removed():
    server_folder().mkdir()
    left = server_folder() / "1.json"
    left.write_text(json.dumps({"pid": os.getpid()}))
    assert find_servers() == []
    assert not left.exists()


def command(*arguments, setup=""):
    code = FAKE.format(root=str(ROOT), words=["a"], arguments=list(arguments))
    return subprocess.run(
        [sys.executable, "-c", setup + code], capture_output=True, text=True, timeout=600
    )


def test_start_and_stop(cache):
    started = command("serve", "--daemon", "--port", "0")
    assert started.returncode == 0, started.stderr
    url, port = re.search(r"ready at (http://127.0.0.1:(\d+))", started.stderr).groups()
    try:
        import httpx2

        assert httpx2.get(f"{url}/health", timeout=120).json()["status"] == "ok"
        taken = command("serve", "--daemon", "--port", port)
        assert taken.returncode == 1
        assert "address already in use" in taken.stderr
    finally:
        stopped = command("stop", "--port", port)
    assert (stopped.returncode, url in stopped.stderr) == (0, True)
    assert command("stop").returncode == 1
    log = (cache / "serve" / f"{port}.log").read_text()
    assert '"state": "ready"' in log


def test_a_server_that_does_not_start_says_why(cache):
    broken = """
from tests.cli import fake
def open(self, *_, **options):
    from draftree.errors import ModelError
    raise ModelError("The file is damaged.")
fake.Engine.open = open
"""
    setup = f"import sys\nsys.path.insert(0, {str(ROOT)!r})\n{broken}"
    result = command("serve", "--daemon", "--port", "0", setup=setup)
    assert result.returncode == 1
    (line,) = result.stderr.splitlines()
    assert line.startswith("error: The server did not start: The file is damaged.")
    assert list((cache / "serve").glob("*.json")) == []
