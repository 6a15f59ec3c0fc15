"""A bar for prompts that take a while, on terminals alone."""

import io
import sys
from types import SimpleNamespace

import pytest

from draftree.cli import prompt_bar
from draftree.cli.prompt_bar import PromptBar
from draftree.core import Usage


class Terminal(io.StringIO):
    def isatty(self):
        return True


class Reading:
    """A generation that reads a prompt when told to."""

    def __init__(self):
        self.usage = Usage(prompt_tokens=65536)
        self._on_chunk = None

    def watch_prompt(self, on_chunk):
        self._on_chunk = on_chunk

    def read(self, num_tokens):
        self.usage.read_tokens = num_tokens
        if self._on_chunk is not None:
            self._on_chunk()


@pytest.fixture
def clock(monkeypatch):
    clock = SimpleNamespace(now_s=0.0)
    # Its own clock: that of the process is everybody's, event loops in other threads included.
    own = SimpleNamespace(monotonic=lambda: clock.now_s)
    monkeypatch.setattr(prompt_bar, "time", own)
    return clock


def show(monkeypatch, terminal):
    monkeypatch.setattr(sys, "stderr", terminal)
    monkeypatch.setenv("TERM", "xterm")
    generation = Reading()
    return generation, PromptBar(generation)


def test_long_prompts_have_a_bar(monkeypatch, clock):
    terminal = Terminal()
    generation, bar = show(monkeypatch, terminal)
    generation.read(2048)
    assert terminal.getvalue() == ""
    clock.now_s = 1.5
    generation.read(4096)
    generation.read(8192)
    bar.end()
    bar.end()
    written = terminal.getvalue()
    assert "reading the prompt" in written and "8192/65536" in written
    assert written.endswith("\x1b[2K") or "\x1b[2K" in written[-40:], "the bar stays"


def test_short_ones_have_none(monkeypatch, clock):
    terminal = Terminal()
    generation, bar = show(monkeypatch, terminal)
    generation.read(2048)
    clock.now_s = 1.5
    generation.read(65535)
    bar.end()
    assert terminal.getvalue() == ""


def test_pipes_have_none(monkeypatch, clock):
    pipe = io.StringIO()
    generation, bar = show(monkeypatch, pipe)
    clock.now_s = 1.5
    generation.read(4096)
    bar.end()
    assert pipe.getvalue() == ""
