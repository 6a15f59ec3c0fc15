"""The default pair: found without being asked for, and worth having."""

from pathlib import Path

import pytest

from draftree.chat import Engine
from draftree.config import EngineConfig
from draftree.engine.locate import locate
from draftree.errors import ModelError
from tests.tiny import tiny_path

PROMPTS = (
    "def is_even(n: int) -> bool:\n",
    "The three states of water are",
)
NUM_TOKENS = 48


def test_the_default_model_has_a_draft(smollm2_path: Path) -> None:
    located = locate(str(smollm2_path), "auto")
    assert located.draft_checkpoint is not None
    assert located.draft_checkpoint.architecture == "dflash"
    assert locate(str(smollm2_path), "none").draft_checkpoint is None


def test_the_block_in_the_file_of_a_model() -> None:
    located = locate(str(tiny_path("qwen35-mtp")), "mtp")
    assert located.draft_checkpoint is not None
    assert located.draft_checkpoint.architecture == "mtp"
    assert locate(str(tiny_path("qwen35-mtp")), "none").draft_checkpoint is None
    with pytest.raises(ModelError, match="no block for multi-token prediction"):
        locate(str(tiny_path("llama")), "mtp")


def test_the_default_pair_writes_the_same_text_in_fewer_rounds(smollm2_path: Path) -> None:
    config = EngineConfig(max_ctx=512, ngram="off")
    plain = Engine.open(str(smollm2_path), config, draft="none", budget=0)
    paired = Engine.open(str(smollm2_path), config, budget=22)
    num_tokens = num_rounds = 0
    for prompt in PROMPTS:
        texts = []
        for engine in (plain, paired):
            generation = engine.generate(prompt, max_tokens=NUM_TOKENS)
            for _ in generation:
                pass
            texts.append(generation.text)
        assert texts[0] == texts[1]
        num_tokens += generation.usage.completion_tokens
        num_rounds += generation.usage.rounds.num_rounds
    plain.close()
    paired.close()
    assert num_tokens / num_rounds > 2.0
