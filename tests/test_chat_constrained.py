"""Formats, calls, reasoning and scores with the default model: the same with every way of drafting.

The default pair, a draft that knows the text, and plain decoding answer the same requests. Tags
that the model lacks are lent to it: tokens of its vocabulary that no text needs are renamed.
"""

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest

from draftree.chat import Delta, DeltaKind, Engine, FormatKind, Generation, ResponseFormat
from draftree.config import EngineConfig
from draftree.core import FinishReason, SamplingParams, TokenSource
from draftree.engine.engine import TokenEngine
from draftree.errors import GrammarError
from draftree.text.tokenizer import Tokenizer
from draftree.weights.file import open_checkpoint
from tests.decode.oracle import OracleDrafter
from tests.text.tools.example import NOW, STORE, WEATHER

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "maxLength": 12},
        "age": {"type": "integer", "minimum": 0, "maximum": 120},
        "tags": {"type": "array", "items": {"enum": ["red", "blue"]}, "maxItems": 3},
    },
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
JSON = ResponseFormat(FormatKind.JSON_SCHEMA, PERSON)
PATTERN = r"[A-Z][a-z]{1,11}( [a-z]{1,11}){2,6}\."  # a sampled word may never end by itself
ASK = [{"role": "user", "content": "Describe Ann as JSON: name, age and favourite colours."}]
TEMPLATE = (
    "{% if tools %}<|im_start|>system\n{{ tools | tojson }} <tool_call><|im_end|>\n{% endif %}"
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "<|im_start|>assistant\n{% if enable_thinking %}<think>\n{% endif %}{# </think> #}"
)
LENT = {7: "<think>", 8: "</think>", 9: "<tool_call>", 10: "</tool_call>"}
SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.9, seed=3),
    "filtered": SamplingParams(
        temperature=1.0, top_p=0.9, top_k=40, min_p=0.02, repetition_penalty=1.1, seed=5
    ),
}
WISHES: dict[str, dict[str, Any]] = {
    "schema": {"response_format": JSON},
    "object": {"response_format": ResponseFormat(FormatKind.JSON_OBJECT), "max_tokens": 16},
    "pattern": {"response_format": ResponseFormat(FormatKind.REGEX, PATTERN)},
    "schema, scores": {"response_format": JSON, "logprobs": 3},
    "scores": {"logprobs": 2, "max_tokens": 16},
    "bias": {"logit_bias": {198: -100.0, 28: 3.0}, "max_tokens": 16},
    "required": {"tools": [WEATHER, NOW], "tool_choice": "required", "max_tokens": 50},
    "named": {
        "tools": [STORE, WEATHER],
        "tool_choice": {"function": {"name": "get_weather"}},
        "parallel_tool_calls": False,
    },
    "budget": {
        "thinking": True,
        "thinking_budget": 9,
        "max_tokens": 24,
        "logit_bias": {0: -100.0, 2: -100.0},  # or the reply ends at once
    },
    "budget, schema": {"thinking": True, "thinking_budget": 6, "response_format": JSON},
}


@dataclass(frozen=True)
class Reply:
    reasoning: str
    text: str
    calls: tuple[tuple[str, str], ...]
    reason: FinishReason | None
    scores: tuple[tuple[int, float, tuple[tuple[int, float], ...]], ...]


def read(generation: Generation) -> tuple[Reply, list[Delta]]:
    deltas = list(generation)
    texts = {kind: "".join(d.text for d in deltas if d.kind is kind) for kind in DeltaKind}
    calls: list[list[str]] = []
    for call in (d.tool_call for d in deltas if d.tool_call is not None):
        if call.id is not None:
            calls.append([str(call.name), ""])
        calls[call.index][1] += call.arguments
    assert generation.text == texts[DeltaKind.TEXT]
    scores = tuple(
        (s.token_id, s.logprob, tuple((t.token_id, t.logprob) for t in s.top))
        for delta in deltas
        for s in delta.logprobs
    )
    found = tuple((name, arguments) for name, arguments in calls)
    reason = generation.finish_reason
    return Reply(texts["reasoning"], texts["text"], found, reason, scores), deltas


@pytest.fixture(scope="module")
def tokenizer(smollm2_path: Path) -> Tokenizer:
    metadata = dict(open_checkpoint(smollm2_path).metadata)
    tokens = list(metadata["tokenizer.ggml.tokens"])
    for token_id, text in LENT.items():
        tokens[token_id] = text
    lent = {"tokenizer.ggml.tokens": tokens, "tokenizer.chat_template": TEMPLATE}
    return Tokenizer.from_metadata({**metadata, **lent})


def open_engine(path: Path, tokenizer: Tokenizer, draft: Path | None, **options: Any) -> Engine:
    config = EngineConfig(max_ctx=1024, device="cpu", **options)
    return Engine(TokenEngine.open(path, config, draft), tokenizer, "test")


