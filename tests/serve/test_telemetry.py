"""llama.cpp's `timings` and `prompt_progress`, in chats, completions and responses that ask."""

import json
from contextlib import closing

import httpx2
import pytest

from draftree.chat import Engine
from draftree.core import RoundStats, Usage
from draftree.serve.observed import ObservedCall
from draftree.serve.openai_reply import ChatWire, ReplyOptions
from draftree.serve.telemetry import TelemetryWire, measure
from tests.tiny import tiny_path

MESSAGES = [{"role": "user", "content": "Tell me about the sea. " * 20}]
ASKS = {
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 6},
    "/v1/completions": {"prompt": "The sea is a place. " * 20, "max_tokens": 6},
    "/v1/responses": {"input": MESSAGES, "max_output_tokens": 6},
}
every_api = pytest.mark.parametrize("path", ASKS)


def read_events(url, path, **fields):
    body = {**ASKS[path], "temperature": 0, "stream": True, **fields}
    with httpx2.stream("POST", f"{url}{path}", json=body, timeout=120) as response:
        assert response.status_code == 200, response.read()
        lines = [line for line in response.iter_lines() if line.startswith("data: {")]
    return [json.loads(line.removeprefix("data: ")) for line in lines]


@every_api
def test_nobody_is_told_who_does_not_ask(brief, path):
    told = [{"timings", "prompt_progress"} & {*event} for event in read_events(brief.url, path)]
    assert told and not any(told)


@every_api
def test_timings_grow_with_the_reply(brief, path):
    events = read_events(brief.url, path, timings_per_token=True)
    counts = [event["timings"]["predicted_n"] for event in events if "timings" in event]
    assert counts == sorted(counts)
    last = events[-1]["timings"]
    assert 1 <= last["predicted_n"] <= 6
    assert last["prompt_n"] + last["cache_n"] > 20
    assert last["predicted_per_second"] > 0 and last["predicted_per_token_ms"] > 0


@every_api
def test_a_whole_reply_has_them_too(brief, path):
    body = {**ASKS[path], "timings_per_token": True}
    reply = httpx2.post(f"{brief.url}{path}", json=body, timeout=120).json()
    assert reply["timings"]["predicted_n"] >= 1


@every_api
def test_progress_begins_with_the_cache_and_ends_with_the_prompt(brief, path):
    for _ in range(2):  # the second time, from the cache
        events = read_events(brief.url, path, return_progress=True)
        told = [event["prompt_progress"] for event in events if "prompt_progress" in event]
        assert told[0]["processed"] == told[0]["cache"]
        assert told[-1]["processed"] == told[-1]["total"] > 20
        assert all(event.get("choices", []) == [] for event in events if "prompt_progress" in event)
    assert told[0]["cache"] > 0


def test_progress_is_told_while_a_prompt_is_read():
    wire = ChatWire(ReplyOptions("fake", 1, "fp"))
    told = TelemetryWire(wire, wire, [], has_timings=False, has_progress=True)
    usage = Usage(prompt_tokens=90, prefill_ms=12.4)
    assert told.progress(usage) == ""  # nothing is known yet
    usage.cached_tokens, usage.read_tokens = 10, 40
    events = [json.loads(line[6:]) for line in told.progress(usage).split("\n\n") if line]
    assert [event["prompt_progress"]["processed"] for event in events] == [10, 40]
    assert told.progress(usage) == ""  # no news
    usage.read_tokens = 80
    assert '"processed":80' in told.progress(usage)
    (last,) = [line for line in told.progress(usage, is_read=True).split("\n\n") if line]
    assert json.loads(last[6:])["prompt_progress"] == {
        "total": 90,
        "cache": 10,
        "processed": 90,
        "time_ms": 12,
    }


def test_no_chunk_of_a_prompt_is_left_out_however_fast_it_was_read():
    wire, call = ChatWire(ReplyOptions("fake", 1, "fp")), ObservedCall(lambda engine: engine)
    told = TelemetryWire(wire, wire, [call], has_timings=False, has_progress=True)
    call.reads = [64, 128, 139]
    usage = Usage(prompt_tokens=140, read_tokens=139)
    lines = (told.progress(usage) + told.progress(usage, is_read=True)).split("\n\n")
    events = [json.loads(line[6:]) for line in lines if line]
    assert [event["prompt_progress"]["processed"] for event in events] == [0, 64, 128, 140]


def test_chunks_are_counted_while_they_are_read():
    call = ObservedCall(lambda engine: engine.complete("a b c d " * 40, max_tokens=1))
    with closing(Engine.open(str(tiny_path("qwen3")), chunk=70, draft="none")) as engine:
        list(call(engine))
    assert call.reads[:2] == [70, 140] and call.reads == sorted(call.reads)


def test_timings_of_several_replies_are_sums():
    rounds = RoundStats(num_rounds=2, num_drafted=9, num_accepted=4)
    one = Usage(8, 3, 6, prefill_ms=10.0, decode_ms=30.0, rounds=rounds)
    found = measure([one, Usage()])
    assert (found["cache_n"], found["prompt_n"], found["prompt_per_second"]) == (3, 5, 500)
    assert (found["predicted_per_token_ms"], found["predicted_per_second"]) == (5, 200)
    assert (found["draft_n"], found["draft_n_accepted"]) == (9, 4)
    assert measure([Usage()])["prompt_per_second"] == 0 and "draft_n" not in measure([Usage()])
