import ctypes

import numpy as np
import pytest

from draftree.kernels.cpu import pairs
from draftree.kernels.cpu.isa import ALL_ISAS, supported_isas
from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.pairs import PAIR_ROWS, score_pairs, weigh_pairs
from draftree.kernels.cpu.quads import WORD_STEP, WORD_TOP

DIM, COLS = 48, 32


def _probe(isa_index):
    """A kernel of its own for each instruction set: what it closes over tells their code apart."""

    @kernel
    def probe(args, ticket, thread, num_threads):
        if isa_index < 0:
            return
        left, out, out_row, a, a_row, keys = args[0], args[1], args[2], args[3], args[4], args[5]
        score_pairs(left, out, out_row, a, a_row, keys, args[6], args[7], args[8], keys)
        out, a, a_row, values = args[9], args[10], args[11], args[12]
        weigh_pairs(left, out, out_row, a, a_row, values, args[13], args[14], args[15])

    return probe


def _run(probe, *args):
    words = [a.ctypes.data if isinstance(a, np.ndarray) else a for a in args]
    table = np.array(words, dtype=np.int64)
    call = ctypes.CFUNCTYPE(None, ctypes.c_void_p, *[ctypes.c_int64] * 3)(probe.address)
    call(table.ctypes.data, 0, 0, 1)


@pytest.mark.parametrize("isa", supported_isas(), ids=lambda isa: isa.name)
def test_all_instruction_sets_give_the_same_integers(isa, monkeypatch):
    monkeypatch.setattr(pairs, "current_isa", lambda: isa)
    probe = _probe(ALL_ISAS.index(isa))
    rng = np.random.default_rng(5)
    queries = rng.integers(-WORD_TOP, WORD_TOP + 1, (PAIR_ROWS, DIM), dtype=np.int16)
    queries[:, :2] = WORD_TOP, -WORD_TOP
    keys = rng.integers(-127, 128, (COLS, DIM), dtype=np.int8)
    tiles = np.ascontiguousarray(keys.reshape(2, 16, DIM // 2, 2).transpose(0, 2, 1, 3))
    scales = rng.random(COLS, dtype=np.float32)
    weights = rng.integers(0, WORD_TOP + 1, (PAIR_ROWS, 2 * WORD_STEP), dtype=np.int16)
    weights[:, 2 * 9 :] = 0
    values = rng.integers(-127, 128, (2 * WORD_STEP, 2 * COLS), dtype=np.int8)
    exact = weights.astype(np.int32) @ values[:, :COLS].astype(np.int32)
    products = queries.astype(np.int32) @ keys.T.astype(np.int32)
    for left in range(1, PAIR_ROWS + 1):
        scores = np.full((PAIR_ROWS, COLS), np.nan, np.float32)
        sums = np.ones((PAIR_ROWS, COLS), np.int32)
        first = (left, scores, 4 * COLS, queries, 2 * DIM, tiles, 16 * DIM, scales, DIM // 2)
        second = (sums, weights, 2 * 2 * WORD_STEP, values, 2 * COLS, 9)
        _run(probe, *first, *second, 0)
        np.testing.assert_array_equal(scores[:left], products[:left].astype(np.float32) * scales)
        np.testing.assert_array_equal(sums[:left], exact[:left] + 1)
        _run(probe, *first, *second, 1)
        np.testing.assert_array_equal(sums[:left], exact[:left])
