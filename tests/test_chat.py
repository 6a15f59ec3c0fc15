"""Text in, text out: the public Engine with the default model."""

from collections.abc import Iterator
from pathlib import Path

import pytest

from draftree import Engine
from draftree.core import FinishReason, SamplingParams
from draftree.errors import CapacityError, DraftreeError, TokenizerError


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    engine = Engine.open(str(smollm2_path), max_ctx=512, draft="none")
    yield engine
    engine.close()


def test_streams_text_and_counts_it(engine: Engine) -> None:
    generation = engine.generate("def fibonacci(n):", max_tokens=24)
    text = "".join(delta.text for delta in generation)
    assert "return" in text and generation.text == text
    assert generation.usage.completion_tokens == 24
    assert generation.finish_reason is FinishReason.LENGTH
    assert generation.usage.prompt_tokens == len(engine.tokenizer.encode("def fibonacci(n):"))


def test_same_seed_same_text_whatever_was_asked_before(engine: Engine) -> None:
    sampling = SamplingParams(temperature=0.9, top_p=0.95, seed=11)

    def write(seed_params: SamplingParams) -> str:
        generation = engine.generate("Once upon a time", max_tokens=16, sampling=seed_params)
        return "".join(delta.text for delta in generation)

    first = write(sampling)
    write(SamplingParams(temperature=0.9, seed=12))
    assert write(sampling) == first
    assert write(SamplingParams(temperature=0.9, top_p=0.95, seed=13)) != first


def test_stop_strings_end_the_text_and_are_not_part_of_it(engine: Engine) -> None:
    whole = "".join(d.text for d in engine.generate("def fibonacci(n):", max_tokens=24))
    stop = whole[10:16]
    generation = engine.generate("def fibonacci(n):", max_tokens=24, stop=[stop])
    assert "".join(d.text for d in generation) == whole[: whole.index(stop)]
    assert generation.finish_reason is FinishReason.STOP


def test_chat_answers_and_follow_up_is_not_prefilled_again(engine: Engine) -> None:
    messages = [{"role": "user", "content": "Say hello."}]
    first = engine.generate(messages, max_tokens=12)
    answer = "".join(delta.text for delta in first)
    assert answer.strip()
    messages += [{"role": "assistant", "content": answer}, {"role": "user", "content": "Again."}]
    second = engine.generate(messages, max_tokens=4)
    list(second)
    assert second.usage.cached_tokens >= first.usage.prompt_tokens - 1


def test_a_reply_goes_on_from_its_beginning(engine: Engine) -> None:
    """Cut anywhere between two tokens, the greedy text is the same."""
    messages = [{"role": "user", "content": "Tell me about the sea."}]
    whole = engine.chat(messages, max_tokens=16)
    text = "".join(delta.text for delta in whole)
    cut = text.index(" ", len(text) // 2)
    begun = {"role": "assistant", "content": text[:cut]}
    rest = engine.chat([*messages, begun], max_tokens=16, continue_final=True)
    assert "".join(delta.text for delta in rest).startswith(text[cut:])


def test_closing_cancels_and_the_next_request_works(engine: Engine) -> None:
    generation = engine.generate("Count: 1, 2, 3,", max_tokens=200)
    next(generation)
    generation.close()
    assert generation.finish_reason is FinishReason.CANCELLED
    assert "".join(d.text for d in engine.generate("Count: 1, 2, 3,", max_tokens=4))


def test_bad_requests_are_refused_with_a_sentence(engine: Engine) -> None:
    with pytest.raises(CapacityError, match="max-ctx"):
        engine.generate("word " * 2000)
    with pytest.raises(ValueError, match="max_tokens"):
        engine.generate("hello", max_tokens=0)
    with pytest.raises(DraftreeError):
        engine.generate([])


def test_unknown_names_and_options() -> None:
    with pytest.raises(DraftreeError):
        Engine.open("no-such-model")
    with pytest.raises(TypeError):
        Engine.open("no-such-model", colour="blue")


def test_an_empty_prompt_is_refused(engine: Engine) -> None:
    for ask in (engine.complete, engine.generate):
        with pytest.raises(ValueError, match=r"^the prompt is empty$"):
            ask("")
    with pytest.raises(ValueError, match=r"^the prompt is empty$"):
        engine.complete([])
    assert list(engine.generate("", chat=True, max_tokens=2))  # an empty message can be answered


def test_a_window_leaves_the_system_prompt(smollm2_path: Path) -> None:
    engine = Engine.open(str(smollm2_path), max_ctx=512, draft="none", window=128)
    message = [{"role": "user", "content": "Hi"}]
    system = [{"role": "system", "content": "You know that the sea is green, and say so. " * 3}]
    sinks = []
    for messages in (message, system + message):
        for generation in (engine.chat(messages, max_tokens=1), engine.generate(messages)):
            next(generation)
            generation.close()
            assert generation.usage.window == 128
            sinks.append(generation.usage.sinks)
    ids = engine.encode_chat(system + message)
    text = b"".join(map(engine.tokenizer.token_bytes, ids[: sinks[2]])).decode()
    assert sinks[0] == sinks[1] and sinks[2] == sinks[3] and text.endswith("user\n")
    generation = engine.complete("The sea", max_tokens=1)
    next(generation)
    assert generation.usage.sinks == 4
    engine.close()


def test_a_template_of_the_users_own(smollm2_path, tmp_path):
    path = tmp_path / "own.jinja"
    path.write_text("{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}> ")
    options = {"max_ctx": 64, "draft": "none"}
    engine = Engine.open(str(smollm2_path), chat_template=str(path), **options)
    try:
        assert engine.render_chat([{"role": "user", "content": "Hé"}]) == "[user] Hé\n> "
    finally:
        engine.close()
    for missing in (str(tmp_path / "none.jinja"), "no such.jinja", "no such/file"):
        with pytest.raises(TokenizerError, match=f"{missing} cannot be read"):
            Engine.open(str(smollm2_path), chat_template=missing, **options)