@pytest.fixture(scope="module")
def plain(smollm2_path: Path, tokenizer: Tokenizer) -> Iterator[Engine]:
    engine = open_engine(smollm2_path, tokenizer, None, budget=0)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def drafted(smollm2_path: Path, tokenizer: Tokenizer) -> Iterator[Engine]:
    """The draft that comes with the package."""
    import draftree

    (draft,) = Path(draftree.__file__).parent.glob("data/smollm2-*.gguf")
    engine = open_engine(smollm2_path, tokenizer, draft, budget=15)
    yield engine
    engine.close()


@pytest.fixture(scope="module")
def knowing(smollm2_path: Path, tokenizer: Tokenizer) -> Iterator[Engine]:
    """For a drafter that is put in by hand."""
    engine = open_engine(smollm2_path, tokenizer, None, budget=22)
    yield engine
    engine.close()


def ask(engine: Engine, wish: str, sampling: str) -> Generation:
    return engine.chat(ASK, **{"max_tokens": 70, "sampling": SAMPLINGS[sampling], **WISHES[wish]})


def check_wish(wish: str, reply: Reply) -> None:
    """The reply is what was asked for."""
    if "schema" in wish:
        value = json.loads(reply.text)
        assert list(value) == ["name", "age", "tags"] and 0 <= value["age"] <= 120
        assert reply.reason is FinishReason.STOP
    if wish == "pattern":
        assert re.fullmatch(PATTERN, reply.text)
    if wish in ("required", "named") and reply.reason is FinishReason.TOOL_CALLS:
        assert reply.text == "" and reply.calls
        for name, arguments in reply.calls:
            value = json.loads(arguments)
            assert name == "get_weather" or wish == "required"
            assert isinstance(value.get("city", ""), str)
    if "scores" in wish:
        assert reply.scores and all(len(top) <= 3 for _, _, top in reply.scores)
    if "budget" in wish:
        assert reply.reasoning and "think" not in reply.text


MORE_PAIRS = (
    *((wish, "greedy") for wish in ("schema", "required", "bias", "pattern")),
    *((wish, "warm") for wish in ("object", "budget")),
    *((wish, "filtered") for wish in ("named", "budget, schema")),
)
PAIRS = [
    *((wish, "greedy") for wish in WISHES if (wish, "greedy") not in MORE_PAIRS),
    *((wish, "warm") for wish in ("schema", "required", "bias")),
    *((wish, "filtered") for wish in ("pattern", "schema, scores")),
    *(pytest.param(*pair, marks=pytest.mark.long) for pair in MORE_PAIRS),
]


@pytest.mark.parametrize(("wish", "sampling"), PAIRS)
def test_every_way_of_drafting_gives_the_same(
    wish: str, sampling: str, plain: Engine, drafted: Engine, knowing: Engine
) -> None:
    generation = ask(plain, wish, sampling)
    stream = generation.stream
    tokens: list[int] = []
    inner = stream._events
    stream._events = (tokens.append(event.token) or event for event in inner)
    expected, _ = read(generation)
    check_wish(wish, expected)
    assert generation.usage.acceptance_length == 1.0
    assert read(ask(drafted, wish, sampling))[0] == expected
    prompt = knowing._planner.plan(ASK, _options(wish)).prompt_ids
    text = (*prompt, *tokens, 2, *[0] * 16)
    vocab_size = knowing.tokens.model_config.vocab_size
    oracle = OracleDrafter(knowing.tokens.target.state, text, vocab_size, seed=len(tokens))
    knowing.tokens.drafter = oracle
    knowing.tokens._use.decoders._parts = replace(knowing.tokens._parts, drafter=oracle)
    generation = ask(knowing, wish, sampling)
    assert read(generation)[0] == expected
    assert generation.usage.rounds.num_accepted > 0


def _options(wish: str) -> Any:
    from draftree.text.turn import ReplyOptions

    known = ("tools", "tool_choice", "response_format", "thinking", "thinking_budget")
    return ReplyOptions(**{key: value for key, value in WISHES[wish].items() if key in known})


def test_the_budget_ends_the_reasoning(plain: Engine) -> None:
    for budget in (0, 1, 9):
        options = {"thinking": True, "thinking_budget": budget, "max_tokens": budget + 12}
        reply, _ = read(plain.chat(ASK, logit_bias={0: -100.0, 2: -100.0}, **options))
        assert len(plain.tokenizer.encode(reply.reasoning)) <= budget + 1 and reply.text
    bias = {0: -100.0, 2: -100.0}
    free, _ = read(plain.chat(ASK, thinking=True, max_tokens=16, logit_bias=bias))
    assert free.reasoning and not free.text


