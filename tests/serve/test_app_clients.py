"""Clients as people have them: SDKs against the real server, and command lines where installed.

The command lines run with a home of their own and see nothing of the tester's. With the fake engine
they also call a tool, which no small model does reliably.
"""

import json
import os
import shutil
import subprocess

import anthropic
import openai
import pydantic
import pytest

from draftree.core import FinishReason
from draftree.text.reply import DeltaKind
from tests.needs import needs
from tests.serve.conftest import wait_for
from tests.serve.fake import Call, Delta
from tests.serve.process import MODEL, ROOT, read_metric

PARIS = [{"role": "user", "content": "What is the weather in Paris?"}]
SCHEMA = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
WEATHER = {"name": "get_weather", "description": "The weather of a city.", "input_schema": SCHEMA}
FUNCTION = {"type": "function", "name": "get_weather", "parameters": SCHEMA, "strict": True}


@pytest.fixture(scope="module")
def claude(server):
    with anthropic.Anthropic(base_url=server.url, api_key="one", max_retries=0) as client:
        yield client


@pytest.fixture(scope="module")
def gpt(server):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="one", max_retries=0) as client:
        yield client


def test_anthropic_message_and_stream(claude):
    options = {"model": MODEL, "max_tokens": 16, "messages": PARIS, "system": "Be brief."}
    whole = claude.messages.create(**options)
    with claude.messages.stream(**options) as stream:
        text = "".join(stream.text_stream)
        last = stream.get_final_message()
    assert whole.content[0].text == text == last.content[0].text != ""
    assert whole.stop_reason == last.stop_reason == "max_tokens"
    assert whole.usage.output_tokens == last.usage.output_tokens == 16
    usage = last.usage
    num_prompt = usage.input_tokens + usage.cache_read_input_tokens
    assert num_prompt == whole.usage.input_tokens + whole.usage.cache_read_input_tokens
    assert usage.cache_read_input_tokens > 0
    counted = claude.messages.count_tokens(model=MODEL, messages=PARIS, system="Be brief.")
    assert counted.input_tokens == num_prompt


def test_requests_have_ids(claude, gpt):
    """Where each SDK looks for them, and the same in replies, streams and errors."""
    options = {"model": MODEL, "max_tokens": 2, "messages": PARIS}
    ids = [claude.messages.create(**options)._request_id]
    ids.append(gpt.chat.completions.create(**options)._request_id)
    ids.append(gpt.responses.create(model=MODEL, input="hi", max_output_tokens=2)._request_id)
    with claude.messages.stream(**options) as stream:
        ids.append(stream.request_id)
    with pytest.raises(anthropic.NotFoundError) as caught:
        claude.messages.create(**{**options, "model": "other"})
    ids.append(caught.value.request_id)
    with pytest.raises(openai.NotFoundError) as refused:
        gpt.chat.completions.create(**{**options, "model": "other"})
    ids.append(refused.value.request_id)
    assert all(each.startswith("req_") for each in ids)
    assert len(set(ids)) == len(ids)


def test_openai_tools_and_structured_output(gpt):
    options = {"model": MODEL, "messages": PARIS, "max_tokens": 64}
    function = {"name": "get_weather", "parameters": SCHEMA, "strict": True}
    choice = {"type": "function", "function": {"name": "get_weather"}}
    called = options | {
        "tools": [{"type": "function", "function": function}],
        "tool_choice": choice,
    }
    whole = gpt.chat.completions.create(**called, parallel_tool_calls=False).choices[0]
    (call,) = whole.message.tool_calls
    assert (whole.finish_reason, call.function.name) == ("tool_calls", "get_weather")
    assert isinstance(json.loads(call.function.arguments)["city"], str)
    with gpt.chat.completions.stream(**called, parallel_tool_calls=False) as stream:
        streamed = stream.get_final_completion().choices[0].message.tool_calls[0]
    assert streamed.function.arguments == call.function.arguments
    result = {"role": "tool", "tool_call_id": call.id, "content": "Rain."}
    messages = [*PARIS, {"role": "assistant", "tool_calls": [call.model_dump()]}, result]
    answer = gpt.chat.completions.create(**{**called, "messages": messages, "tool_choice": "none"})
    assert answer.choices[0].message.content

    class City(pydantic.BaseModel):
        name: str
        is_large: bool

    parsed = gpt.chat.completions.parse(**options, response_format=City)
    assert isinstance(parsed.choices[0].message.parsed, City)


