"""A session against a server that keeps to a script: what is sent, and what comes of it."""

import json

import pytest

from draftree.bench.agent import (
    AgentOptions,
    AgentTurn,
    _summarize,
    make_session,
    make_tools,
    measure_agent,
)
from draftree.bench.http import Endpoint
from draftree.errors import BenchError
from tests.bench.test_http import event, piece, server  # noqa: F401

USAGE = {"prompt_tokens": 100, "completion_tokens": 7, "prompt_tokens_details": {}}


def call(**fields):
    return event({"choices": [{"delta": {"tool_calls": [{"index": 0, **fields}]}}]})


def script(arguments):
    return [
        call(id="c1", function={"name": "read_file", "arguments": arguments[:5]}),
        call(function={"arguments": arguments[5:]}),
        event({"usage": {**USAGE, "prompt_tokens_details": {"cached_tokens": 80}}, "choices": []}),
        b"data: [DONE]\n\n",
    ]


def run(server, say, num_turns=3):  # noqa: F811
    endpoint = Endpoint(f"http://127.0.0.1:{server.server_address[1]}")
    return measure_agent(endpoint, "m", AgentOptions(9, 0.0, num_turns), say)


def test_replies_are_sent_back_and_prompts_asked_again_cold(server, say):  # noqa: F811
    server.script = script('{"path": "stats.py"}')
    report = run(server, say)
    warm, cold = server.bodies[:3], server.bodies[3:]
    kinds = [body["tool_choice"]["function"]["name"] for body in warm]
    assert kinds == ["read_file", "edit_file", "run_tests"]
    assert [len(body["messages"]) for body in warm] == [2, 4, 6]
    reply, result = warm[2]["messages"][2:4]
    assert reply["tool_calls"][0]["function"]["arguments"] == '{"path": "stats.py"}'
    assert result["role"] == "tool" and result["tool_call_id"] == "c1"
    for body, again in zip(warm, cold, strict=True):
        assert body["messages"][1:] == again["messages"][1:]
        assert again["messages"][0]["content"].endswith(body["messages"][0]["content"])
    assert len({body["messages"][0]["content"] for body in cold}) == 3
    assert [turn.cached_tokens for turn in report.turns] == [80] * 3
    assert report.cached_share == 0.8 and report.first_over_cold.median > 0
    assert all(0 < turn.first_ms <= turn.total_ms for turn in report.turns)
    assert len(say.lines) == 6


def test_a_call_that_was_cut_off_is_not_sent_back(server, say):  # noqa: F811
    server.script = [piece("Well: "), *script('{"path": "st')]
    run(server, say, 2)
    reply, answer = server.bodies[1]["messages"][2:4]
    assert reply == {"role": "assistant", "content": "Well: "} and answer["role"] == "user"


def test_errors_end_it(server, say):  # noqa: F811
    server.script = [event({"error": "broken"}), b""]
    with pytest.raises(BenchError, match="broke off: broken"):
        run(server, say)


def test_figures_are_of_the_later_turns():
    turns = [
        AgentTurn("answer", 10, 0, 5, 900.0, 1900.0, 900.0),
        AgentTurn("read_file", 100, 90, 6, 10.0, 2010.0, 100.0),
        AgentTurn("answer", 200, 180, 5, 20.0, 1020.0, 100.0),
        AgentTurn("answer", 100, 90, 2, 60.0, 1060.0, 100.0),
    ]
    report = _summarize(turns, 3.0)
    assert report.first_over_cold.median == 0.2 and report.cached_share == 0.9
    assert report.tokens_per_second == {"answer": 4.0, "read_file": 3.0}
    assert report.headline() == {"first_over_cold": 0.2, "cached_share": 0.9}
    with pytest.raises(BenchError, match="two turns"):
        _summarize(turns[:1], 1.0)


def test_the_session_is_one_of_an_agent():
    first, turns = make_session()
    assert "stats.py" in first and len(turns) == 24
    names = {tool["function"]["name"] for tool in make_tools()}
    assert {turn.kind for turn in turns} == names | {"answer"}
    text = first + "".join(turn.follow_up for turn in turns) + json.dumps(make_tools())
    assert 8_000 < len(text) < 20_000  # with replies, a few thousand tokens


def test_files_grow_with_the_scale():
    short, long = (make_session(scale)[1] for scale in (1, 12))
    assert [turn.kind for turn in short] == [turn.kind for turn in long]
    sizes = [sum(len(turn.follow_up) for turn in turns) for turns in (short, long)]
    assert sizes[1] > 8 * sizes[0]
    names = [line.split()[2] for line in long[-4].follow_up.splitlines() if " def " in line]
    assert len(names) == len(set(names)) == 72, "no function twice"
