"""The judge of replies finds what is wrong: other texts, replies without an end, errors."""

import math
from dataclasses import replace

import pytest

from benchmarks.chaos import Chaos, prepare_questions, read_metrics
from draftree.bench.http import Endpoint
from draftree.chat import Engine
from tests.serve.conftest import Running
from tests.tiny import tiny_path


@pytest.fixture(autouse=True)
def _no_rest(monkeypatch):
    monkeypatch.setattr("benchmarks.chaos._REST_S", 0.0)


@pytest.fixture(scope="module")
def asked():
    """Questions, and a server that answers them as a single engine does."""
    path, options = str(tiny_path("llama")), {"threads": 1, "device": "cpu"}
    engine = Engine.open(path, **options)
    questions = prepare_questions(engine, "fake", ["one", "two", "three", "four"], 12)
    engine.close()
    running = Running(lambda: Engine.open(path, **options)).start()
    yield questions, Endpoint(running.url)
    running.stop()


class Counted(Chaos):
    """Streams end after so many replies, however long they take."""

    def run_stream(self, number: int) -> None:
        self._end_s, self._left = math.inf, 4
        super().run_stream(number)

    def _note(self, outcome: str, fault: str = "") -> None:
        super()._note(outcome, fault)
        self._left -= 1
        if not self._left:
            self.end()


def run(endpoint, questions):
    chaos = Counted(endpoint, questions, math.inf)
    for number in range(4):
        chaos.run_stream(number)
    return chaos


def test_right_replies_are_no_faults(asked):
    questions, endpoint = asked
    assert len({question.text for question in questions}) > 2
    chaos = run(endpoint, questions)
    assert not chaos.faults and chaos.counts["whole"] and chaos.counts["left"]
    assert read_metrics(endpoint)["draftree_completion_tokens_total"] > 0


@pytest.mark.parametrize(
    "change",
    [
        lambda question: replace(question, text=question.text + "x"),
        lambda question: replace(question, text=question.text[:-1]),
        lambda question: replace(question, body={**question.body, "seed": 99, "temperature": 2}),
        lambda question: replace(question, body={**question.body, "model": "other"}),
    ],
)
def test_wrong_ones_are(asked, change):
    questions, endpoint = asked
    chaos = run(endpoint, [change(question) for question in questions])
    assert chaos.faults and not chaos.counts["whole"]