def test_anthropic_stop_sequence(claude):
    options = {"model": MODEL, "max_tokens": 16, "messages": PARIS}
    text = claude.messages.create(**options).content[0].text
    word = text.split()[2]
    reply = claude.messages.create(**options, stop_sequences=["#####", word])
    assert (reply.stop_reason, reply.stop_sequence) == ("stop_sequence", word)
    assert reply.content[0].text == text[: text.index(word)]


def test_anthropic_tools(claude):
    options = {"model": MODEL, "max_tokens": 64, "tools": [WEATHER]}
    single = {"disable_parallel_tool_use": True}
    choice = {"type": "tool", "name": "get_weather", **single}
    reply = claude.messages.create(messages=PARIS, tool_choice=choice, **options)
    (block,) = reply.content
    assert (reply.stop_reason, block.type, block.name) == ("tool_use", "tool_use", "get_weather")
    assert isinstance(block.input["city"], str)
    choice = {"type": "any", **single}
    with claude.messages.stream(messages=PARIS, tool_choice=choice, **options) as stream:
        kinds = [event.type for event in stream]
        assert stream.get_final_message().content[0].input == block.input
    assert "input_json" in kinds
    result = {"type": "tool_result", "tool_use_id": block.id, "content": "Rain."}
    messages = [
        *PARIS,
        {"role": "assistant", "content": reply.content},
        {"role": "user", "content": [result]},
    ]
    none = {"type": "none"}
    answer = claude.messages.create(messages=messages, tool_choice=none, **options)
    assert answer.content[0].type == "text"


def test_anthropic_structured_output(claude):
    output = {"format": {"type": "json_schema", "schema": {"enum": ["red", "green"]}}}
    reply = claude.messages.create(model=MODEL, max_tokens=16, messages=PARIS, output_config=output)
    assert json.loads(reply.content[0].text) in ("red", "green")


def test_anthropic_errors(claude, server):
    options = {"model": MODEL, "max_tokens": 4, "messages": PARIS}
    with pytest.raises(anthropic.NotFoundError, match="There is no model 'other'"):
        claude.messages.create(**{**options, "model": "other"})
    with pytest.raises(anthropic.BadRequestError, match="Unknown field: mood") as caught:
        claude.messages.create(**options, extra_body={"mood": "good"})
    assert caught.value.body["error"]["type"] == "invalid_request_error"
    with pytest.raises(anthropic.BadRequestError, match="prompt is too long"):
        claude.messages.create(
            **{**options, "messages": [{"role": "user", "content": "a b " * 4000}]}
        )
    image = {"type": "image", "source": {"type": "url", "url": "https://example.org/a.png"}}
    with pytest.raises(anthropic.BadRequestError, match="'image'"):
        claude.messages.create(**{**options, "messages": [{"role": "user", "content": [image]}]})
    thinking = {"type": "enabled", "budget_tokens": 2}  # which this model cannot
    assert claude.messages.create(**options, thinking=thinking).content[0].type == "text"
    bearer = anthropic.Anthropic(base_url=server.url, auth_token="one", max_retries=0)
    wrong = anthropic.Anthropic(base_url=server.url, api_key="wrong", max_retries=0)
    with bearer, wrong:
        assert bearer.messages.create(**options).content
        with pytest.raises(anthropic.AuthenticationError):
            wrong.messages.create(**options)


def test_leaving_an_anthropic_stream_ends_the_reply(claude, server):
    cancelled = read_metric(server, "draftree_cancelled_total")
    story = [{"role": "user", "content": "Tell me a long story about a tree."}]
    stream = claude.messages.create(model=MODEL, max_tokens=1500, messages=story, stream=True)
    for event in stream:
        if event.type == "content_block_delta":
            break
    stream.close()
    wait_for(lambda: read_metric(server, "draftree_cancelled_total") == cancelled + 1, 5)


