"""Long messages are shortened once, by the question that followed them, and prompts go on from the
one before.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftree import Engine
from draftree.compress import AUTO_TOKENS, Compressor
from draftree.config import EngineConfig
from draftree.text.tokenizer import Tokenizer
from tests.made import make_shallow
from tests.text.metadata import byte_metadata

ALWAYS = "always", 0.1
LONG = "\n".join(f"line {number} holds nothing of note" for number in range(150))
NEEDLE = "the kettle is in the shed"


class CountingScorer:
    """Prefers chunks by their place, and counts."""

    def __init__(self) -> None:
        self.num_calls = 0

    def score(self, text: Sequence[int], question: Sequence[int]) -> np.ndarray:
        self.num_calls += 1
        return np.arange(-(-len(text) // 32), dtype=np.float32) % 7


class FakeTokens:
    def __init__(self) -> None:
        self.scorer = CountingScorer()
        self.checkpoints: list[Any] = []

    def new_scorer(self, checkpoint: Any) -> CountingScorer:
        self.checkpoints.append(checkpoint)
        return self.scorer


def open_compressor(**config: Any) -> tuple[Compressor, FakeTokens]:
    tokens = FakeTokens()
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    return Compressor(tokens, tokenizer, EngineConfig(**config)), tokens  # type: ignore[arg-type]


def user(text: str) -> dict[str, str]:
    return {"role": "user", "content": text}


def reply(text: str) -> dict[str, str]:
    return {"role": "assistant", "content": text}


def tool_session() -> list[Any]:
    """A tool's result that was read with the first question, and a second question."""
    call = {"id": "1", "type": "function", "function": {"name": "read", "arguments": "{}"}}
    first = [user("Read it."), {"role": "assistant", "content": "", "tool_calls": [call]}]
    result = {"role": "tool", "tool_call_id": "1", "content": LONG}
    return [*first, result, reply("Done."), user("What is in line 7?")]


def test_auto_leaves_whole_what_the_cache_has_whole() -> None:
    messages = tool_session()
    for options, is_whole in (({}, True), ({"prefix_bytes": 0}, False)):
        compressor, tokens = open_compressor(**options)
        assert list(compressor.shorten(messages[:3], "auto", has_tools=True)[0]) == messages[:3]
        shorter, report = compressor.shorten(messages, "auto", has_tools=True)
        assert (list(shorter) == messages) is is_whole
        assert report is not None and report.num_texts == (not is_whole)
        assert tokens.scorer.num_calls == (not is_whole), "nothing is scored that stays"


def test_auto_leaves_replies_whole_that_were_written_here() -> None:
    messages = [user("Write."), reply(LONG), user("What is in 7?")]
    for is_own in (True, False):
        compressor, _ = open_compressor()
        if is_own:
            compressor.shorten(messages[:1], "auto", has_tools=False)
        for _ in range(2):
            shorter = compressor.shorten(messages, "auto", has_tools=False)[0]
            assert (list(shorter) == messages) is is_own


def test_a_conversation_that_was_not_read_or_has_no_room_is_shortened() -> None:
    messages = tool_session()
    compressor, _ = open_compressor()
    cold = list(compressor.shorten(messages, "auto", has_tools=True)[0])
    assert (
        cold != messages and list(compressor.shorten(messages, "auto", has_tools=True)[0]) == cold
    )
    compressor.reset()
    compressor.shorten(messages[:3], "auto", has_tools=True)
    assert list(compressor.shorten([user("Hi."), *messages], "auto", has_tools=True)[0][1:]) == cold
    assert list(compressor.shorten(messages, "auto", has_tools=True, has_room=False)[0]) == cold
    assert list(compressor.shorten(messages, "auto", has_tools=True)[0]) == cold, "it stays so"
    compressor.reset()
    compressor.shorten(messages[:3], "auto", has_tools=True)
    assert list(compressor.shorten(messages, *ALWAYS, has_tools=True)[0]) != messages


