"""Tokenizers of real files, built once."""

import lzma
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from draftree.text.tokenizer import Tokenizer
from draftree.weights.file import open_checkpoint
from tests.golden import golden


def read_tokenizer(path: Path) -> Tokenizer:
    return Tokenizer.from_metadata(open_checkpoint(path).metadata)


@pytest.fixture(scope="session")
def smollm2(smollm2_path) -> Tokenizer:
    return read_tokenizer(smollm2_path)


@pytest.fixture(scope="session")
def qwen3_metadata(tmp_path_factory) -> Mapping[str, Any]:
    """The real Qwen3 vocabulary, 151,936 tokens."""
    path = tmp_path_factory.mktemp("vocabulary") / "qwen3.gguf"
    path.write_bytes(lzma.decompress(golden("tokenizer/vocab-qwen3-real.gguf.xz").read_bytes()))
    return open_checkpoint(path).metadata


@pytest.fixture(scope="session")
def qwen3(qwen3_metadata) -> Tokenizer:
    return Tokenizer.from_metadata(qwen3_metadata)


@pytest.fixture(scope="session")
def tiny_qwen35() -> Tokenizer:
    return read_tokenizer(golden("qwen35/tiny-qwen35-A-mixed.gguf"))