def test_responses_and_their_stream(gpt):
    options = {"model": MODEL, "input": "Say hi.", "instructions": "Be brief."}
    whole = gpt.responses.create(**options)
    with gpt.responses.stream(**options) as stream:
        text = "".join(
            event.delta for event in stream if event.type == "response.output_text.delta"
        )
        last = stream.get_final_response()
    assert whole.output_text == text == last.output_text != ""
    assert whole.status == last.status == "completed"
    assert whole.usage.output_tokens == last.usage.output_tokens
    cut = gpt.responses.create(**options, max_output_tokens=2)
    assert (cut.status, cut.incomplete_details.reason) == ("incomplete", "max_output_tokens")


def test_responses_tools(gpt):
    question = [{"role": "user", "content": "What is the weather in Paris?"}]
    options = {"model": MODEL, "tools": [FUNCTION], "max_output_tokens": 64}
    reply = gpt.responses.create(
        input=question, tool_choice="required", parallel_tool_calls=False, **options
    )
    (call,) = reply.output
    assert (call.type, call.name) == ("function_call", "get_weather")
    assert isinstance(json.loads(call.arguments)["city"], str)
    result = {"type": "function_call_output", "call_id": call.call_id, "output": "Rain."}
    answer = gpt.responses.create(
        input=[*question, *reply.output, result], tool_choice="none", **options
    )
    assert answer.output[0].type == "message"


def test_responses_structured_output(gpt):
    class City(pydantic.BaseModel):
        name: str
        is_large: bool

    reply = gpt.responses.parse(model=MODEL, input="Describe Paris.", text_format=City)
    assert isinstance(reply.output_parsed, City)


def test_responses_errors(gpt):
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(model=MODEL, input="hi", previous_response_id="resp_1")
    assert caught.value.param == "previous_response_id"
    with pytest.raises(openai.BadRequestError) as caught:
        gpt.responses.create(model=MODEL, input="a b " * 4000)
    assert (caught.value.code, caught.value.param) == ("context_length_exceeded", "input")


def find_command(name):
    """Installed for everyone, or by npm in the repository's folder."""
    local = ROOT / "node_modules" / ".bin" / name
    return shutil.which(name) or (str(local) if local.exists() else None)


def needs_command(name):
    return needs(f"the command {name} (npm has it)", find_command(name) is not None)


