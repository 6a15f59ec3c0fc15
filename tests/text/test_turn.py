"""Prompts, grammars and readers for what can be asked of a reply, with real vocabularies."""

import json
import re
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.core import TokenGrammar
from draftree.errors import DraftreeError, GrammarError, TokenizerError
from draftree.text import grammar
from draftree.text.grammar import FormatKind, ResponseFormat
from draftree.text.tokenizer import Tokenizer
from draftree.text.turn import ReplyOptions, TurnPlanner
from draftree.text.vocabulary import TAGS
from tests.examples import examples
from tests.text.metadata import byte_metadata, sentencepiece_metadata
from tests.text.tools.example import NOW, STORE, WEATHER

ASK = [{"role": "user", "content": "What is the weather in Paris?"}]
YES_NO = ResponseFormat(FormatKind.REGEX, "yes|no")
CALL = '<tool_call>\n{"name": "get_weather", "arguments": {"city": "Paris"}}\n</tool_call>'


@pytest.fixture(scope="module")
def planner(qwen3: Tokenizer) -> TurnPlanner:
    return TurnPlanner(qwen3)


@pytest.fixture(scope="module")
def plain_planner(smollm2: Tokenizer) -> TurnPlanner:
    return TurnPlanner(smollm2)


def takes(grammar: TokenGrammar | None, tokenizer: Tokenizer, text: str) -> bool:
    """Whether a reply may be this text and end there."""
    assert grammar is not None
    matcher = grammar.new_matcher()
    for token in tokenizer.encode(text, add_special=False, starts_text=False):
        if matcher.is_complete or matcher.count_valid((token,)) == 0:
            return False
        matcher.advance(token)
    return matcher.is_complete or matcher.count_valid((min(tokenizer.stop_ids),)) == 1


def test_nothing_is_asked(planner: TurnPlanner, qwen3: Tokenizer) -> None:
    turn = planner.plan(ASK)
    assert turn.grammar is None and turn.calls is None and not turn.is_reasoning
    assert qwen3.decode(turn.prompt_ids).endswith("<|im_start|>assistant\n")


def test_a_prepared_planner_builds_no_table_for_the_first_call(qwen3, monkeypatch) -> None:
    planner, built = TurnPlanner(qwen3), []
    build = grammar._build_table
    monkeypatch.setattr(grammar, "_build_table", lambda tokenizer: built.append(1) or build(qwen3))
    planner.prepare()
    assert built == [1]
    planner.plan(ASK, ReplyOptions([WEATHER], "required"))
    assert built == [1]


def test_thinking_is_switched_by_the_template(planner: TurnPlanner, qwen3: Tokenizer) -> None:
    assert planner.can_think
    on, off = (planner.plan(ASK, ReplyOptions(thinking=flag)) for flag in (True, False))
    assert qwen3.decode(on.prompt_ids).endswith("<|im_start|>assistant\n")
    assert qwen3.decode(off.prompt_ids).endswith("<think>\n\n</think>\n\n")
    assert on.grammar is off.grammar is None


def test_a_reply_that_has_begun(planner: TurnPlanner, qwen3: Tokenizer) -> None:
    """It goes on right behind its beginning, without thinking first."""
    begun = {"role": "assistant", "content": "It is <think>", "reasoning_content": "Hm."}
    turn = planner.plan([*ASK, begun], is_continued=True)
    closed = qwen3.decode(planner.plan(ASK, ReplyOptions(thinking=False)).prompt_ids)
    assert qwen3.decode(turn.prompt_ids) == f"{closed}It is <think>"
    reader = turn.new_reader()
    (piece,) = reader.push("<think>sunny") + reader.finish()
    assert (piece.kind, piece.text) == ("text", "<think>sunny")
    with pytest.raises(ValueError, match="has begun cannot think"):
        planner.plan([*ASK, begun], ReplyOptions(thinking=True), is_continued=True)
    with pytest.raises(TokenizerError, match="no message to answer"):
        planner.plan([begun], is_continued=True)


