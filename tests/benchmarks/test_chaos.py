"""The judge of replies finds what is wrong: other texts, replies without an end, errors."""

from dataclasses import replace

import pytest

from benchmarks.chaos import Chaos, prepare_questions, read_metrics
from draftree.bench.http import Endpoint
from draftree.chat import Engine
from tests.serve.conftest import Running
from tests.tiny import tiny_path


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


def run(endpoint, questions, seconds=0.3):
    chaos = Chaos(endpoint, questions, seconds)
    for number in range(20):
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
