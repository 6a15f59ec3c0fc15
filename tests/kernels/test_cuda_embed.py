"""Rows of the embedding table from the GPU against the plain decoder, bit for bit."""

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.compile import Gpu  # noqa: E402
from draftree.kernels.cuda.embed import EmbedTable, embed, new_embed_table  # noqa: E402
from draftree.kernels.quant.formats import QuantType, dequantize  # noqa: E402
from tests.kernels.raw import random_raw  # noqa: E402

VOCABULARY = 9


def read(table: EmbedTable, ids: list[int], live: int, gpu: Gpu) -> np.ndarray:
    """Rows in a buffer that is wider than they are."""
    place = gpu.place
    tokens = torch.tensor(ids, dtype=torch.int32, device=place)
    out = torch.full((len(ids), table.width + 8), -7.0, device=place)
    embed(
        table, tokens, out[:, : table.width], torch.tensor([live], dtype=torch.int32).to(place), gpu
    )
    assert (out[:, table.width :] == -7.0).all()
    return out[:, : table.width].cpu().numpy()


@pytest.mark.parametrize("qtype", list(QuantType), ids=lambda q: q.name)
def test_rows_are_those_of_the_plain_decoder(qtype: QuantType, any_gpu: Gpu) -> None:
    for width in (256, 1280) if qtype.block_len == 256 else (32, 1056):
        raw = random_raw(np.random.default_rng(width), qtype, VOCABULARY, width)
        table = new_embed_table(raw, qtype, any_gpu)
        ids = [8, 0, 3, 3, 5]
        got = read(table, ids, 4, any_gpu)
        expected = dequantize(raw, qtype)[ids]
        if table.qtype != qtype:
            expected = expected.astype(np.float16).astype(np.float32)
        assert np.array_equal(got[:4].view(np.uint32), expected[:4].view(np.uint32))
        assert (got[4] == -7.0).all()


def test_no_live_rows(any_gpu: Gpu) -> None:
    raw = random_raw(np.random.default_rng(0), QuantType.Q4_K, VOCABULARY, 256)
    assert (read(new_embed_table(raw, QuantType.Q4_K, any_gpu), [1, 2], 0, any_gpu) == -7.0).all()


def test_wrong_shapes_are_refused(any_gpu: Gpu) -> None:
    raw = random_raw(np.random.default_rng(0), QuantType.F16, VOCABULARY, 64)
    table = new_embed_table(raw, QuantType.F16, any_gpu)
    tokens, live = (torch.zeros(n, dtype=torch.int32, device=any_gpu.place) for n in (2, 1))
    with pytest.raises(ValueError, match="float32 rows of 64"):
        embed(table, tokens, torch.zeros((2, 32), device=any_gpu.place), live, any_gpu)
    with pytest.raises(ValueError, match="4 tokens as int32"):
        embed(table, tokens, torch.zeros((4, 64), device=any_gpu.place), live, any_gpu)
    with pytest.raises(ValueError, match="16 bytes"):
        embed(table, tokens, torch.zeros((2, 66), device=any_gpu.place)[:, 1:65], live, any_gpu)
    with pytest.raises(ValueError, match="multiple of 4"):
        new_embed_table(np.zeros((4, 84), np.uint8), QuantType.F16, any_gpu)
