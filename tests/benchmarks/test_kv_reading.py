"""A tiny model reads in several formats; errors are those of its own keys."""

import numpy as np
import pytest

from benchmarks.kv_reading import KvReader, _attend, round_rows, split_pair
from benchmarks.needle import Haystack, Needle
from draftree.kernels.quant.kv_format import KEY_FORMATS
from tests.tiny import open_target, run_chain, tiny_path

IDS = np.random.default_rng(0).integers(0, 200, 150).tolist()
HAY = Haystack(IDS, [i % 5 != 0 for i in range(150)], [Needle(0, [5, 6], [7, 8])], [100, 150])


@pytest.fixture(scope="module")
def reader():
    reader = KvReader(tiny_path("qwen3"), 1, 256)
    yield reader
    reader.close()


def test_pairs() -> None:
    assert split_pair("q4") == ("q4", "q4")
    assert split_pair("q8_0/q4") == ("q8_0", "q4")
    assert split_pair("q4+centre") == ("q4", "q4")


def test_readings_are_those_of_the_engine(reader) -> None:
    reading, errors = reader.read("f16", HAY, ["q8_0", "q4", "tq3_0"])
    path = tiny_path("qwen3")
    logits = run_chain(open_target(path, exact=False, num_threads=1, kv_dtype=np.float16), IDS, 50)
    wide = logits.astype(np.float64)
    total = np.log(np.exp(wide).sum(axis=1))
    expected = [wide[i, IDS[i + 1]] - total[i] for i in range(149) if (i + 1) % 5]
    np.testing.assert_allclose(reading.log_probs, expected, atol=1e-3)
    assert reading.best == [int(logits[i].argmax()) for i in range(149) if (i + 1) % 5]
    assert {stop: len(found) for stop, found in reading.found.items()} == {"100": 1, "150": 1}
    for name in ("keys", "values", "output"):
        sizes = [getattr(errors[pair], name) for pair in ("q8_0", "q4", "tq3_0")]
        assert 0 < sizes[0] < sizes[1] < sizes[2] < 1, (name, sizes)


def test_a_centre_changes_nothing_but_by_rounding(reader) -> None:
    reader.calibrate(IDS[:64])
    plain, _ = reader.read("f16", HAY)
    centred, _ = reader.read("f16+centre", HAY)
    np.testing.assert_allclose(centred.log_probs, plain.log_probs, atol=0.05)
    assert centred.log_probs != plain.log_probs
    rounded = [reader.read(pair, HAY)[0].log_probs for pair in ("q4", "q4+centre")]
    assert rounded[0] != plain.log_probs and rounded[0] != rounded[1]


def test_a_softmax_does_not_see_what_all_keys_share() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 3, 4, 64), (2, 20, 64), (2, 20, 64)))
    shift = 5 * rng.standard_normal((2, 1, 64))
    np.testing.assert_allclose(_attend(q, k + shift, v), _attend(q, k, v), atol=1e-9)
    first = _attend(q[:, :, -1:], k[:, :17], v[:, :17])
    np.testing.assert_allclose(_attend(q, k[:, :17], v[:, :17])[:, :, -1:], first)


def test_rounded_rows_point_where_they_pointed() -> None:
    rows = np.random.default_rng(2).standard_normal((50, 64)).astype(np.float32)
    for form in KEY_FORMATS.values():
        assert np.corrcoef(round_rows(rows, form).ravel(), rows.ravel())[0, 1] > 0.97