def test_a_model_that_cannot_think_goes_on(plain_planner: TurnPlanner, smollm2: Tokenizer) -> None:
    begun = {"role": "assistant", "content": [{"type": "text", "text": "It"}]}
    text = plain_planner.render([*ASK, begun], ReplyOptions(), is_continued=True)
    assert text == plain_planner.render(ASK, ReplyOptions()) + "It"
    assert text.endswith("<|im_start|>assistant\nIt")


def bytes_with(template: str) -> Tokenizer:
    """A token a byte, and one for every tag."""
    tags = (*((tag, 4) for tag in TAGS), ("<|im_end|>", 3))
    return Tokenizer.from_metadata({**byte_metadata(*tags), "tokenizer.chat_template": template})


def test_reasoning_that_the_template_opens() -> None:
    """And that has no switch."""
    template = "{% for m in messages %}{{ m.content }}\n{% endfor %}<think>\n"
    tokenizer = bytes_with(template)
    planner = TurnPlanner(tokenizer)
    turn = planner.plan(ASK)
    assert turn.is_reasoning
    pieces = turn.new_reader().push("hm</think>yes")
    assert [(p.kind, p.text) for p in pieces] == [("reasoning", "hm"), ("text", "yes")]
    closed = planner.plan(ASK, ReplyOptions(thinking=False))
    assert not closed.is_reasoning
    assert tokenizer.decode(closed.prompt_ids).endswith("<think>\n\n</think>\n\n")
    strict = planner.plan(ASK, ReplyOptions(response_format=YES_NO))
    assert takes(strict.grammar, tokenizer, "hm\n</think>\n\nyes")
    assert not takes(strict.grammar, tokenizer, "hm")
    budget = planner.plan(ASK, ReplyOptions(response_format=YES_NO, thinking_budget=2))
    assert takes(budget.grammar, tokenizer, "hm\n</think>\n\nno")
    assert not takes(budget.grammar, tokenizer, "hm hm hm</think>no")


def test_a_format_with_and_without_reasoning(planner: TurnPlanner, qwen3: Tokenizer) -> None:
    turn = planner.plan(ASK, ReplyOptions(response_format=YES_NO))
    for reply in ("yes", "no", "<think>\nhm yes\n</think>\n\nyes"):
        assert takes(turn.grammar, qwen3, reply)
    for reply in ("maybe", "<think>yes", "yes yes", "<think>a</think>", " yes"):
        assert not takes(turn.grammar, qwen3, reply)
    off = planner.plan(ASK, ReplyOptions(response_format=YES_NO, thinking=False))
    assert takes(off.grammar, qwen3, "yes") and not takes(off.grammar, qwen3, "<think>a</think>no")


def test_a_budget_alone(planner: TurnPlanner, qwen3: Tokenizer) -> None:
    turn = planner.plan(ASK, ReplyOptions(thinking_budget=2))
    assert takes(turn.grammar, qwen3, "<think>a b\n</think>\n\nAnything.")
    assert not takes(turn.grammar, qwen3, "<think>a b c d e f</think>")
    assert takes(turn.grammar, qwen3, "No reasoning, a long reply.")


def test_tools_are_rendered_and_free_text_is_free(planner: TurnPlanner, qwen3: Tokenizer) -> None:
    turn = planner.plan(ASK, ReplyOptions(tools=[WEATHER, NOW]))
    assert '"get_weather"' in qwen3.decode(turn.prompt_ids)
    for reply in ("Sunny, I guess.", CALL, f"Let me see.\n{CALL}\n{CALL}", "<think>hm</think>No."):
        assert takes(turn.grammar, qwen3, reply)
    for reply in (CALL.replace("get_weather", "other"), CALL.replace("city", "town")):
        assert not takes(turn.grammar, qwen3, reply)
    single = planner.plan(ASK, ReplyOptions(tools=[WEATHER], is_parallel=False))
    assert takes(single.grammar, qwen3, CALL) and not takes(
        single.grammar, qwen3, f"{CALL}\n{CALL}"
    )
    pieces = turn.new_reader().push(CALL)
    assert pieces[0].tool_call is not None and pieces[0].tool_call.name == "get_weather"