def test_calls_in_free_text_follow_the_grammar(plain: Engine, drafted: Engine) -> None:
    """The bias makes the model begin a call; from there on the grammar leads."""
    for parallel in (False, True):
        replies = []
        for engine in (plain, drafted):
            generation = engine.chat(
                ASK,
                tools=[WEATHER, NOW],
                parallel_tool_calls=parallel,
                logit_bias={9: 100.0},
                max_tokens=90,
            )
            reply, deltas = read(generation)
            replies.append(reply)
            assert sum(d.tool_call is not None for d in deltas) > len(reply.calls)  # streamed
        assert replies[0] == replies[1]
        assert all(name in ("get_weather", "now") for name, _ in replies[0].calls)
        if parallel:
            assert len(replies[0].calls) > 1
        else:
            assert len(replies[0].calls) == 1
            assert replies[0].reason is FinishReason.TOOL_CALLS


def test_what_the_grammar_forces_is_proposed(drafted: Engine) -> None:
    reply, deltas = read(ask(drafted, "named", "greedy"))
    assert TokenSource.GRAMMAR in {delta.source for delta in deltas}
    assert reply.calls[0][0] == "get_weather"


def test_scores_fit_the_text(plain: Engine) -> None:
    generation = plain.chat(ASK, logprobs=2, max_tokens=20)
    deltas = list(generation)
    scores = [score for delta in deltas for score in delta.logprobs]
    assert b"".join(score.text for score in scores).decode() == generation.text
    assert all(score.logprob == score.top[0].logprob for score in scores)  # greedy
    assert all(score.top[0].logprob >= score.top[1].logprob for score in scores)


def test_reasoning_and_calls_carry_no_scores(plain: Engine) -> None:
    options = {"thinking": True, "thinking_budget": 4, "logit_bias": {0: -100.0, 2: -100.0}}
    generation = plain.chat(ASK, logprobs=1, max_tokens=16, **options)
    deltas = list(generation)
    assert all(not delta.logprobs for delta in deltas if delta.kind is DeltaKind.REASONING)
    scores = [score for delta in deltas for score in delta.logprobs]
    assert b"".join(score.text for score in scores).decode().lstrip("\n") == generation.text
    options = {"tools": [NOW], "tool_choice": "required", "logprobs": 1, "max_tokens": 20}
    assert read(plain.chat(ASK, **options))[0].scores == ()


def test_texts_can_have_a_format_too(plain: Engine, drafted: Engine) -> None:
    number = ResponseFormat(FormatKind.LARK, 'start: " " /[1-9][0-9]{0,3}/ "."')
    for prompt in ("The answer is", plain.tokenizer.encode("The answer is")):
        replies = [
            read(engine.complete(prompt, response_format=number, max_tokens=12))[0]
            for engine in (plain, drafted)
        ]
        assert replies[0] == replies[1]
        assert re.fullmatch(r" [1-9]\d{0,3}\.", replies[0].text)
        assert replies[0].reason is FinishReason.STOP


def test_a_reply_goes_on_under_its_format(plain: Engine) -> None:
    """From a beginning that fits; before another one, the format is that of the rest."""
    whole, _ = read(plain.chat(ASK, response_format=JSON, max_tokens=60))
    json.loads(whole.text)
    cut = whole.text.index(",") + 1
    for begun in (whole.text[:cut], whole.text):
        messages = [*ASK, {"role": "assistant", "content": begun}]
        rest, _ = read(plain.chat(messages, response_format=JSON, continue_final=True))
        assert json.loads(begun + rest.text).keys() == PERSON["properties"].keys()
        assert rest.reason is FinishReason.STOP
    messages = [*ASK, {"role": "assistant", "content": "Here it is: "}]
    rest, _ = read(plain.chat(messages, response_format=JSON, continue_final=True))
    assert json.loads(rest.text).keys() == PERSON["properties"].keys()


def test_a_reply_that_is_cut_short_says_so(plain: Engine) -> None:
    reply, _ = read(plain.chat(ASK, response_format=JSON, max_tokens=5))
    assert reply.reason is FinishReason.LENGTH and reply.text.startswith("{")


def test_bad_wishes_are_refused_before_anything_runs(plain: Engine) -> None:
    before = plain.tokens.target.num_forwards
    bad = ResponseFormat(FormatKind.JSON_SCHEMA, {"type": "objekt"})
    with pytest.raises(GrammarError, match="objekt"):
        plain.chat(ASK, response_format=bad)
    with pytest.raises(GrammarError, match="objekt"):
        plain.complete("x", response_format=bad)
    with pytest.raises(ValueError, match="999999"):
        plain.chat(ASK, logit_bias={999999: 1.0})
    with pytest.raises(ValueError, match="no tools"):
        plain.chat(ASK, tool_choice="required")
    assert plain.tokens.target.num_forwards == before
