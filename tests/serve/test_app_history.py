"""Replies that SDKs send back: loops of several turns with tools, in which every reply becomes part
of the next request as it came, with all the fields that the SDK's own objects have.
"""

import gc
import json

import anthropic
import openai
import pytest

from draftree.core import FinishReason
from draftree.serve.anthropic_fields import MessagesRequest
from draftree.serve.openai_fields import ChatRequest
from draftree.serve.responses_fields import ResponsesRequest
from draftree.serve.wire import parse_body
from draftree.text.reply import DeltaKind
from tests.serve.fake import Call, Delta

SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}}
FUNCTION = {"name": "look", "description": "Looks.", "parameters": SCHEMA}
TOOL = {"type": "function", "function": FUNCTION}
QUESTION = {"role": "user", "content": "Where?"}
KNOWN = {"role", "content", "reasoning_content", "tool_calls", "tool_call_id"}


class Script:
    """A fake engine's two calls of a tool and its answer, again and again."""

    def __init__(self, engine):
        engine.max_ctx = 10**6
        self._engine = engine
        self._num_replies = 0
        self._prepare()

    def _prepare(self):
        number, self._num_replies = self._num_replies, self._num_replies + 1
        is_call = number % 3 < 2
        self._engine.finish_reason = FinishReason.TOOL_CALLS if is_call else FinishReason.STOP
        self._engine.pieces = [Delta("Hm.", DeltaKind.REASONING), Delta("Well.")]
        if is_call:
            call = Call(0, f"call_{number}", "look", '{"city": "Rome"}')
            self._engine.pieces.append(Delta(kind=DeltaKind.TOOL_CALL, tool_call=call))

    def next(self):
        """To be called between two requests."""
        self._prepare()

    def check(self):
        """What the model was shown last: twice a question and two calls, once the answer."""
        shown = self._engine.calls[-1]["prompt"]
        once = ["user", *["assistant", "tool"] * 2, "assistant"]
        assert [message["role"] for message in shown] == [*once, *once[:-1]]
        for message in shown:
            assert set(message) <= KNOWN, message
            if message["role"] == "assistant":
                assert (message["content"], message["reasoning_content"]) == ("Well.", "Hm.")
            if message["role"] == "tool":
                assert message["content"] == "Here."
        calls = [call for message in shown for call in message.get("tool_calls", ())]
        assert [call["id"] for call in calls] == [f"call_{number}" for number in (0, 1, 3, 4)]
        for call in calls:
            assert set(call) <= {"id", "type", "function", "index"}
            assert call["function"]["name"] == "look"
            assert json.loads(call["function"]["arguments"]) == {"city": "Rome"}


@pytest.fixture
def script(engine):
    return Script(engine)


@pytest.fixture
def gpt(shared, engine):
    with openai.OpenAI(base_url=f"{shared[1].url}/v1", api_key="a", max_retries=0) as client:
        yield client


@pytest.fixture
def claude(shared, engine):
    with anthropic.Anthropic(base_url=shared[1].url, api_key="a", max_retries=0) as client:
        yield client


def ask_chat(ask, script, keep):
    """Chat for two questions; ask: messages to the SDK's message; keep: what is sent back."""
    messages = []
    for _ in range(2):
        messages.append(QUESTION)
        while True:
            message = ask(messages)
            script.next()
            messages.append(keep(message))
            if not message.tool_calls:
                break
            for call in message.tool_calls:
                messages.append({"role": "tool", "tool_call_id": call.id, "content": "Here."})
    script.check()


KEEPS = [lambda message: message, lambda message: message.model_dump()]


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("way", ["create", "stream", "parse"])
def test_openai_chat(gpt, script, keep, way):
    strict = {**SCHEMA, "additionalProperties": False, "required": ["city"]}
    tool = {"type": "function", "function": {**FUNCTION, "parameters": strict, "strict": True}}

    def ask(messages):
        options = {"model": "fake", "messages": messages, "tools": [tool]}
        if way == "stream":
            with gpt.chat.completions.stream(**options) as stream:
                return stream.get_final_completion().choices[0].message
        return getattr(gpt.chat.completions, way)(**options).choices[0].message

    ask_chat(ask, script, keep)


@pytest.fixture(scope="module")
def litellm():
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")  # or it asks the network for prices
        litellm = pytest.importorskip("litellm", reason="litellm is not installed")
        gc.collect()
        gc.freeze()  # it brings a million objects, which each collection would walk through
        yield litellm


@pytest.mark.parametrize("keep", [*KEEPS, lambda message: message.json()])
@pytest.mark.parametrize("is_stream", [False, True])
@pytest.mark.parametrize("provider", ["openai", "anthropic"])
def test_litellm(shared, script, litellm, keep, is_stream, provider):
    base = f"{shared[1].url}/v1" if provider == "openai" else shared[1].url

    def ask(messages):
        options = {"model": f"{provider}/fake", "messages": messages, "tools": [TOOL]}
        reply = litellm.completion(**options, api_base=base, api_key="a", stream=is_stream)
        if is_stream:
            reply = litellm.stream_chunk_builder(list(reply), messages=messages)
        gc.collect()  # a stream that litellm leaves open would be closed inside the next request
        return reply.choices[0].message

    ask_chat(ask, script, keep)


