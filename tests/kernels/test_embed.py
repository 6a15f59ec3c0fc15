"""Embedding rows straight from the file's bytes: the decoder's values, bit for bit."""

import numpy as np
import pytest

from draftree.kernels.cpu.embed import record_embed
from draftree.kernels.cpu.pass_args import NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.thread_pool import ThreadPool
from draftree.kernels.quant.formats import QuantType, dequantize
from tests.golden import golden
from tests.kernels.raw import random_raw


@pytest.fixture(scope="module")
def pool():
    pool = ThreadPool(2)
    yield pool
    pool.close()


def _embed(pool: ThreadPool, raw: np.ndarray, qtype: QuantType, tokens: np.ndarray) -> np.ndarray:
    step = PassArgs(len(tokens) + 3, 1)
    step.set_chain(tokens, 0)
    cols = raw.shape[1] // qtype.block_bytes * qtype.block_len
    out = np.full((len(tokens) + 3, cols), np.nan, np.float32)
    program = Program(pool)
    record_embed(program, step, raw, qtype, step.tokens, out)
    program.run()
    assert np.isnan(out[len(tokens) :]).all()
    return out[: len(tokens)]


@pytest.mark.parametrize("qtype", QuantType, ids=lambda qtype: qtype.name)
def test_rows_are_those_of_the_decoder(pool: ThreadPool, qtype: QuantType) -> None:
    raw = random_raw(np.random.default_rng(qtype), qtype, 40, 512)
    raw.flags.writeable = False
    tokens = np.array([7, 0, 39, 7, 12])
    found = _embed(pool, raw, qtype, tokens)
    expected = dequantize(raw[tokens], qtype)
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


@pytest.mark.parametrize(
    "qtype", [q for q in QuantType if q is not QuantType.F32], ids=lambda qtype: qtype.name
)
@pytest.mark.parametrize("kind", ["rand", "gauss"])
def test_blocks_are_those_of_ggml(pool: ThreadPool, qtype: QuantType, kind: str) -> None:
    with np.load(golden("quants/quants.npz")) as arrays:
        raw = arrays[f"{qtype.name}.{kind}.raw"].reshape(-1, qtype.block_bytes)
        expected = arrays[f"{qtype.name}.{kind}.f32"].reshape(len(raw), -1)
    found = _embed(pool, raw, qtype, np.arange(len(raw)))
    np.testing.assert_array_equal(found.view(np.uint32), expected.view(np.uint32))


def test_only_the_counted_rows_of_a_narrow_matrix(pool: ThreadPool) -> None:
    raw = random_raw(np.random.default_rng(2), QuantType.F16, 9, 5)
    step = PassArgs(6, 6)
    step.control[NUM_TOKENS] = 2
    tokens = np.array([8, 3, 1, 1, 1, 1])
    out = np.full((6, 5), np.nan, np.float32)
    program = Program(pool)
    record_embed(program, step, raw, QuantType.F16, tokens, out)
    program.run()
    np.testing.assert_array_equal(out[:2], dequantize(raw, QuantType.F16)[[8, 3]])
    assert np.isnan(out[2:]).all()