def run(command, home, **variables):
    """The command's output; it must succeed."""
    (home / "work").mkdir(exist_ok=True)
    result = subprocess.run(
        command,
        cwd=home / "work",
        env={"HOME": str(home), "PATH": os.environ["PATH"], **variables},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert result.returncode == 0, result.stdout[-2000:] + result.stderr[-2000:]
    return result.stdout.strip()


def run_claude(url, home, model, *arguments):
    variables = {
        "ANTHROPIC_BASE_URL": url,
        "ANTHROPIC_AUTH_TOKEN": "one",
        "ANTHROPIC_MODEL": model,
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
    }
    return run([find_command("claude"), "-p", *arguments], home, **variables)


def run_codex(url, home, model, *arguments):
    (home / ".codex").mkdir(exist_ok=True)
    (home / "instructions.md").write_text("You are a helpful assistant.")
    (home / ".codex" / "config.toml").write_text(
        f"""
        model = "{model}"
        model_provider = "draftree"
        model_instructions_file = "{home}/instructions.md"
        check_for_update_on_startup = false
        [analytics]
        enabled = false
        [model_providers.draftree]
        name = "draftree"
        base_url = "{url}/v1"
        wire_api = "responses"
        env_key = "DRAFTREE_API_KEY"
        """
    )
    command = [find_command("codex"), "exec", "--skip-git-repo-check", *arguments]
    return run(command, home, DRAFTREE_API_KEY="one")


@needs_command("claude")
def test_claude_code_answers(server, tmp_path):
    tokens = read_metric(server, "draftree_completion_tokens_total")
    small = ("--system-prompt", "You are a helpful assistant.", "--tools", "")
    assert run_claude(server.url, tmp_path, MODEL, "Say hi", *small)
    assert read_metric(server, "draftree_completion_tokens_total") > tokens


@needs_command("claude")
def test_claude_code_with_all_its_tools_calls_one(start, engine, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "note.txt").write_text("The word is marmalade.\n")
    call_a_tool(engine, "Read", {"file_path": str(tmp_path / "work" / "note.txt")})
    assert run_claude(start().url, tmp_path, "fake", "What is the word?") == "It is marmalade."
    first, second = engine.calls[-2:]
    names = {tool["function"]["name"] for tool in first["tools"]}
    assert {"Read", "Write", "Bash"} <= names
    *_, said, result = second["prompt"]
    assert said["tool_calls"][0]["function"]["name"] == "Read"
    assert said["reasoning_content"] == "Let me look."
    assert result["role"] == "tool" and "The word is marmalade." in result["content"]


@needs_command("codex")
def test_codex_answers(server, tmp_path):
    schema = {
        "type": "object",
        "properties": {"greeting": {"type": "string", "maxLength": 20}},
        "required": ["greeting"],
        "additionalProperties": False,
    }
    (tmp_path / "schema.json").write_text(json.dumps(schema))
    features = ("shell_tool", "unified_exec", "multi_agent", "goals", "plugins", "apps")
    options = [word for name in features for word in ("--disable", name)]
    options += ["--output-schema", str(tmp_path / "schema.json")]
    said = run_codex(server.url, tmp_path, MODEL, *options, "Say hi")
    assert list(json.loads(said)) == ["greeting"]


@needs_command("codex")
def test_codex_with_all_its_tools_calls_one(start, engine, tmp_path):
    call_a_tool(engine, "exec_command", {"cmd": "echo marmalade"})
    assert run_codex(start().url, tmp_path, "fake", "What is the word?") == "It is marmalade."
    first, second = engine.calls[-2:]
    names = {tool["function"]["name"] for tool in first["tools"]}
    assert "exec_command" in names
    assert any("." in name for name in names), "no function in a namespace"
    *_, said, result = second["prompt"]
    assert said["tool_calls"][0]["function"]["name"] == "exec_command"
    assert said["reasoning_content"] == "Let me look."
    assert (result["role"], result["tool_call_id"]) == ("tool", "call_1")


@needs_command("opencode")
def test_opencode_with_all_its_tools_calls_one(start, engine, tmp_path):
    (tmp_path / "work").mkdir()
    (tmp_path / "work" / "note.txt").write_text("The word is marmalade.\n")
    call_a_tool(engine, "read", {"filePath": str(tmp_path / "work" / "note.txt")})
    server = {"baseURL": f"{start().url}/v1", "apiKey": "one"}
    provider = {"npm": "@ai-sdk/openai-compatible", "options": server, "models": {"fake": {}}}
    config = {"provider": {"draftree": provider}, "autoupdate": False, "share": "disabled"}
    (tmp_path / "work" / "opencode.json").write_text(json.dumps(config))
    command = [find_command("opencode"), "run", "-m", "draftree/fake", "--title", "x"]
    assert "It is marmalade." in run([*command, "What is the word?"], tmp_path)
    *_, said, result = engine.calls[-1]["prompt"]
    assert said["tool_calls"][0]["function"]["name"] == "read"
    assert result["role"] == "tool" and "The word is marmalade." in result["content"]


def call_a_tool(engine, name, arguments):
    """Have the fake engine think, call a tool, and answer when the result has come."""

    def go_on():
        engine.pieces = [end, "It is", " marmalade."]

    def end():
        engine.finish_reason = FinishReason.STOP

    call = Call(0, "call_1", name, json.dumps(arguments))
    engine.max_ctx = 10**6
    engine.finish_reason = FinishReason.TOOL_CALLS
    thought = Delta("Let me look.", DeltaKind.REASONING)
    engine.pieces = [go_on, thought, Delta(kind=DeltaKind.TOOL_CALL, tool_call=call)]