def test_forced_calls(planner: TurnPlanner, qwen3: Tokenizer) -> None:
    required = planner.plan(ASK, ReplyOptions(tools=[WEATHER, NOW], tool_choice="required"))
    assert takes(required.grammar, qwen3, CALL) and takes(
        required.grammar, qwen3, f"{CALL}\n{CALL}"
    )
    assert takes(required.grammar, qwen3, f"<think>hm</think>\n\n{CALL}")
    assert not takes(required.grammar, qwen3, "Sunny.")
    named = ReplyOptions(tools=[WEATHER, NOW], tool_choice={"function": {"name": "now"}})
    turn = planner.plan(ASK, named)
    assert '"get_weather"' in qwen3.decode(turn.prompt_ids)
    assert not takes(turn.grammar, qwen3, CALL)
    now = '<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
    assert takes(turn.grammar, qwen3, now)


@pytest.mark.parametrize("name", ["hermes", "coder", "generic"])
@pytest.mark.parametrize("choice", ["required", {"function": {"name": "now"}}])
def test_a_forced_call_that_is_cut_short_is_no_text(name: str, choice: Any) -> None:
    turn = PLANNERS[name].plan(ASK, ReplyOptions(tools=[WEATHER, NOW], tool_choice=choice))
    call = turn.calls.dialect.write_call("now", {})
    names = []
    for end in range(len(call) + 1):
        reader = turn.new_reader()
        pieces = [*reader.push(call[:end]), *reader.finish()]
        assert all(piece.tool_call is not None for piece in pieces), call[:end]
        names += [piece.tool_call.name for piece in pieces[:1]]
    assert set(names) == {"now"}


def test_no_tools(planner: TurnPlanner, qwen3: Tokenizer) -> None:
    turn = planner.plan(ASK, ReplyOptions(tools=[WEATHER], tool_choice="none"))
    assert turn.calls is None and turn.grammar is None
    assert "get_weather" not in qwen3.decode(turn.prompt_ids)
    assert [p.text for p in turn.new_reader().push(CALL)] == [CALL]


def test_calls_or_a_format(planner: TurnPlanner, qwen3: Tokenizer) -> None:
    turn = planner.plan(ASK, ReplyOptions(tools=[WEATHER], response_format=YES_NO))
    assert takes(turn.grammar, qwen3, CALL) and takes(turn.grammar, qwen3, "no")
    assert not takes(turn.grammar, qwen3, "maybe")
    forced = ReplyOptions(tools=[WEATHER], tool_choice="required", response_format=YES_NO)
    assert not takes(planner.plan(ASK, forced).grammar, qwen3, "no")


def test_a_model_that_knows_neither_tools_nor_reasoning(
    plain_planner: TurnPlanner, smollm2: Tokenizer
) -> None:
    assert not plain_planner.can_think
    turn = plain_planner.plan(ASK, ReplyOptions(tools=[WEATHER]))
    assert "get_weather" in smollm2.decode(turn.prompt_ids) and turn.grammar is None
    assert turn.calls is not None and not turn.calls.is_trusted
    forced = plain_planner.plan(ASK, ReplyOptions(tools=[WEATHER], tool_choice="required"))
    call = '{"name": "get_weather", "arguments": {"city": "Paris", "days": 2}}'
    assert takes(forced.grammar, smollm2, call)
    assert not takes(forced.grammar, smollm2, call.replace("2", '"two"'))
    with pytest.raises(ValueError, match="thinking"):
        plain_planner.plan(ASK, ReplyOptions(thinking=True))


