"""Rounds in a stream: what the engine saw, only for who asks."""

import json
import math
from types import SimpleNamespace

import httpx2
import pytest

from draftree.core import DraftTree, TokenSource
from draftree.serve.rounds import KIND, render_round
from tests.serve.conftest import Running
from tests.serve.test_openai import HELLO, error_of

ASK = {
    "model": "fake",
    "messages": [{"role": "user", "content": "Write a function that adds two numbers."}],
    "max_tokens": 40,
    "temperature": 0,
    "stream": True,
}
ROUNDS = {"draftree": {"rounds": True}}


@pytest.fixture(scope="module")
def real(smollm2_path):
    """A real engine with a fixed budget, so that its trees are always the same."""
    from draftree.chat import Engine

    engine = Engine.open("smollm2-135m", budget=12, max_ctx=512)
    running = Running(lambda: engine).start()
    yield engine, running.url
    running.stop()


def read_events(url, path, body):
    with httpx2.stream("POST", f"{url}{path}", json=body, timeout=120) as response:
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


def rounds_of(events, index=0):
    mine = [e for e in events if e.get("object") == KIND and e["index"] == index]
    return [one for event in mine for one in event["rounds"]]


def text_of(events, key="content"):
    pieces = [choice for event in events for choice in event["choices"]]
    return "".join(piece["delta"].get(key) or "" for piece in pieces)


def test_rounds_are_those_that_the_engine_saw(real):
    engine, url = real
    seen = []
    engine.tokens.watch = seen.append
    expected = "".join(delta.text for delta in engine.chat(ASK["messages"], max_tokens=40))
    engine.tokens.watch = None
    events = read_events(url, "/v1/chat/completions", {**ASK, **ROUNDS})
    assert text_of(events) == expected
    sent = rounds_of(events)
    assert len(sent) == len(seen) > 3
    for one, round_ in zip(sent, seen, strict=True):
        nodes, tree = one["nodes"], round_.tree
        assert [node["id"] for node in nodes] == list(tree.tokens)
        assert [node["parent"] for node in nodes] == list(tree.parents)
        assert [node["source"] for node in nodes] == [str(source) for source in tree.sources]
        accepted = tuple(i for i, node in enumerate(nodes) if node["accepted"])
        end = tree.find_child(round_.path[-1], round_.bonus)
        assert accepted == (round_.path if end is None else (*round_.path, end))
        assert one["bonus"] is None if end is not None else one["bonus"]["id"] == round_.bonus
        for node, log_prob in zip(nodes[1:], round_.path_log_probs, strict=True):
            assert node["chance"] == pytest.approx(math.exp(log_prob), abs=1e-4)
    assert max(len(round_.path) for round_ in seen) > 2
    assert any(len(round_.path) < round_.tree.num_nodes for round_ in seen)


def test_rounds_come_before_their_text_and_tell_all_of_it(real):
    _, url = real
    events = read_events(url, "/v1/chat/completions", {**ASK, **ROUNDS})
    told = shown = ""
    for event in events:
        for one in event.get("rounds", ()):
            path = [node["text"] for node in one["nodes"][1:] if node["accepted"]]
            told += "".join([*path, one["bonus"]["text"] if one["bonus"] else ""])
        shown += text_of([event])
        assert told.startswith(shown)
    assert told.removesuffix("<|im_end|>") == shown
    counts = [event["completion_tokens"] for event in events if event.get("object") == KIND]
    assert counts == sorted(counts)
    assert counts[-1] == sum(
        (one["bonus"] is not None) + sum(node["accepted"] for node in one["nodes"][1:])
        for one in rounds_of(events)
    )


def test_several_replies_have_rounds_of_their_own(real):
    _, url = real
    body = {
        "model": "fake",
        "prompt": ["one two one two one", "a b a b a b"],
        "max_tokens": 8,
        "temperature": 0,
        "stream": True,
        **ROUNDS,
    }
    events = read_events(url, "/v1/completions", body)
    for index in range(2):
        told = "".join(
            node["text"]
            for one in rounds_of(events, index)
            for node in [*(n for n in one["nodes"][1:] if n["accepted"]), one["bonus"]]
        )
        choices = [choice for event in events for choice in event["choices"]]
        assert told == "".join(c["text"] for c in choices if c["index"] == index)


@pytest.mark.parametrize("extra", [{}, {"draftree": {}}, {"draftree": {"stats": True}}])
def test_nobody_is_shown_rounds_unasked(real, extra):
    _, url = real
    events = read_events(url, "/v1/chat/completions", {**ASK, "max_tokens": 4, **extra})
    assert events
    assert not [event for event in events if event.get("object") == KIND]


def test_rounds_need_a_stream(client):
    error = error_of(client.post("/v1/chat/completions", json={**HELLO, **ROUNDS}), 400)
    assert error["param"] == "draftree.rounds"


def test_bytes_that_are_no_character_are_spelled_out():
    tree = DraftTree((1, 2), (-1, 0), (0, 1), (TokenSource.BONUS, TokenSource.NGRAM))
    pieces = {1: "é".encode(), 2: b"\xf0\x9f"}
    one = SimpleNamespace(tree=tree, path=(0, 1), bonus=2, path_log_probs=())
    rendered = render_round(one, SimpleNamespace(written_bytes=pieces.__getitem__))
    assert [node["text"] for node in rendered["nodes"]] == ["é", "\\xf0\\x9f"]
    assert [node["chance"] for node in rendered["nodes"]] == [None, None]
    assert rendered["bonus"] == {"id": 2, "text": "\\xf0\\x9f"}


def test_an_end_that_was_guessed_is_accepted_and_there_once():
    tree = DraftTree(
        (1, 2, 3), (-1, 0, 1), (0, 1, 2), (TokenSource.BONUS, *[TokenSource.CHAIN] * 2)
    )
    tokenizer = SimpleNamespace(written_bytes=lambda token: b"x")
    for path, bonus, accepted in (((0, 1), 3, 3), ((0,), 2, 2), ((0, 1), 2, 2), ((0, 1, 2), 3, 3)):
        one = SimpleNamespace(tree=tree, path=path, bonus=bonus, path_log_probs=())
        rendered = render_round(one, tokenizer)
        assert [node["accepted"] for node in rendered["nodes"]].count(True) == accepted
        assert (rendered["bonus"] is None) == (accepted > len(path))