def test_litellm_reads_the_same_in_every_way(shared, engine, litellm):
    engine.pieces = ["Hi", " there", "."]
    options = {"messages": [{"role": "user", "content": "Say hi."}], "api_key": "a"}
    openai_way = {"model": "openai/fake", "api_base": f"{shared[1].url}/v1"}
    anthropic_way = {"model": "anthropic/fake", "api_base": shared[1].url}
    for way in (openai_way, anthropic_way):
        whole = litellm.completion(**way, **options, max_tokens=12)
        chunks = litellm.completion(**way, **options, max_tokens=12, stream=True)
        text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
        assert whole.choices[0].message.content == text == "Hi there."
    with pytest.raises(litellm.BadRequestError, match="temperature"):
        litellm.completion(**openai_way, **options, temperature=3)


@pytest.mark.parametrize("keep", KEEPS)
@pytest.mark.parametrize("way", ["create", "stream", "parse"])
def test_openai_responses(gpt, script, keep, way):
    strict = {**SCHEMA, "additionalProperties": False, "required": ["city"]}
    tool = {"type": "function", **FUNCTION, "parameters": strict, "strict": True}
    items = []
    for _ in range(2):
        items.append(QUESTION)
        while True:
            options = {"model": "fake", "input": items, "tools": [tool]}
            if way == "stream":
                with gpt.responses.stream(**options) as stream:
                    reply = stream.get_final_response()
            else:
                reply = getattr(gpt.responses, way)(**options)
            script.next()
            items += [keep(item) for item in reply.output]
            calls = [item for item in reply.output if item.type == "function_call"]
            if not calls:
                break
            result = {"type": "function_call_output", "output": "Here."}
            items += [{**result, "call_id": call.call_id} for call in calls]
    script.check()


@pytest.mark.parametrize(
    "keep",
    [
        lambda message: {"role": "assistant", "content": message.content},
        lambda message: {"role": "assistant", "content": message.model_dump()["content"]},
        lambda message: message.model_dump(),
    ],
)
@pytest.mark.parametrize("is_beta", [False, True])
@pytest.mark.parametrize("is_stream", [False, True])
def test_anthropic(claude, script, keep, is_beta, is_stream):
    tool = {"name": "look", "description": "Looks.", "input_schema": SCHEMA}
    api = claude.beta.messages if is_beta else claude.messages
    messages = []
    for _ in range(2):
        messages.append(QUESTION)
        while True:
            options = {"model": "fake", "max_tokens": 99, "messages": messages, "tools": [tool]}
            if is_stream:
                with api.stream(**options) as stream:
                    message = stream.get_final_message()
            else:
                message = api.create(**options)
            script.next()
            messages.append(keep(message))
            calls = [block for block in message.content if block.type == "tool_use"]
            if not calls:
                break
            result = {"type": "tool_result", "content": "Here."}
            results = [{**result, "tool_use_id": call.id} for call in calls]
            messages.append({"role": "user", "content": results})
    script.check()


def test_replies_of_other_servers(client, engine):
    """What only they say comes back to this one when a conversation moves here."""
    annotation = {"type": "url_citation", "url_citation": {"url": "https://example.org"}}
    refused = {"role": "assistant", "content": None, "refusal": "No.", "annotations": [annotation]}
    messages = [QUESTION, refused, QUESTION]
    reply = client.post("/v1/chat/completions", json={"model": "fake", "messages": messages})
    assert reply.is_success, reply.text
    assert engine.calls[-1]["prompt"][1] == {"role": "assistant", "content": "No."}
    refusal = {"type": "refusal", "refusal": "No."}
    message = {"type": "message", "role": "assistant", "content": [refusal]}
    items = [QUESTION, message, {"type": None, **QUESTION}]
    reply = client.post("/v1/responses", json={"model": "fake", "input": items})
    assert reply.is_success, reply.text
    assert engine.calls[-1]["prompt"][1] == {"role": "assistant", "content": "No."}
    citation = {"type": "char_location", "cited_text": "x", "document_index": 0}
    block = {"type": "text", "text": "No.", "citations": [citation]}
    turns = [QUESTION, {"role": "assistant", "content": [block]}, QUESTION]
    body = {"model": "fake", "max_tokens": 9, "messages": turns}
    reply = client.post("/v1/messages", json=body)
    assert reply.is_success, reply.text
    assert engine.calls[-1]["prompt"][1] == {"role": "assistant", "content": "No."}


@pytest.mark.parametrize("empty", [None, "", [], {}])
@pytest.mark.parametrize(
    ("model", "body"),
    [
        (ChatRequest, {"messages": [QUESTION]}),
        (ResponsesRequest, {"input": [QUESTION]}),
        (MessagesRequest, {"messages": [QUESTION], "max_tokens": 1}),
    ],
)
def test_what_is_empty_is_not_unknown(model, body, empty):
    """In a request and in a message of it, unknown fields and those that are refused."""
    (field,) = {"messages", "input"} & set(body)
    message = {**QUESTION, "role": "assistant", "new": empty}
    if model is ChatRequest:
        message |= {"audio": empty, "images": empty, "function_call": empty}
    body = {**body, "model": "fake", "new": empty, field: [message, QUESTION]}
    assert getattr(parse_body(model, json.dumps(body).encode()), field)[0].content == "Where?"