def test_what_the_grammar_cannot_state_is_left_out_unless_strict(
    planner: TurnPlanner, qwen3: Tokenizer
) -> None:
    def tool(schema: dict, strict: bool) -> dict:
        parameters = {"type": "object", "properties": {"a": schema}, "required": ["a"]}
        return {"function": {"name": "f", "parameters": parameters, "strict": strict}}

    schema = {"type": "array", "items": {"type": "integer"}, "uniqueItems": True}
    for broken, reply in ((schema, '{"a": [1, 1]}'), ({"$ref": "#/x"}, '{"b": 1}')):
        loose = ReplyOptions(tools=[tool(broken, False)], tool_choice="required")
        turn = planner.plan(ASK, loose)
        call = f'<tool_call>\n{{"name": "f", "arguments": {reply}}}\n</tool_call>'
        assert takes(turn.grammar, qwen3, call)
        with pytest.raises(GrammarError, match="tool 'f'"):
            planner.plan(ASK, ReplyOptions(tools=[tool(broken, True)]))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"tool_choice": "required"}, "no tools"),
        ({"tool_choice": {"function": {"name": "x"}}}, "'x'"),
        ({"tools": [NOW], "tool_choice": {"function": {"name": "x"}}}, "'x'"),
        ({"tools": [NOW], "tool_choice": {"function": 3}}, "None"),
        ({"tools": [NOW], "tool_choice": "always"}, "tool_choice must be"),
        ({"tools": ["x"]}, "tools[0]"),
        ({"thinking_budget": -1}, "thinking_budget"),
    ],
)
def test_bad_wishes_are_refused(planner: TurnPlanner, options: dict, words: str) -> None:
    with pytest.raises(ValueError, match=re.escape(words)):
        planner.plan(ASK, ReplyOptions(**options))
    with pytest.raises(TokenizerError):
        planner.plan([])


def test_a_space_may_come_first_where_readers_do_not_see_it() -> None:
    tokenizer = Tokenizer.from_metadata(sentencepiece_metadata(0))
    turn = TurnPlanner(tokenizer).plan(ASK, ReplyOptions(response_format=YES_NO))
    assert tokenizer.prefixes_space
    assert takes(turn.grammar, tokenizer, " yes") and takes(turn.grammar, tokenizer, "yes")
    assert not takes(TurnPlanner(tokenizer).constrain(YES_NO), tokenizer, " yes")


def test_tools_are_closed_and_formats_are_as_written(planner: TurnPlanner, qwen3) -> None:
    schema = {"type": "object", "properties": {"city": {"type": "string"}}}
    tool = {"function": {"name": "get_weather", "parameters": schema}}
    turn = planner.plan(ASK, ReplyOptions(tools=[tool], tool_choice="required"))
    assert takes(turn.grammar, qwen3, CALL)
    assert not takes(turn.grammar, qwen3, CALL.replace("}}", ', "mood": 1}}'))
    assert "additionalProperties" not in qwen3.decode(turn.prompt_ids)
    wanted = ResponseFormat(FormatKind.JSON_SCHEMA, schema)
    turn = planner.plan(ASK, ReplyOptions(response_format=wanted))
    assert takes(turn.grammar, qwen3, '{"city": "Rome", "mood": 1}')


def test_schemas_with_definitions_in_every_dialect(planner: TurnPlanner, qwen3: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {"p": {"$ref": "#/$defs/point"}},
        "required": ["p"],
        "$defs": {"point": {"type": "object", "properties": {"x": {"type": "integer"}}}},
    }
    options = ReplyOptions(
        tools=[{"function": {"name": "f", "parameters": schema}}, STORE], tool_choice="required"
    )
    reply = '<tool_call>\n{"name": "f", "arguments": {"p": {"x": 1}}}\n</tool_call>'
    assert takes(planner.plan(ASK, options).grammar, qwen3, reply)
    template = "{{ tools | tojson }}<tool_call>\n<function={{ messages[0].content }}"
    coder = bytes_with(template)
    turn = TurnPlanner(coder).plan(ASK, options)
    reply = (
        '<tool_call>\n<function=f>\n<parameter=p>\n{"x": 1}\n</parameter>\n'
        "</function>\n</tool_call>"
    )
    assert takes(turn.grammar, coder, reply)
    pieces = turn.new_reader().push(reply)
    arguments = "".join(p.tool_call.arguments for p in pieces if p.tool_call)
    assert json.loads(arguments) == {"p": {"x": 1}}


