"""What llama.cpp's and other servers' users send to OpenAI's paths: honoured, refused by name, or
named in a header where it cannot change the text.
"""

import httpx2
import pytest

from draftree.core import SamplingParams
from draftree.text.grammar import FormatKind, ResponseFormat
from tests.serve.test_openai import HELLO, chat, complete, error_of

USER = HELLO["messages"][0]
BEGUN = {"role": "assistant", "content": "It is"}


def test_fields_without_effect_are_named(client):
    reply = chat(
        client, store=True, metadata={"a": "b"}, cache_prompt=True, n_keep=-1, id_slot=3, user="me"
    )
    named = {"store", "metadata", "cache_prompt", "n_keep", "id_slot"}
    assert set(reply.headers["x-draftree-ignored"].split(", ")) == named


@pytest.mark.parametrize("fields", [{"store": False}, {"metadata": {}}, {"store": None}, {}])
def test_what_says_nothing_is_not_named(client, fields):
    assert "x-draftree-ignored" not in chat(client, **fields).headers


def test_a_stream_names_them_too(client):
    reply = chat(client, stream=True, prediction={"type": "content", "content": "x"})
    assert reply.headers["x-draftree-ignored"] == "prediction"


def test_cache_control_may_stand_anywhere(client, engine):
    part = {"type": "text", "text": "hi", "cache_control": {"type": "ephemeral"}}
    message = {"role": "user", "content": [part], "cache_control": {"type": "ephemeral"}}
    assert chat(client, messages=[message], cache_control={"type": "ephemeral"}).is_success
    assert engine.calls[-1]["prompt"] == [
        {"role": "user", "content": [{"type": "text", "text": "hi"}]}
    ]


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"repeat_penalty": 1.5}, {"repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.5, "repeat_last_n": -1}, {"repetition_penalty": 1.5}),
        ({"repeat_penalty": 1.5, "repeat_last_n": 0}, {"repetition_penalty": 1.0}),
        ({"repeat_penalty": 1, "repeat_last_n": 64}, {"repetition_penalty": 1.0}),
        ({"top_k": -1}, {"top_k": 0}),
        ({"top_k": 0}, {"top_k": 0}),
        ({"typical_p": 1, "mirostat": 0, "tfs_z": 1.0, "top_n_sigma": -1, "dry_base": 1.75}, {}),
    ],
)
def test_names_of_other_servers(client, engine, fields, expected):
    assert chat(client, seed=1, temperature=0, **fields).is_success
    assert complete(client, seed=1, temperature=0, **fields).is_success
    wanted = SamplingParams(**{"seed": 1, **expected})
    assert [call["sampling"] for call in engine.calls] == [wanted, wanted]


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"repeat_penalty": 1.1, "repetition_penalty": 1.2}, "repeat_penalty"),
        ({"repeat_penalty": 1.1, "repeat_last_n": 64}, "repeat_last_n"),
        ({"top_k": -2}, "top_k"),
        ({"mirostat": 2}, "mirostat"),
        ({"typical_p": 0.9}, "typical_p"),
        ({"dry_multiplier": 0.8}, "dry_multiplier"),
        ({"ignore_eos": True}, "ignore_eos"),
        ({"max_tokens": -2}, "max_tokens"),
        ({"max_tokens": 3, "n_predict": 4}, "max_tokens"),
        ({"n_predict": 0}, "max_tokens"),
        ({"grammar": 'root ::= "a"', "json_schema": {"type": "object"}}, "grammar"),
    ],
)
def test_what_would_change_the_text_is_refused(client, engine, fields, param):
    assert error_of(chat(client, **fields), 400)["param"] == param
    assert error_of(complete(client, **fields), 400)["param"] == param
    assert engine.calls == []


@pytest.mark.parametrize(
    ("fields", "of_chat", "of_text"),
    [
        ({}, 64, 16),
        ({"max_tokens": -1}, 64, 64),
        ({"n_predict": -1}, 64, 64),
        ({"n_predict": 5}, 5, 5),
    ],
)
def test_most_tokens(client, engine, fields, of_chat, of_text):
    """Without a limit, the context's 64."""
    assert chat(client, **fields).is_success and complete(client, **fields).is_success
    assert [call["max_tokens"] for call in engine.calls] == [of_chat, of_text]


def test_thinking_is_left_out_where_a_model_cannot(client, engine):
    thinking = {"chat_template_kwargs": {"enable_thinking": True}}
    reply = chat(client, **thinking)
    assert reply.headers["x-draftree-ignored"] == "chat_template_kwargs.enable_thinking"
    engine.thinks = True
    assert "x-draftree-ignored" not in chat(client, **thinking).headers
    assert [call["thinking"] for call in engine.calls] == [None, True]


