"""The next turn of an agent reads only what is new: replies are read ahead as templates show them.

Tiny models write calls under a grammar; the template is that of a real model, which spells calls
its own way and leaves reasoning out. The text is always that of an engine that knows nothing.
"""

import json
from typing import Any

import pytest

from draftree.chat import Engine, Generation
from draftree.config import EngineConfig
from draftree.engine.engine import TokenEngine
from draftree.text.tokenizer import Tokenizer
from draftree.text.turn import ReplyOptions
from draftree.weights.file import open_checkpoint
from tests.made import make_draft
from tests.text.conftest import qwen3_metadata  # noqa: F401
from tests.tiny import tiny_path

SYSTEM = {"role": "system", "content": "You edit files. " + "Be careful with them. " * 4}
FIELDS = {"path": {"enum": ["a.py", "b.py"]}, "line": {"enum": [1, 2, 3]}}
PARAMETERS = {"type": "object", "properties": FIELDS, "required": ["path", "line"]}
TOOLS = [
    {"type": "function", "function": {"name": "read_file", "parameters": PARAMETERS}},
    {"type": "function", "function": {"name": "run_tests", "parameters": {"type": "object"}}},
]
CHOICE = {"function": {"name": "read_file"}}
MODELS = {"dense": ("llama", None), "hybrid": ("qwen35-mtp", None), "drafted": ("qwen35-mtp", 1)}
SHORT = 40  # tokens that a result and what is written around it take

CLOSE = 28  # tokens at a prompt's end that a recurrent model may have to read once more


def _open(kind: str, template: str, **options: Any) -> Engine:
    name, draft = MODELS[kind]
    path = tiny_path(name)
    config = EngineConfig(
        budget=7,
        max_ctx=8000,
        threads=1,
        math="exact",
        ngram="off",
        **{"prefix_bytes": 1 << 28, **options},
    )
    checkpoint = open_checkpoint(path)
    checkpoint.metadata = {
        **checkpoint.metadata,
        f"{checkpoint.architecture}.context_length": 8192,  # a token is hardly more than a byte
        "tokenizer.chat_template": template,
    }
    tokens = TokenEngine(checkpoint, config, open_checkpoint(make_draft()) if draft else None)
    return Engine(tokens, Tokenizer.from_metadata(checkpoint.metadata), kind)


@pytest.fixture(scope="module")
def template(qwen3_metadata: Any) -> str:  # noqa: F811
    return str(qwen3_metadata["tokenizer.chat_template"])


def _ask(engine: Engine, messages: list[dict[str, Any]]) -> Generation:
    generation = engine.chat(
        messages, tools=TOOLS, tool_choice=CHOICE, parallel_tool_calls=False, max_tokens=200
    )
    list(generation)
    assert generation.finish_reason == "tool_calls"
    return generation


def _go_on(messages: list[dict[str, Any]], generation: Generation, result: str) -> None:
    reply = generation.message.write(has_reasoning=False)
    call_id = reply["tool_calls"][0]["id"]
    messages += [reply, {"role": "tool", "tool_call_id": call_id, "content": result}]


def _count_new(generation: Generation) -> int:
    return generation.usage.prompt_tokens - generation.usage.cached_tokens


def _start() -> list[dict[str, Any]]:
    return [SYSTEM, {"role": "user", "content": "Find the bug."}]


@pytest.mark.parametrize("kind", MODELS)
def test_a_call_that_comes_back_is_not_read_again(kind: str, template: str) -> None:
    engine, plain, fresh = (_open(kind, template) for _ in range(3))
    messages = _start()
    first = _ask(engine, messages)
    assert _ask(plain, messages).message.text == first.message.text
    assert first.usage.cached_tokens == 0
    num_read = engine.read_ahead()
    assert num_read > 0
    assert engine.read_ahead() == 0
    _go_on(messages, first, "def f(): pass")
    second, unread = _ask(engine, messages), _ask(plain, messages)
    assert _count_new(second) <= SHORT < _count_new(unread)
    expected = _ask(fresh, messages)
    assert expected.usage.cached_tokens == 0
    functions = [each.message.calls[0]["function"] for each in (second, unread, expected)]
    assert functions[0] == functions[1] == functions[2]
    for each in (engine, plain, fresh):
        each.close()


@pytest.mark.parametrize("kind", ["dense", "hybrid"])
def test_a_wrong_guess_costs_nothing_but_time(kind: str, template: str) -> None:
    """The client sends something else than was foreseen: what it has in common is known."""
    engine, fresh = _open(kind, template), _open(kind, template)
    messages = _start()
    first = _ask(engine, messages)
    engine.read_ahead()
    again = _ask(engine, messages)  # the same once more
    assert again.message.calls[0]["function"] == first.message.calls[0]["function"]
    assert _count_new(again) <= CLOSE
    changed = [*messages, {"role": "assistant", "content": "No."}, messages[1]]
    second, expected = _ask(engine, changed), _ask(fresh, changed)
    assert second.message.calls[0]["function"] == expected.message.calls[0]["function"]
    assert second.usage.cached_tokens >= first.usage.prompt_tokens - CLOSE
    for each in (engine, fresh):
        each.close()


