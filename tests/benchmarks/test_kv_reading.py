"""A tiny model reads in several formats; errors are those of its own keys."""

import numpy as np
import pytest
import torch

from benchmarks.kv_reading import GpuKvReader, KvReader, _attend, round_rows, split_pair, turn_rows
from benchmarks.needle import Haystack, Needle
from draftree.kernels.cpu.rope import rope_table
from draftree.kernels.ops import Rope
from draftree.kernels.quant.kv_centre import mean_key
from draftree.kernels.quant.kv_format import KEY_FORMATS
from tests.kernels.reference.rope import rope_reference
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
    for name in ("values", "output"):
        sizes = [getattr(errors[pair], name) for pair in ("q8_0", "q4", "tq3_0")]
        assert 0 < sizes[0] < sizes[1] < sizes[2] < 1, (name, sizes)
    # Heads of 64 have keys of 5 bits in both.
    assert 0 < errors["q8_0"].keys < errors["q4"].keys < 1
    assert errors["tq3_0"].keys == pytest.approx(errors["q4"].keys, rel=0.02)


def test_a_gpu_reads_the_same(reader, any_gpu) -> None:
    """In a small format, but for values that fall on the other side of a level."""
    hay = Haystack(IDS[:40], [True] * 40, [Needle(0, [5, 6], [7, 8])], [24, 40])
    gpu = GpuKvReader(tiny_path("qwen3"), 256, any_gpu)
    expected = {pair: reader.read(pair, hay)[0] for pair in ("f16", "q4")}
    found = {pair: gpu.read(pair, hay)[0] for pair in ("f16", "q4")}
    np.testing.assert_allclose(found["f16"].log_probs, expected["f16"].log_probs, atol=0.02)
    assert found["f16"].best == expected["f16"].best and len(found["q4"].best) == 39
    assert found["q4"].found.keys() == expected["q4"].found.keys()
    q4 = [np.array(side["q4"].log_probs) for side in (found, expected)]
    rounded = np.abs(q4[1] - expected["f16"].log_probs).mean()
    assert rounded > 0.05 and np.abs(q4[0] - q4[1]).mean() < 0.5 * rounded


def test_small_formats_are_read_without_the_centre_of_keys(reader) -> None:
    target, recorded = reader._open("q4")
    assert target.has_centred_keys and target.state.committed == 0 and target.num_forwards == 0
    assert all(np.abs(cache.centre).max() > 0 for _, cache in recorded.taped)
    assert not reader._open("q8_0")[0].has_centred_keys


def test_rows_are_turned_as_the_model_turns_them() -> None:
    positions, dim = 5, 64
    keys = np.random.default_rng(1).standard_normal((2, positions, dim)).astype(np.float32)
    inv_freq = 1e4 ** (-np.arange(dim // 2) / (dim // 2))
    for interleaved in (True, False):
        rope = Rope(rope_table(inv_freq, 8), dim, interleaved)
        turned = turn_rows(keys, rope)
        wanted = rope_reference(
            torch.from_numpy(keys).transpose(0, 1),
            torch.arange(positions),
            torch.from_numpy(inv_freq),
            interleaved,
        )
        np.testing.assert_allclose(turned, wanted.transpose(0, 1).numpy(), atol=1e-5)
        angles = rope.table[:positions, 0], rope.table[:positions, 1]
        mean = mean_key(turned, *angles, interleaved=interleaved)
        np.testing.assert_allclose(mean, keys.mean(axis=1).ravel(), atol=1e-5)


def test_attention_is_causal() -> None:
    rng = np.random.default_rng(1)
    q, k, v = (rng.standard_normal(shape) for shape in ((2, 3, 4, 64), (2, 20, 64), (2, 20, 64)))
    first = _attend(q[:, :, -1:], k[:, :17], v[:, :17])
    np.testing.assert_allclose(_attend(q, k[:, :17], v[:, :17])[:, :, -1:], first)


def test_rounded_rows_point_where_they_pointed() -> None:
    rows = np.random.default_rng(2).standard_normal((50, 64)).astype(np.float32)
    for form in KEY_FORMATS.values():
        assert np.corrcoef(round_rows(rows, form).ravel(), rows.ravel())[0, 1] > 0.97
