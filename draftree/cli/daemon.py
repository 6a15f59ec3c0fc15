"""Servers in the background: a process of their own, with a pid file and a log file each.

A server holds a lock on its pid file while it lives, so that a file that was left behind, or a
number that another process got since, is told from a server that runs.
"""

import fcntl
import json
import os
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Final

from draftree import env
from draftree.errors import ServeError

_READY: Final = b"ready"
_STOP_S: Final = 60.0


@dataclass(frozen=True, slots=True)
class Background:
    """A server that runs in the background."""

    pid: int
    port: int
    url: str
    model: str
    log: str


def server_folder() -> Path:
    return env.cache_dir() / "serve"


def detach(log_path: Path) -> "Callable[[str], None] | None":
    """Go on in a process of its own. There: returns a function that reports to the parent,
    "ready" or what went wrong. In the parent: waits for that report; returns None when ready.
    """
    log_path.parent.mkdir(parents=True, exist_ok=True)
    reading, writing = os.pipe()
    sys.stdout.flush()
    sys.stderr.flush()
    if os.fork() > 0:
        os.close(writing)
        with os.fdopen(reading, "rb") as pipe:
            report = pipe.read()
        if report != _READY:
            words = report.decode("utf-8", "replace") or "the server ended"
            raise ServeError(f"The server did not start: {words} (log: {log_path})")
        return None
    os.close(reading)
    os.setsid()
    with log_path.open("ab") as log, Path(os.devnull).open("rb") as nothing:
        os.dup2(nothing.fileno(), 0)
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    def report_once(words: str) -> None:
        nonlocal writing
        if writing >= 0:
            os.write(writing, words.encode("utf-8", "replace"))
            os.close(writing)
            writing = -1

    return report_once


@contextmanager
def pid_file(server: Background) -> Iterator[None]:
    """A pid file that is written and locked, and gone at the end."""
    path = server_folder() / f"{server.port}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a+", encoding="utf-8") as file:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        file.truncate(0)
        file.write(json.dumps(asdict(server)))
        file.flush()
        try:
            yield
        finally:
            path.unlink(missing_ok=True)


def find_servers() -> list[Background]:
    """Those that run; files that others left behind are removed."""
    found = []
    for path in sorted(server_folder().glob("*.json")):
        with path.open(encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                text = file.read()
                found += [Background(**json.loads(text))] if text else []  # else just starting
                continue
        path.unlink(missing_ok=True)
    return found


def stop_server(server: Background) -> None:
    """Ask a server to end and wait until it has."""
    try:
        os.kill(server.pid, signal.SIGTERM)
    except ProcessLookupError:
        return
    deadline = time.monotonic() + _STOP_S
    while server in find_servers():
        if time.monotonic() > deadline:
            raise ServeError(
                f"The server on port {server.port} (process {server.pid}) did not end within "
                f"{_STOP_S:.0f} seconds; see {server.log}."
            )
        time.sleep(0.05)
