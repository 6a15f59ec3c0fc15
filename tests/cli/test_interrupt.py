"""Ctrl-C is noted once, obeyed the second time, and the handler is put back."""

import os
import signal
import threading

import pytest

from draftree.cli.interrupt import consume, watch_interrupt
from draftree.core import TokenSource
from tests.cli.fake import Generation


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