def test_reading_ahead_ends_between_chunks(template: str) -> None:
    engine = _open("hybrid", template, chunk=16)
    messages = _start()
    first = _ask(engine, messages)
    assert engine.read_ahead(lambda: True) == 0
    answers = iter([False, False, True])
    assert 0 < engine.read_ahead(lambda: next(answers, True)) <= 16
    _go_on(messages, first, "def f(): pass")
    assert _ask(engine, messages).usage.cached_tokens > first.usage.prompt_tokens - CLOSE
    engine.close()


def test_nothing_is_read_ahead_where_nothing_can_be_kept(template: str) -> None:
    engine = _open("dense", template, prefix_bytes=0)
    _ask(engine, _start())
    assert engine.read_ahead() == 0
    engine.close()


def test_replies_that_come_back_as_they_were_are_left(template: str) -> None:
    engine = _open("dense", template)
    ids = engine.encode_chat("hello there, " * 4)
    assert engine.tokens.read_ahead(ids) == len(ids)
    assert engine.tokens.read_ahead(ids) == engine.tokens.read_ahead([*ids, *ids[:3]]) == 0
    assert engine.tokens.read_ahead([*ids, *ids[:4]]) == 4
    engine.close()


def _count_opening(engine: Engine, messages: list[dict[str, Any]]) -> int:
    options = ReplyOptions(tools=TOOLS, tool_choice=CHOICE)
    ids = engine._planner.encode(messages, options)
    return engine._planner.count_opening(ids, messages, options)


@pytest.mark.parametrize("kind", ["hybrid", "drafted"])
def test_a_session_of_many_turns_reads_only_what_is_new(kind: str, template: str) -> None:
    engine = _open(kind, template)
    messages, known = _start(), []
    for turn in range(25):
        generation = _ask(engine, messages)
        if turn:
            assert _count_new(generation) <= SHORT + 4 * turn, turn
        known.append((list(messages), generation.usage.prompt_tokens))
        engine.read_ahead()
        engine.offload()
        _go_on(messages, generation, "x = 1\n" * turn)
    assert generation.usage.prompt_tokens > 2000
    opening = _count_opening(engine, messages)
    other = [SYSTEM, {"role": "user", "content": "Something else entirely."}]
    assert _ask(engine, other).usage.cached_tokens == opening > 100
    for earlier, length in (known[20], known[12], known[3]):  # edited from there on
        edited = _ask(engine, [*earlier[:-1], {**earlier[-1], "content": "Stop."}])
        assert edited.usage.cached_tokens > length - CLOSE - 4 * 21 - SHORT
    engine.close()


def test_instructions_are_a_place_to_come_back_to_at_once(template: str) -> None:
    """Not only after a second conversation has shown where they end."""
    engine = _open("hybrid", template)
    _ask(engine, _start())
    other = _ask(engine, [SYSTEM, {"role": "user", "content": "Something else entirely."}])
    assert other.usage.cached_tokens == _count_opening(engine, _start()) > 100
    engine.close()


@pytest.mark.parametrize("is_returned", [False, True])
def test_reasoning_is_foreseen_as_the_client_treats_it(template: str, is_returned: bool) -> None:
    engine = _open("dense", template)
    question = {"role": "user", "content": "Why?"}
    generation = engine.chat([question], max_tokens=4)
    list(generation)
    generation.message.reasoning, generation.message.text = "Because it is so. " * 3, "So."
    engine._ended.clear()
    generation.on_end()
    assert len(engine._ended) == 2
    reply = generation.message.write(has_reasoning=is_returned)
    engine._ended.clear()
    asked = [question, reply, question]
    second = engine.chat(asked, max_tokens=4)
    list(second)
    second.message.reasoning = "Hm."
    engine._ended.clear()
    second.on_end()
    (messages, _), *others = engine._ended
    assert not others and ("reasoning_content" in messages[-1]) == is_returned
    engine.close()


def test_what_is_foreseen_is_what_the_next_prompt_begins_with(template: str) -> None:
    engine = _open("dense", template)
    messages = [*_start(), {"role": "assistant", "content": None, "tool_calls": []}]
    arguments = json.dumps({"path": "a.py", "line": 1}, separators=(",", ":"))
    function = {"name": "read_file", "arguments": arguments}
    messages[-1]["tool_calls"] = [{"id": "c", "type": "function", "function": function}]
    options = ReplyOptions(tools=TOOLS)
    ids = engine._planner.foresee(messages, options)
    for content in ("", "\n\nindented", "def f(): pass"):
        result = {"role": "tool", "tool_call_id": "c", "content": content}
        prompt = engine._planner.encode([*messages, result], options)
        assert prompt[: len(ids)] == ids
        assert len(prompt) - len(ids) <= SHORT + len(content)
    engine.close()
