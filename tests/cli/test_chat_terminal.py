"""`draftree chat` in a real terminal: Ctrl-C stops a reply, Ctrl-D leaves, history is kept."""

import contextlib
import os
import pty
import select
import signal
import sys
import time

import pytest

from tests.cli.test_app import fake_command

DEADLINE_S = 600.0


class Terminal:
    """A process on a pseudo-terminal: send keys, wait for text."""

    def __init__(self, command, environment):
        self.pid, self._file = pty.fork()
        if self.pid == 0:
            try:
                os.execve(command[0], command, environment)
            finally:
                os._exit(127)
        self.seen = ""
        self._read_until = 0

    def send(self, keys):
        os.write(self._file, keys.encode())

    def expect(self, text):
        """Wait for text that appears after what was expected before."""
        end = time.monotonic() + DEADLINE_S
        while (found := self.seen.find(text, self._read_until)) < 0:
            assert time.monotonic() < end, f"no {text!r} in {self.seen[self._read_until :]!r}"
            if select.select([self._file], [], [], 0.1)[0]:
                try:
                    data = os.read(self._file, 65536)
                except OSError:  # the other side is gone
                    data = b""
                assert data, f"ended before {text!r}: {self.seen!r}"
                self.seen += data.decode(errors="replace")
        self._read_until = found + len(text)

    def expect_prompt(self):
        """Wait for a new line editor: it asks for bracketed paste, then draws its prompt."""
        self.expect("\x1b[?2004h")
        self.expect(">")

    def wait(self):
        """The exit status, once the process has ended; its last words are read meanwhile."""
        end = time.monotonic() + DEADLINE_S
        while time.monotonic() < end:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.pid = 0
                return os.waitstatus_to_exitcode(status)
            if select.select([self._file], [], [], 0.1)[0]:
                with contextlib.suppress(OSError):
                    self.seen += os.read(self._file, 65536).decode(errors="replace")
        raise AssertionError(f"still running: {self.seen!r}")

    def close(self):
        if self.pid:
            os.kill(self.pid, signal.SIGKILL)
            os.waitpid(self.pid, 0)
        os.close(self._file)


@pytest.fixture
def open_terminal(tmp_path):
    opened = []

    def open_one(words, *arguments):
        environment = {
            **os.environ,
            "DRAFTREE_CACHE": str(tmp_path),
            "TERM": "xterm",
            "PROMPT_TOOLKIT_NO_CPR": "1",
        }
        command = fake_command(words, *arguments)
        assert command[0] == sys.executable
        opened.append(Terminal(command, environment))
        return opened[-1]

    yield open_one
    for terminal in opened:
        terminal.close()


def test_interrupt_and_leave(open_terminal, tmp_path):
    terminal = open_terminal(["Hello", *["<slow>"] * 1000], "chat")
    terminal.expect_prompt()
    terminal.send("hi\r")
    terminal.expect("Hello.")
    terminal.send("\x03")
    terminal.expect_prompt()
    terminal.send("/stats\r")
    terminal.expect("tokens per second")
    terminal.expect_prompt()
    terminal.send("half a line")
    terminal.expect("half a line")
    terminal.send("\x03")
    terminal.expect_prompt()
    terminal.send("\x04")
    assert terminal.wait() == 0
    assert "Traceback" not in terminal.seen
    assert "+hi" in (tmp_path / "chat_history").read_text()


def test_new_line_by_alt_enter(open_terminal):
    terminal = open_terminal(["Fine"], "chat")
    terminal.expect_prompt()
    terminal.send("one\x1b\rtwo\r")
    terminal.expect("Fine")
    terminal.expect_prompt()
    terminal.send("/exit\r")
    assert terminal.wait() == 0


def test_run_in_a_terminal_stops_with_130(open_terminal):
    terminal = open_terminal(["Hello", *["<slow>"] * 1000], "run", "-p", "Say")
    terminal.expect("Say")
    terminal.expect("Hello")
    terminal.send("\x03")
    terminal.expect("tokens per second")
    assert terminal.wait() == 130
    assert "Traceback" not in terminal.seen
