"""The engine killed in the middle of a stream, and the whole server, as their clients see it."""

import json
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2
import pytest

from draftree.serve.thread import State
from tests.serve.conftest import wait_for
from tests.serve.test_openai import HELLO
from tests.serve.test_reply import PATH, open_stream
from tests.serve.test_server import read_all

ROOT = Path(__file__).parents[2]
# `draftree serve` itself, with an engine that is made here.
COMMAND = """
import time
from draftree.cli import main
from draftree.cli.option import Settings
from tests.serve import fake
Settings.open_engine = lambda *_, **options: fake.Engine(pieces={pieces}, round_s={round_s})
main(["serve", "fake", "--port", "{port}", *{options}])
"""


class Killed(BaseException):
    """What ends a thread, and no code that catches exceptions."""


def kill():
    raise Killed("the end")


def test_a_thread_that_is_killed_tells_everyone(start, engine):
    running, gate = start(), threading.Event()
    engine.pieces = ["Hello", lambda: gate.wait(120), " there", kill]
    first = open_stream(running)
    wait_for(lambda: engine.started)
    second = open_stream(running)
    wait_for(lambda: running.service.queue.num_waiting == 1)
    gate.set()
    text = read_some(first)
    assert "Hello" in text and "Killed: the end" in text and "[DONE]" in text
    assert "could not be opened again" in read_some(second)
    wait_for(lambda: running.service.state is State.FAILED)
    assert isinstance(running.service.thread.failure, Killed)
    assert running.service.queue.num_admitted == 0
    assert httpx2.get(f"{running.url}/health").json()["status"] == "failed"
    refused = httpx2.post(running.url + PATH, json=HELLO)
    assert (refused.status_code, "retry-after" in refused.headers) == (503, True)


def read_some(connection):
    """All that comes of one reply, on a connection that stays open."""
    received = b""
    connection.settimeout(120)
    # The end of the head may look like that of the last chunk, but for what comes before it.
    while not re.search(rb"(\r\n0\r\n\r\n|\})$", received):
        received += connection.recv(100_000)
    connection.close()
    return received.decode()


class Process:
    """A server in a process of its own."""

    def __init__(self, pieces, round_s=0.0, port=0, options=()):
        code = COMMAND.format(pieces=pieces, round_s=round_s, port=port, options=options)
        command = [sys.executable, "-c", code]
        self.process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr))
        self._reader.start()
        wait_for(lambda: "is ready at" in self.said or self.process.poll() is not None, 30)
        self.url = re.search(r"is ready at (\S+)", self.said)[1]
        self.port = int(self.url.rpartition(":")[2])

    @property
    def said(self):
        return "".join(self.lines)

    def end(self):
        """The exit status."""
        status = self.process.wait(20)
        self._reader.join(10)
        self.process.stderr.close()
        return status

    def stop(self):
        self.process.terminate()
        return self.end()


def stream(process):
    """Events of a stream, as far as they come."""
    body = {**HELLO, "stream": True}
    with httpx2.stream("POST", process.url + PATH, json=body, timeout=20) as response:
        assert response.status_code == 200
        for line in response.iter_lines():
            if line.startswith("data: {"):
                yield json.loads(line.removeprefix("data: "))


def test_an_engine_that_keeps_breaking_ends_the_server_with_its_reason():
    process = Process('["Hello", fake.Broken("worn out")]')
    for _ in range(3):
        wait_for(lambda: httpx2.get(f"{process.url}/health").is_success)
        *_, last = stream(process)
        assert last["error"]["code"] == "engine_failure"
        assert "worn out" in last["error"]["message"]
    assert process.end() == 1
    reason = "error: The engine failed 3 times in a row, at last with Broken: worn out."
    assert process.lines[-1].strip() == reason
    events = [json.loads(line) for line in process.lines if line.startswith("{")]
    states = [event["state"] for event in events if event["event"] == "state"]
    assert states == ["ready", *["recovering", "ready"] * 2, "failed"]
    failures = [event["error"] for event in events if event["event"] == "engine failed"]
    assert len(failures) == 3
    assert all("Traceback" in failure and "worn out" in failure for failure in failures)


def test_a_server_that_is_killed_breaks_its_streams_off():
    process = Process('["word "] * 1000', round_s=0.02)
    found = []
    with pytest.raises(httpx2.RemoteProtocolError, match="incomplete"):
        for chunk in stream(process):
            found.append(chunk)
            if len(found) == 3:
                process.process.kill()
    assert all(not chunk["choices"][0]["finish_reason"] for chunk in found)
    assert process.end() < 0
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{process.url}/health")
    again = Process('["fine"]', port=process.port)  # the port is free at once
    assert httpx2.get(f"{again.url}/health").is_success
    assert again.stop() == 0


def test_two_interrupts_leave_no_traceback():
    process = Process('["word "] * 1000', round_s=0.02)
    found = []
    with pytest.raises(httpx2.HTTPError):
        for chunk in stream(process):
            found.append(chunk)
            if len(found) in (3, 6):
                process.process.send_signal(signal.SIGINT)
        raise httpx2.HTTPError("it ended in an orderly way")
    assert process.end() == 130
    assert "Traceback" not in process.said and "KeyboardInterrupt" not in process.said


def test_read_all_is_what_a_stopped_server_sends(start, engine):
    running = start(grace_s=60)
    engine.round_s = 0.05
    engine.pieces = ["Hello", kill]
    first = open_stream(running)
    wait_for(lambda: engine.started)
    running.server.should_exit = True
    assert "Killed: the end" in read_all(first)