def test_a_conversation_begins_as_it_did_a_turn_before() -> None:
    compressor, tokens = open_compressor()
    messages: list[Any] = [{"role": "system", "content": LONG}]
    before: list[Any] = []
    for turn in range(4):
        messages.append(user(f"{LONG}\n\nWhat is in {turn}?"))
        shorter, report = compressor.shorten(messages, *ALWAYS, has_tools=False)
        assert report is not None and report.num_texts == 2 * turn + 1
        assert report.num_cached == max(2 * turn - 1, 0)
        assert list(shorter[: len(before)]) == before
        assert shorter[0] == messages[0] and len(shorter[-1]["content"]) < len(LONG)
        assert shorter[-1]["content"].endswith(f"What is in {turn}?")
        before = list(shorter)
        messages.append(reply(f"{turn}: {LONG}"))
    assert tokens.scorer.num_calls == 7 and tokens.checkpoints == [None]


def test_a_gpu_is_warmed_up_where_texts_will_be_scored() -> None:
    for mode, gpu, num_calls in (("auto", "a GPU", 1), ("off", "a GPU", 0), ("auto", None, 0)):
        tokens: Any = FakeTokens()
        tokens.plan = SimpleNamespace(gpu=gpu)
        config = EngineConfig(compress=mode, warm_up=True)
        Compressor(tokens, Tokenizer.from_metadata(byte_metadata()), config).warm_up()
        assert tokens.scorer.num_calls == len(tokens.checkpoints) == num_calls


def test_times_are_split_and_models_opened_once() -> None:
    compressor, tokens = open_compressor()
    reports = []
    for number in range(2):
        messages = [user(f"{number} {LONG}"), reply("Fine."), user("Where is the kettle?")]
        reports.append(compressor.shorten(messages, *ALWAYS, has_tools=False)[1])
    for report in reports:
        assert report is not None and min(report.load_ms, report.read_ms, report.select_ms) > 0
        parts = report.load_ms + report.read_ms + report.select_ms
        assert parts == pytest.approx(report.score_ms)
    assert tokens.checkpoints == [None]


def test_what_was_dropped_is_counted() -> None:
    compressor, _ = open_compressor()
    messages = [user(LONG), reply("Fine."), user("Where is the kettle?")]
    shorter, report = compressor.shorten(messages, *ALWAYS, has_tools=False)
    assert report is not None
    text = shorter[0]["content"]
    assert report.tokens_before == len(LONG.encode()) and report.tokens_kept == len(text.encode())
    assert report.tokens_dropped > 0 and report.score_ms > 0
    assert text.count("tokens left out …]") == report.num_spans - 1
    _, again = compressor.shorten(messages, *ALWAYS, has_tools=False)
    assert again is not None and again.num_cached == 1 and again.score_ms == 0.0


def test_off_and_short_messages_change_nothing() -> None:
    compressor, tokens = open_compressor()
    messages = [user(LONG), reply("Fine."), user("Where is the kettle?")]
    assert compressor.shorten(messages, "off", has_tools=False) == (messages, None)
    short = [user("a" * 1024), reply("Fine."), user("Where is the kettle?")]
    assert list(compressor.shorten(short, *ALWAYS, has_tools=False)[0]) == short
    within = [user(LONG[:AUTO_TOKENS]), *messages[1:]]
    assert list(compressor.shorten(within, "auto", has_tools=False)[0]) == within
    assert tokens.scorer.num_calls == 0
    assert len(LONG) > AUTO_TOKENS, "else the next line would say nothing"
    assert compressor.shorten(messages, "auto", has_tools=False)[0][0] != messages[0]


def test_with_tools_only_what_is_old_is_shortened() -> None:
    compressor, _ = open_compressor()
    asked = user(f"{LONG}\n\nWhere is the kettle?")
    for has_tools in (True, False):
        shorter, _ = compressor.shorten([asked], *ALWAYS, has_tools=has_tools)
        assert (shorter[0] == asked) is has_tools
    shorter, _ = compressor.shorten([asked, reply("?"), user("Why?")], *ALWAYS, has_tools=True)
    assert shorter[0] != asked and list(shorter[1:]) == [reply("?"), user("Why?")]