def test_a_schema_beside_json_object(client, engine):
    wanted = {"type": "json_object", "schema": {"type": "array"}}
    assert chat(client, response_format=wanted).is_success
    body = {"input": "x", "text": {"format": wanted}}
    assert client.post("/v1/responses", json=body).is_success
    by_schema = ResponseFormat(FormatKind.JSON_SCHEMA, {"type": "array"})
    nameless = {"type": "json_schema", "json_schema": {"schema": {"type": "array"}}}
    assert chat(client, response_format=nameless).is_success
    assert [call["response_format"] for call in engine.calls] == [by_schema] * 3


def test_formats_of_other_servers(client, engine):
    schema = {"type": "object"}
    for ask in (chat, complete):
        assert ask(client, grammar='root ::= "a"').is_success
        assert ask(client, json_schema=schema).is_success
    gbnf = ResponseFormat(FormatKind.GBNF, 'root ::= "a"')
    json = ResponseFormat(FormatKind.JSON_SCHEMA, schema)
    assert [call["response_format"] for call in engine.calls] == [gbnf, json] * 2


@pytest.mark.parametrize("ask", [chat, complete])
def test_a_grammar_is_followed(brief, ask):
    with httpx2.Client(base_url=brief.url, timeout=120) as client:
        reply = ask(client, grammar='root ::= "b" | "c"', temperature=1).json()["choices"][0]
        assert (reply.get("text") or reply["message"]["content"]) in ("b", "c")
        for wrong in ("root ::=" + "(" * 5000, "nothing", 'root ::= "', 'a ::= "b"\n' * 300):
            error = error_of(ask(client, grammar=wrong), 400)
            assert error["param"] == "grammar", wrong


@pytest.mark.parametrize(
    ("fields", "is_begun"),
    [
        ({}, True),
        ({"continue_final_message": True, "add_generation_prompt": False}, True),
        ({"continue_final_message": False}, False),
        ({"continue_final_message": False, "add_generation_prompt": True}, False),
    ],
)
def test_a_reply_goes_on_from_the_assistants_message(client, engine, fields, is_begun):
    assert chat(client, messages=[USER, BEGUN], **fields).is_success
    assert engine.calls[-1]["continue_final"] is is_begun


@pytest.mark.parametrize(
    ("messages", "fields"),
    [
        ([USER], {"continue_final_message": True}),
        ([USER], {"add_generation_prompt": False}),
        ([USER, BEGUN], {"add_generation_prompt": True}),
    ],
)
def test_beginnings_that_are_not_there(client, engine, messages, fields):
    assert error_of(chat(client, messages=messages, **fields), 400)["param"] == [*fields][-1]
    assert engine.calls == []


def test_a_reply_goes_on_from_one_message(client, engine):
    error = error_of(chat(client, messages=[USER, BEGUN, BEGUN]), 400)
    assert error["param"] == "messages" and "both the assistant's" in error["message"]
    assert engine.calls == []
    fields = {"continue_final_message": False}
    assert chat(client, messages=[USER, BEGUN, BEGUN], **fields).is_success


def test_a_call_is_no_beginning(client, engine):
    call = {"id": "c", "function": {"name": "add", "arguments": "{}"}}
    assert chat(client, messages=[USER, {"role": "assistant", "tool_calls": [call]}]).is_success
    assert engine.calls[-1]["continue_final"] is False


def test_any_name_of_a_model(start, engine):
    running = start(any_model=True, aliases=("other",))
    with httpx2.Client(base_url=running.url, timeout=120) as client:
        for name, told in (("gpt-4o", "fake"), ("other", "other"), ("fake", "fake")):
            reply = chat(client, model=name)
            assert reply.json()["model"] == told
            assert reply.headers.get("x-draftree-ignored") == ("model" if name != told else None)


def test_an_alias_is_the_name_where_none_was_given(start):
    with httpx2.Client(base_url=start(aliases=("short", "other")).url, timeout=120) as client:
        assert client.post("/v1/chat/completions", json={"messages": [USER]}).json()["model"] == (
            "short"
        )


def test_the_name_may_be_missing(client):
    """There is one model, whether or not other names are taken."""
    paths = {
        "/v1/chat/completions": {"messages": [USER]},
        "/v1/completions": {"prompt": "x"},
        "/v1/responses": {"input": "x"},
        "/v1/messages": {"messages": [USER], "max_tokens": 4},
    }
    for path, body in paths.items():
        reply = client.post(path, json=body)
        assert reply.json()["model"] == "fake", path
        assert "x-draftree-ignored" not in reply.headers
    assert error_of(chat(client, model="x"), 404)["code"] == "model_not_found"


@pytest.mark.parametrize("start_of_path", ["", "/v1", "/v1/v1"])
def test_paths_with_and_without_their_version(client, start_of_path):
    for path, body in (("chat/completions", HELLO), ("completions", {"prompt": "x"})):
        assert client.post(f"{start_of_path}/{path}", json=body).is_success
    assert client.get(f"{start_of_path}/models").json()["data"][0]["id"] == "fake"
    error = client.post(f"{start_of_path}/messages", json={}).json()
    assert error["type"] == "error", "not as Anthropic writes it"