WORDS = ["type", "properties", "required", "items", "enum", "anyOf", "oneOf", "$ref", "$defs"]
WORDS += ["const", "pattern", "minimum", "format", "x-guidance", "additionalProperties", "a"]
VALUES = st.sampled_from(["object", "string", "integer", "array", "#/$defs/a", "(", None, True, 3])
SCHEMAS = st.recursive(
    VALUES,
    lambda inner: st.one_of(
        st.lists(inner, max_size=3), st.dictionaries(st.sampled_from(WORDS), inner, max_size=4)
    ),
    max_leaves=12,
)
PLANNERS = {
    "hermes": TurnPlanner(bytes_with("{{ tools }}<tool_call>{{ messages[0].content }}")),
    "coder": TurnPlanner(bytes_with("{{ tools }}<function={{ messages[0].content }}")),
    "generic": TurnPlanner(bytes_with("{{ messages[0].content }}{% if tools %}{% endif %}")),
}


@given(st.sampled_from([*PLANNERS]), SCHEMAS, st.sampled_from(["auto", "required"]), st.booleans())
@examples(400)
def test_any_schema_is_used_or_refused(name: str, schema: Any, choice: str, strict: bool) -> None:
    """Whatever a client sends, the answer is a plan or a sentence; and replies can be read."""
    tool = {"function": {"name": "f", "parameters": schema, "strict": strict}}
    response_format = ResponseFormat(FormatKind.JSON_SCHEMA, schema)
    for options in (
        ReplyOptions(tools=[tool], tool_choice=choice),
        ReplyOptions(response_format=response_format),
    ):
        try:
            turn = PLANNERS[name].plan(ASK, options)
        except (ValueError, DraftreeError) as error:
            assert str(error)
            continue
        if turn.grammar is not None:
            turn.grammar.new_matcher().propose_forced()
        for reply in (CALL, f"<tool_call>\n<function=f>\n{PARAMETER}</function>\n</tool_call>"):
            reader = turn.new_reader()
            assert reader.push(reply) + reader.finish()


PARAMETER = "<parameter=a>\n[1]\n</parameter>\n"


@pytest.mark.parametrize("tools", [(), (WEATHER, STORE)])
@pytest.mark.parametrize("system", ["", "You are brief."])
def test_the_leading_part_ends_where_the_first_message_begins(
    planner: TurnPlanner, qwen3: Tokenizer, system: str, tools: tuple[Any, ...]
) -> None:
    """The same for all conversations with this system prompt and these tools."""
    options, first = ReplyOptions(tools=tools), [{"role": "system", "content": system}]
    lengths = set()
    for words in ("What now?", "x", "0", "x is 0"):
        turn = [{"role": "user", "content": words}]
        later = [{"role": "assistant", "content": "That."}, {"role": "user", "content": "Why?"}]
        for messages in (turn, turn + later):
            messages = (first if system else []) + messages
            ids = planner.plan(messages, options).prompt_ids
            length = planner.count_opening(ids, messages, options)
            lengths.add(length)
            text = b"".join(map(qwen3.token_bytes, ids[:length])).decode()
            assert text.endswith("<|im_start|>user\n") and text.count("user\n") == 1
            assert system in text and ("get_weather" in text) == bool(tools)
    assert len(lengths) == 1