def test_auto_does_not_have_the_target_read_a_new_text_twice() -> None:
    compressor, tokens = open_compressor()
    asked = user(f"{LONG}\n\nWhere is the kettle?")
    shorter, _ = compressor.shorten([asked], "auto", has_tools=False)
    assert list(shorter) == [asked] and tokens.scorer.num_calls == 0


def test_own_scores_keep_more_unless_told() -> None:
    messages, kept = tool_session(), []
    for keep in ("auto", 0.2):
        report = open_compressor()[0].shorten(messages, "auto", keep, has_tools=True)[1]
        assert report is not None and report.num_texts == 1
        kept.append(report.tokens_kept)
    assert kept[0] > 1.1 * kept[1]


@pytest.mark.parametrize(
    ("mode", "keep"), [("on", 0.1), ("auto", 0.0), ("auto", 1.5), ("auto", "x")]
)
def test_bad_options_are_refused(mode: str, keep: Any) -> None:
    with pytest.raises(ValueError, match="compress"):
        open_compressor()[0].shorten([], mode, keep)
    with pytest.raises(ValueError, match="compress"):
        EngineConfig(compress=mode, compress_keep=keep)


@pytest.fixture(scope="module", params=["self", "drafter"])
def engine(request: pytest.FixtureRequest, smollm2_path: Path) -> Iterator[Engine]:
    scorer = "self" if request.param == "self" else str(smollm2_path)
    options = {"compress": "always", "compress_keep": 0.05, "compress_with": scorer}
    target = str(make_shallow(smollm2_path))
    engine = Engine.open(target, draft="none", max_ctx=2048, **options)
    yield engine
    engine.close()


def make_text() -> str:
    lines = [f"Entry {number}: the weather was mild and nothing was seen." for number in range(90)]
    lines.insert(40, NEEDLE)
    return "\n".join(lines)


def test_a_reply_goes_on_from_the_shortened_prompt(engine: Engine) -> None:
    messages = [user(make_text()), reply("I have read it."), user("in which building is the pot?")]
    generation = engine.chat(messages, max_tokens=6)
    text = "".join(delta.text for delta in generation)
    usage = generation.usage
    report = usage.compression
    assert report is not None and report.num_texts == 1 and report.score_ms > 0
    full = len(engine.encode_chat(messages))
    assert usage.prompt_tokens == full - report.tokens_dropped < full // 2
    least_ms = usage.prefill_ms + report.score_ms
    assert usage.first_token_ms >= least_ms, "the first token waits for the scores"
    again = engine.generate(messages, max_tokens=6)
    assert "".join(delta.text for delta in again) == text
    assert again.usage.compression is not None and again.usage.compression.num_cached == 1
    assert again.usage.cached_tokens >= usage.prompt_tokens - 1
    shorter, _ = engine._compressor.shorten(messages, "always", 0.05, has_tools=False)
    if engine.tokens.config.compress_with != "self":
        assert NEEDLE in shorter[0]["content"]
    plain = engine.chat(shorter, max_tokens=6, compress="off")
    assert "".join(delta.text for delta in plain) == text and plain.usage.compression is None


def test_a_prompt_that_grows_too_long_is_shortened_after_all(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("draftree.compress.AUTO_TOKENS", 128)
    monkeypatch.setattr("draftree.chat._REPLY", 2)  # for a reply of 1100 tokens 1024 are left
    engine._compressor.reset()
    text = "\n".join(make_text().splitlines()[20:45])

    def ask(messages: list[Any]) -> Any:
        reply = engine.chat(messages, max_tokens=1100, compress="auto", compress_keep=0.05)
        next(reply)
        reply.close()
        return reply.usage

    messages: list[Any] = [user(text), reply("Fine."), user(text)]
    assert ask(messages[:1]).compression.num_texts == 0
    assert ask(messages[:3]).compression.num_texts == 0, "it was read whole"
    longer = ask([*messages, reply(text), user("Where is the kettle?")])
    assert longer.compression.num_texts == 3 and longer.compression.tokens_dropped > 100
