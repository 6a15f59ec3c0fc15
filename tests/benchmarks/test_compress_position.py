"""Shortened prompts at their original positions: which those are, and that an engine takes them."""

from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.compress_position import Cut, find_positions, placed
from draftree.chat import Engine
from draftree.kernels.ops import Rope
from draftree.layers.attention import Attention
from draftree.text.compress import cut_text
from draftree.text.tokenizer import Tokenizer
from tests.text.metadata import byte_metadata

TEXT = "\n".join(f"Line {number}: naïve, and nothing of note." for number in range(60))


def cut(text: str, kept: set[int]) -> Cut:
    found, places = Cut(text), [*range(0, len(text), 40), len(text)]
    is_kept = [chunk in kept for chunk in range(len(places) - 1)]
    found.shorter = cut_text(text, places, is_kept, found.count)[0]
    return found


@pytest.mark.parametrize("kept", [{0, 20, 21, 40}, {10, 59}, {3}, set(range(99))])
def test_every_kept_token_stands_where_it_stood(kept: set[int]) -> None:
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    found = cut(TEXT, kept)
    whole, shorter = (
        tokenizer.encode(f"Read: {text}\n\nAnd now?") for text in (TEXT, found.shorter)
    )
    positions = find_positions(tokenizer, whole, shorter, found)
    assert len(positions) == len(shorter) and (np.diff(positions) > 0).all()
    same = [whole[at] == token for at, token in zip(positions, shorter, strict=True)]
    in_marks = sum(
        len(line.encode()) + 1 for line in found.shorter.split("\n") if line.startswith("[…")
    )
    assert len(same) - sum(same) <= in_marks
    assert positions[-9:].tolist() == list(range(len(whole) - 9, len(whole)))


def test_tables_of_a_gpu_are_exchanged_as_well() -> None:
    table = torch.arange(12.0).reshape(6, 2)
    rope = Rope(table, 2, interleaved=False)
    part: Any = None
    mixer = Attention(part, part, part, part, rope, 1, 2)
    model = SimpleNamespace(blocks=[SimpleNamespace(mixer=mixer)] * 2)
    engine: Any = SimpleNamespace(tokens=SimpleNamespace(target=SimpleNamespace(model=model)))
    with placed(engine, [0, 2, 3]):
        assert table[:, 0].tolist() == [0, 4, 6, 8, 10, 10]
    assert table[:, 0].tolist() == [0, 2, 4, 6, 8, 10]


def test_an_engine_reads_at_given_positions_and_comes_back(smollm2_path) -> None:
    engine = Engine.open(str(smollm2_path), draft="none", max_ctx=256, math="exact", device="cpu")
    ids = engine.tokenizer.encode("The kettle is in the shed, the cup is in the house. The kettle")

    def write() -> list[tuple[str, float]]:
        engine.tokens.reset()
        reply = engine.complete(ids, max_tokens=8, logprobs=1)
        return [(t.text.decode(), t.logprob) for delta in reply for t in delta.logprobs]

    fresh = write()
    with placed(engine, np.arange(len(ids)) + 40):
        shifted = write()
    with placed(engine, 3 * np.arange(len(ids))):
        apart = write()
    assert write() == fresh, "the table is as it was"
    assert [text for text, _ in shifted] == [text for text, _ in fresh], "only distances count"
    assert [p for _, p in shifted] == pytest.approx([p for _, p in fresh], abs=0.01)
    assert abs(apart[0][1] - fresh[0][1]) > 0.1 or apart[0][0] != fresh[0][0]
    engine.close()
