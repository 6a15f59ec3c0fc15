"""Ctrl-C is noted once, obeyed the second time, and the handler is put back."""

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from draftree.cli.interrupt import consume, watch_interrupt
from draftree.core import TokenSource
from tests.cli.fake import Generation

ROOT = Path(__file__).parents[2]


def press():
    os.kill(os.getpid(), signal.SIGINT)


def test_first_is_noted_second_is_obeyed():
    before = signal.getsignal(signal.SIGINT)
    with watch_interrupt() as interrupt:
        assert not interrupt.is_set
        press()
        assert interrupt.is_set
        with pytest.raises(KeyboardInterrupt):
            press()
    assert signal.getsignal(signal.SIGINT) is before


def test_other_threads_only_never_see_it():
    seen = []

    def work():
        with watch_interrupt() as interrupt:
            seen.append(interrupt.is_set)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert seen == [False]


def test_reply_is_closed_when_writing_fails():
    generation = Generation(["a", "b"], [TokenSource.PLAIN] * 2)

    def write(delta):
        raise BrokenPipeError

    with pytest.raises(BrokenPipeError):
        consume(generation, write)
    assert generation.is_closed


def test_a_prompt_that_is_read_ends_after_its_chunk(monkeypatch):
    """No delta comes meanwhile that it could be noticed at."""
    from draftree.chat import Engine
    from tests.tiny import tiny_path

    options = {"max_ctx": 256, "draft": "none", "chunk": 8, "threads": 1, "budget": 0}
    engine = Engine.open(str(tiny_path("qwen3")), **options)
    generation = engine.complete([5] * 200)
    prefill, num_chunks = engine.tokens.target.forward, []

    def forward(**arguments):
        num_chunks.append(None)
        if len(num_chunks) == 3:
            press()
        return prefill(**arguments)

    monkeypatch.setattr(engine.tokens.target, "forward", forward)
    assert consume(generation, lambda delta: pytest.fail("nothing was written"))
    assert len(num_chunks) == 3 and generation.usage.read_tokens == 24
    engine.close()


COMMAND = """
import sys, time
from draftree.cli import main
from tests.cli import fake
fake.install(fake.Engine(words=["one", "<slow>", *["<ctrl-c>"] * {presses}, *["<slow>"] * 9]))
main({arguments})
time.sleep(60)
"""
LEAVING = """
import atexit, os, signal
from draftree.cli import main
atexit.register(os.kill, os.getpid(), signal.SIGINT)
main(["models"])
"""


@pytest.mark.parametrize("presses", [1, 2])
@pytest.mark.parametrize("arguments", [["run", "x.gguf", "-p", "a"], ["chat", "x.gguf"]])
def test_no_traceback(arguments, presses):
    ended = run_python(COMMAND.format(arguments=arguments, presses=presses))
    assert "Traceback" not in ended.stderr and "KeyboardInterrupt" not in ended.stderr
    assert ended.returncode == (130 if arguments[0] == "run" else 0)


def test_no_traceback_of_the_interpreters_end():
    ended = run_python(LEAVING)
    assert (ended.returncode, ended.stderr) == (130, "")


def run_python(code):
    return subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, input="hi\n", capture_output=True, text=True
    )
