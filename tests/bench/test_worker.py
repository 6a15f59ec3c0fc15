"""A process that answers line by line, and how its failures are told."""

import pytest

from draftree.bench.worker import Child
from draftree.errors import BenchError


def test_answers_come_back_whatever_is_printed():
    with Child("tests.bench.echo", "echo") as child:
        assert child.ask("repeat", text="é\n2") == "é\n2"
        assert child.ask("repeat", text=[1, 2]) == [1, 2]


def test_a_failure_is_a_sentence_and_not_the_end():
    with Child("tests.bench.echo", "echo") as child:
        with pytest.raises(BenchError, match="echo could not fail: ValueError: cannot"):
            child.ask("fail")
        assert child.ask("repeat", text="on") == "on"


def test_an_early_end_is_told_with_its_last_words():
    with (
        Child("tests.bench.echo", "echo") as child,
        pytest.raises(BenchError, match="echo ended with status 3: going"),
    ):
        child.ask("leave")


def test_a_missing_interpreter_is_told():
    with pytest.raises(BenchError, match="could not be started with no-such-python"):
        Child("tests.bench.echo", "echo", "no-such-python")
