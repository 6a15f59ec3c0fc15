"""Embeddings: of length one, of the right hidden states, and without a trace in conversations."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from draftree import Engine
from draftree.engine import engine as engine_module
from draftree.errors import CapacityError, EngineError
from draftree.kernels.quant.formats import dequantize


@pytest.fixture(scope="module")
def engine(smollm2_path: Path) -> Iterator[Engine]:
    engine = Engine.open(str(smollm2_path), max_ctx=256, chunk=32)
    yield engine
    engine.close()


def test_the_vector_of_one_token_scores_tokens_as_the_head_does(engine: Engine) -> None:
    """Of a text of one token the mean is that token's state, which the head reads, too."""
    rows = engine.tokens.target.model.head_rows
    head = dequantize(rows.raw, rows.qtype)
    for word in ("def", "The", "import"):
        ids = engine.tokenizer.encode(word, add_special=False)
        assert len(ids) == 1
        reply = engine.complete(ids, max_tokens=1, logprobs=5)
        (top,) = (score.top for delta in reply for score in delta.logprobs)
        scores = head @ engine.embed(ids)
        likeliest = np.argsort(-scores)[:5].tolist()
        assert top[0].token_id == likeliest[0]
        assert {each.token_id for each in top} == set(likeliest)  # two may be nearly the same


def test_long_texts_are_the_mean_over_their_chunks(engine: Engine) -> None:
    ids = engine.tokenizer.encode("The tide rises and falls twice a day. " * 8)
    assert len(ids) > 64, "one chunk"
    vector = engine.embed(ids)
    assert vector.dtype == np.float32
    assert abs(float(np.linalg.norm(vector)) - 1) < 1e-6
    assert np.array_equal(vector, engine.embed("The tide rises and falls twice a day. " * 8))
    near, far = engine.embed("Tides rise and fall twice a day."), engine.embed("import sys")
    assert float(vector @ near) > float(vector @ far)


def test_a_conversation_between_two_rounds_is_not_disturbed(engine: Engine) -> None:
    def write(embed: bool) -> str:
        generation = engine.complete("Once upon a time", max_tokens=24)
        generation.pause_when(lambda: embed)
        text = ""
        for delta in generation:
            text += delta.text
            if delta.kind == "pause":
                engine.embed("Something else entirely, in the middle of a tale.")
        return text

    assert write(embed=True) == write(embed=False) != ""


def test_texts_that_cannot_be_embedded(engine: Engine) -> None:
    for wrong, words in (([], "empty"), ([-1], "vocabulary"), ([10**6], "vocabulary")):
        with pytest.raises(ValueError, match=words):
            engine.embed(wrong)
    assert engine.tokens.max_embedding_len == 256 < engine_module.MAX_LEN
    assert len(engine.embed([1] * 256)) == engine.tokens.model_config.hidden_size
    with pytest.raises(CapacityError, match="257 tokens, of at most 256"):
        engine.embed([1] * 257)


def test_a_closed_engine_embeds_nothing(smollm2_path: Path) -> None:
    engine = Engine.open(str(smollm2_path), max_ctx=64, draft="none")
    engine.close()
    with pytest.raises(EngineError, match="closed"):
        engine.embed("a")
