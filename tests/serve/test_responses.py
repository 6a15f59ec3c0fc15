"""Requests of the Responses API become calls on the engine, and replies what its clients expect."""

import json
import typing

import pytest
from openai.types.responses import response_create_params

from draftree.core import FinishReason
from draftree.serve.responses_fields import ResponsesRequest
from draftree.text.grammar import FormatKind, ResponseFormat
from draftree.text.reply import DeltaKind
from tests.serve import fake
from tests.serve.fake import Call, Delta
from tests.serve.test_anthropic_reply import PIECES
from tests.serve.test_openai import error_of
from tests.serve.test_openai_reply import SCORES

ADD = {"type": "function", "name": "add", "parameters": {"type": "object"}, "strict": False}
USAGE = {
    "input_tokens": 3,
    "input_tokens_details": {"cached_tokens": 0, "cache_write_tokens": 0},
    "output_tokens": 2,
    "output_tokens_details": {"reasoning_tokens": 0},
    "total_tokens": 5,
}


def ask(client, **fields):
    return client.post("/v1/responses", json={"model": "fake", "input": "hi", **fields})


def events(response):
    """The events of a stream, named twice and numbered."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    *found, rest = response.text.split("\n\n")
    assert rest == ""
    parsed = []
    for number, one in enumerate(found):
        name, data = one.split("\n")
        parsed.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {parsed[-1]['type']}"
        assert parsed[-1]["sequence_number"] == number
    return parsed


def without_ids(items):
    assert all(item["id"].split("_")[0] in ("msg", "rs", "fc") for item in items)
    return [{key: value for key, value in item.items() if key != "id"} for item in items]


def message(text, status="completed"):
    part = {"type": "output_text", "text": text, "annotations": [], "logprobs": []}
    return {"type": "message", "role": "assistant", "status": status, "content": [part]}


def function_call(call_id, arguments, status="completed", **members):
    call = {"type": "function_call", "call_id": call_id, "name": "add", "status": status}
    return {**call, "arguments": arguments, **members}


def test_whole_response(client):
    reply = ask(client, instructions="Be brief.", metadata={"a": "b"}, tools=[ADD]).json()
    assert reply["id"].startswith("resp_")
    assert without_ids(reply["output"]) == [message("Hello there")]
    assert reply["usage"] == USAGE
    assert (reply["object"], reply["status"], reply["model"]) == ("response", "completed", "fake")
    assert (reply["error"], reply["incomplete_details"]) == (None, None)
    assert (reply["instructions"], reply["metadata"]) == ("Be brief.", {"a": "b"})
    assert (reply["tools"], reply["tool_choice"]) == ([ADD], "auto")
    assert (reply["temperature"], reply["top_p"], reply["store"]) == (1.0, 1.0, False)
    assert reply["text"] == {"format": {"type": "text"}}
    assert reply["parallel_tool_calls"] is True


def test_stream(client):
    found = events(ask(client, stream=True))
    names = [e["type"].removeprefix("response.") for e in found]
    deltas = [e for e in found if e["type"] == "response.output_text.delta"]
    assert names == [
        "created",
        "in_progress",
        "output_item.added",
        "content_part.added",
        *["output_text.delta"] * len(deltas),
        "output_text.done",
        "content_part.done",
        "output_item.done",
        "completed",
    ]
    assert "".join(e["delta"] for e in deltas) == "Hello there"
    first, last = found[0]["response"], found[-1]["response"]
    assert (first["status"], first["output"], first["usage"]) == ("in_progress", [], None)
    assert first["id"] == last["id"]
    assert without_ids(last["output"]) == [message("Hello there")]
    assert last["usage"] == USAGE
    added, part = found[2], found[3]
    assert added["item"]["content"] == [] and added["item"]["status"] == "in_progress"
    assert part["part"] == {**message("")["content"][0]}
    assert {e["item_id"] for e in found if "item_id" in e} == {last["output"][0]["id"]}
    assert found[-4]["text"] == "Hello there"
    assert found[-2]["item"] == last["output"][0]


OUTPUT = [
    {
        "type": "reasoning",
        "status": "completed",
        "summary": [],
        "content": [{"type": "reasoning_text", "text": "Let me see"}],
    },
    message("Adding."),
    function_call("call_1", '{"a": 1}'),
    function_call("call_2", "{}"),
    message("Done."),
]


@pytest.mark.parametrize("round_s", [0.0, 0.03])
def test_reasoning_and_calls_in_a_stream(client, engine, round_s):
    engine.finish_reason, engine.pieces = FinishReason.TOOL_CALLS, PIECES
    engine.round_s = round_s
    found = events(ask(client, tools=[ADD], stream=True))
    response = found[-1]["response"]
    assert response["status"] == "completed"
    assert without_ids(response["output"]) == OUTPUT
    assert response["usage"]["output_tokens_details"] == {"reasoning_tokens": 2}
    done = [e for e in found if e["type"] == "response.output_item.done"]
    assert [e["item"] for e in done] == response["output"]
    assert [e["output_index"] for e in done] == [0, 1, 2, 3, 4]
    texts = [""] * 5
    for one in found:
        if one["type"].endswith(".delta"):
            texts[one["output_index"]] += one["delta"]
    assert texts == ["Let me see", "Adding.", '{"a": 1}', "{}", "Done."]
    (arguments, _) = (e for e in found if e["type"] == "response.function_call_arguments.done")
    assert (arguments["arguments"], arguments["output_index"]) == ('{"a": 1}', 2)
    added = [e["item"] for e in found if e["type"] == "response.output_item.added"]
    assert without_ids(added)[2] == function_call("call_1", "", "in_progress")
    kinds = {e["type"] for e in found if e.get("output_index") == 0}
    assert "response.reasoning_text.delta" in kinds and "response.reasoning_text.done" in kinds


def test_reasoning_and_calls_in_one_piece(client, engine):
    engine.finish_reason, engine.pieces = FinishReason.TOOL_CALLS, PIECES
    reply = ask(client, tools=[ADD]).json()
    expected = [OUTPUT[0], message("Adding.Done."), *OUTPUT[2:4]]
    assert without_ids(reply["output"]) == expected
    assert reply["status"] == "completed"


@pytest.mark.parametrize("is_stream", [False, True])
def test_what_is_cut_short_is_incomplete(client, engine, is_stream):
    engine.finish_reason = FinishReason.LENGTH
    response = ask(client, max_output_tokens=2, stream=is_stream)
    if is_stream:
        last = events(response)[-1]
        assert last["type"] == "response.incomplete"
        reply = last["response"]
    else:
        reply = response.json()
    assert reply["status"] == "incomplete"
    assert reply["incomplete_details"] == {"reason": "max_output_tokens"}
    assert without_ids(reply["output"]) == [message("Hello there", "incomplete")]
    assert engine.calls[0]["max_tokens"] == 2


def test_functions_in_namespaces(client, engine):
    call = Call(0, "call_1", "maths.add", "{}")
    engine.pieces = [Delta(kind=DeltaKind.TOOL_CALL, tool_call=call)]
    engine.finish_reason = FinishReason.TOOL_CALLS
    space = {"type": "namespace", "name": "maths", "description": "Sums.", "tools": [ADD]}
    found = events(ask(client, tools=[ADD, space, {"type": "web_search", "a": 1}], stream=True))
    expected = function_call("call_1", "{}", namespace="maths")
    assert without_ids(found[-1]["response"]["output"]) == [expected]
    first, second = (tool["function"] for tool in engine.calls[0]["tools"])
    assert (first["name"], second["name"]) == ("add", "maths.add")
    assert second["description"] == "Sums."
    back = {"type": "function_call", "call_id": "c", "name": "add", "arguments": "{}"}
    choice = {"type": "function", "name": "add", "namespace": "maths"}
    fields = {"input": [{**back, "namespace": "maths"}], "tools": [space], "tool_choice": choice}
    assert ask(client, **fields).is_success
    asked = engine.calls[-1]
    assert asked["prompt"][0]["tool_calls"][0]["function"]["name"] == "maths.add"
    assert asked["tool_choice"] == {"type": "function", "function": {"name": "maths.add"}}


def test_fields_reach_the_engine(client, engine):
    engine.max_ctx = 1000
    text = {"type": "input_text", "text": "And?"}
    response = ask(
        client,
        instructions="Be brief.",
        input=[
            {"type": "message", "id": "m", "role": "developer", "content": [text, text]},
            {"role": "user", "content": "hi"},
            {
                "type": "reasoning",
                "id": "rs_1",
                "summary": [{"type": "summary_text", "text": "left out"}],
                "content": [{"type": "reasoning_text", "text": "Hm."}],
                "encrypted_content": None,
            },
            {
                "type": "message",
                "role": "assistant",
                "status": "completed",
                "content": [{"type": "output_text", "text": "Adding.", "annotations": []}],
            },
            {"type": "function_call", "call_id": "c1", "name": "add", "arguments": "{}"},
            {"type": "function_call_output", "call_id": "c1", "output": [text]},
            {"type": "function_call_output", "call_id": "c2", "output": "5"},
        ],
        max_output_tokens=99,
        temperature=0.25,
        top_p=0.5,
        top_logprobs=2,
        include=["message.output_text.logprobs", "reasoning.encrypted_content"],
        tools=[{**ADD, "description": "Adds."}],
        tool_choice="required",
        parallel_tool_calls=False,
        text={"format": {"type": "json_schema", "name": "x", "schema": {"a": 1}, "strict": True}},
        reasoning={"effort": "low", "summary": "auto"},
        store=False,
        client_metadata={"a": "b"},
        prompt_cache_key="k",
        user="me",
    )
    assert response.is_success, response.text
    call = engine.calls[0]
    sampling = call.pop("sampling")
    assert (sampling.temperature, sampling.top_p) == (0.25, 0.5)
    function = {"name": "add", "arguments": "{}"}
    tool = {"name": "add", "description": "Adds.", "parameters": {"type": "object"}}
    assert call == {
        "prompt": [
            {"role": "system", "content": "Be brief.\nAnd?\nAnd?"},
            {"role": "user", "content": "hi"},
            {
                "role": "assistant",
                "content": "Adding.",
                "reasoning_content": "Hm.",
                "tool_calls": [{"id": "c1", "type": "function", "function": function}],
            },
            {"role": "tool", "tool_call_id": "c1", "content": "And?"},
            {"role": "tool", "tool_call_id": "c2", "content": "5"},
        ],
        "max_tokens": 99,
        "tools": [{"type": "function", "function": {**tool, "strict": False}}],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "response_format": ResponseFormat(FormatKind.JSON_SCHEMA, {"a": 1}),
        "thinking": None,
        "thinking_budget": 1024,
        "logprobs": 2,
    }


def test_defaults(client, engine):
    ask(client, text={"format": {"type": "json_object"}}, reasoning={"effort": "none"})
    call = engine.calls[0]
    assert call["prompt"] == [{"role": "user", "content": "hi"}]
    assert (call["max_tokens"], call["tools"], call["logprobs"]) == (engine.max_ctx, None, None)
    assert (call["thinking"], call["thinking_budget"]) == (False, None)
    assert call["response_format"] == ResponseFormat(FormatKind.JSON_OBJECT)


@pytest.mark.parametrize("is_stream", [False, True])
def test_logprobs(client, engine, is_stream):
    engine.pieces = [Delta("Hel", logprobs=SCORES)]
    fields = {"include": ["message.output_text.logprobs"], "top_logprobs": 2}
    response = ask(client, stream=is_stream, **fields)
    reply = events(response)[-1]["response"] if is_stream else response.json()
    scores = reply["output"][0]["content"][0]["logprobs"]
    assert [score["logprob"] for score in scores] == [-0.5, -0.25]
    assert scores[0]["top_logprobs"][1]["token"] == "By"
    if is_stream:
        deltas = [e for e in events(response) if e["type"].endswith("text.delta")]
        assert deltas[0]["logprobs"] == scores


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"foo": 1}, "foo"),
        ({"input": []}, "input"),
        ({"input": [{"type": "item_reference", "id": "x"}]}, "input[0]"),
        ({"input": [{"type": "custom_tool_call", "name": "x"}]}, "input[0]"),
        ({"input": [3]}, "input[0]"),
        (
            {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]},
            "input[0].content[0]",
        ),
        ({"input": [{"role": "user", "content": "a", "foo": 1}]}, "input[0].foo"),
        ({"tools": [{"type": "custom", "name": "x"}]}, "tools[0]"),
        ({"tools": [{"type": "file_search", "vector_store_ids": []}]}, "tools[0]"),
        ({"tools": [ADD, ADD]}, "tools"),
        ({"tool_choice": "required"}, "tool_choice"),
        ({"tools": [ADD], "tool_choice": {"type": "function", "name": "x"}}, "tool_choice"),
        ({"tools": [{"type": "web_search"}], "tool_choice": "required"}, "tool_choice"),
        ({"top_logprobs": 2}, "top_logprobs"),
        ({"stream_options": {"include_obfuscation": False}}, "stream_options"),
        ({"include": ["file_search_call.results"]}, "include[0]"),
        ({"text": {"verbosity": "low"}}, "text.verbosity"),
        ({"text": {"format": {"type": "xml"}}}, "text.format"),
        ({"previous_response_id": "resp_1"}, "previous_response_id"),
        ({"conversation": "conv_1"}, "conversation"),
        ({"background": True}, "background"),
        ({"max_output_tokens": 0}, "max_output_tokens"),
    ],
)
def test_what_is_refused_is_named(client, engine, fields, param):
    error = error_of(ask(client, **fields), 400)
    assert error["param"] == param
    assert engine.calls == []


def test_what_cannot_change_the_text_is_taken_and_named(client):
    fields = {"store": True, "truncation": "auto", "max_tool_calls": 3, "service_tier": "flex"}
    reply = ask(client, **fields)
    assert reply.headers["x-draftree-ignored"] == "store, service_tier, truncation, max_tool_calls"
    assert reply.json()["store"] is False


def test_max_tokens_is_another_name(client, engine):
    assert ask(client, max_tokens=5).json()["max_output_tokens"] == 5
    assert engine.calls[-1]["max_tokens"] == 5
    error = error_of(ask(client, max_tokens=5, max_output_tokens=6), 400)
    assert error["param"] == "max_tokens"


def test_other_errors(client):
    assert error_of(ask(client, model="x"), 404)["code"] == "model_not_found"
    error = error_of(ask(client, input="x" * 100), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "input")


def test_a_stream_that_breaks_off_says_so(start, engine):
    import httpx2

    engine.pieces = ["Hel", fake.Broken("secret")]
    engine.round_s = 0.03
    body = {"model": "fake", "input": "hi", "stream": True}
    *_, last = events(httpx2.post(f"{start().url}/v1/responses", json=body))
    assert last["type"] == "response.failed"
    assert last["response"]["status"] == "failed"
    assert last["response"]["error"]["code"] == "engine_failure"


@pytest.mark.parametrize("is_stream", [False, True])
def test_statistics_when_asked(client, is_stream):
    response = ask(client, stream=is_stream, draftree={"stats": True})
    reply = events(response)[-1]["response"] if is_stream else response.json()
    assert reply["usage"]["draftree"]["rounds"] == 2


def test_every_field_of_the_sdk_is_known():
    hints = typing.get_type_hints(response_create_params.ResponseCreateParamsBase)
    assert set(hints) - set(ResponsesRequest.model_fields) == set()


def test_compression_is_prefetched_by_request(client, engine):
    assert ask(client, draftree={"compress": "auto", "compress_keep": "auto"}).status_code == 200
    assert (engine.calls[-1]["compress"], engine.calls[-1]["compress_keep"]) == ("auto", "auto")
    assert ask(client, draftree={"compress": "on"}).status_code == 400
