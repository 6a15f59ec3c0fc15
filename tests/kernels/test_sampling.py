import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from draftree.kernels.cpu.sampling import (
    SamplingArgs,
    SamplingScratch,
    choose,
    gumbel,
)
from draftree.kernels.cpu.select import rank_rows
from tests.examples import examples
from tests.kernels.reference.sampling import (
    choose_reference,
    gumbel_reference,
    kept_reference,
    penalize_reference,
)

EVERY = np.empty(0, np.int64)  # all tokens, in order


def _choose(logits, filters, seed=0, position=0, **seen):
    return choose(logits, filters, seed, position, SamplingScratch(len(logits)), **seen)


def _row(rng, size, spread=3.0):
    return (spread * rng.standard_normal(size)).astype(np.float32)


@given(st.integers(0, 2**63 - 1), st.integers(0, 2**40), st.integers(0, 300_000))
@examples(300)
def test_noise_equals_reference(seed, position, token):
    expected = gumbel_reference(seed, position, token)
    assert gumbel(seed, position, token) == pytest.approx(expected, rel=2e-7, abs=1e-7)


def test_noise_is_pinned():
    """Saved conversations and other machines rely on these very numbers."""
    found = [gumbel(0, 0, 0), gumbel(1, 2, 3), gumbel(2**63 - 1, 10**6, 151_935)]
    assert [float(x).hex() for x in found] == PINNED


PINNED = ["-0x1.4c77e60000000p-4", "0x1.0f70840000000p-1", "0x1.c04e520000000p+1"]


@pytest.mark.parametrize("vary", ["seed", "position", "token"])
def test_noise_is_uniform_along_every_argument(vary):
    """e^-e^-noise is uniform and neighbours are uncorrelated, whichever argument counts up."""
    count = 20_000
    point = {"seed": 7, "position": 7, "token": 7}
    u = np.empty(count)
    for i in range(count):
        point[vary] = i
        u[i] = np.exp(-np.exp(-np.float64(gumbel(**point))))
    bins = np.histogram(u, 50, (0, 1))[0]
    assert ((bins - count / 50) ** 2 / (count / 50)).sum() < 95  # chi-square, 49 degrees: 1e-4
    for lag in (1, 2, 16, 64):
        assert abs(np.corrcoef(u[lag:], u[:-lag])[0, 1]) < 0.03


@pytest.mark.parametrize("size", [1, 15, 63, 65, 1000, 49_152])
def test_greedy_is_the_first_largest(size):
    rng = np.random.default_rng(size)
    logits = np.round(_row(rng, size))  # many ties
    assert _choose(logits, SamplingArgs(temperature=0.0)) == int(logits.argmax())


@examples(150)
@given(
    size=st.sampled_from([1, 15, 63, 65, 400]),
    spread=st.sampled_from([0.0, 0.5, 3.0, 12.0]),
    temperature=st.sampled_from([0.0, 0.3, 1.0, 2.5]),
    top_k=st.sampled_from([0, 1, 5, 40, 1000]),
    top_p=st.sampled_from([0.11, 0.79, 0.953, 1.0]),
    min_p=st.sampled_from([0.0, 0.05, 0.5]),
    seed=st.integers(0, 2**63 - 1),
    position=st.integers(0, 1000),
)
def test_choice_equals_reference(size, spread, temperature, top_k, top_p, min_p, seed, position):
    logits = _row(np.random.default_rng(seed), size, spread)
    filters = SamplingArgs(temperature, top_k, top_p, min_p)
    expected = choose_reference(
        torch.from_numpy(logits), temperature, top_k, top_p, min_p, seed, position
    )
    assert _choose(logits, filters, seed, position) == expected


@pytest.mark.parametrize(
    "filters",
    [
        SamplingArgs(1.5),
        SamplingArgs(0.7, top_p=0.9),
        SamplingArgs(1.0, top_k=7),
        SamplingArgs(1.0, min_p=0.02),
    ],
)
def test_choices_follow_the_probabilities(filters):
    logits = _row(np.random.default_rng(3), 30, 1.5)
    scratch, count = SamplingScratch(30), 20_000
    found = [choose(logits, filters, 11, position, scratch) for position in range(count)]
    kept = kept_reference(torch.from_numpy(logits), *filters[:4])
    expected = np.zeros(30)
    expected[kept] = torch.from_numpy(logits[kept] / filters.temperature).double().softmax(0)
    share = np.bincount(found, minlength=30) / count
    assert (share[expected == 0] == 0).all()
    assert np.abs(share - expected).max() < 5 * np.sqrt(0.25 / count)


def test_share_of_a_flat_row():
    """Nothing stands out, so every token lies near the threshold; ties go by id."""
    logits = np.zeros(1000, np.float32)
    found = {_choose(logits, SamplingArgs(1.0, top_p=0.1), 0, position) for position in range(400)}
    assert max(found) <= 100 and len(found) > 80


def test_masked_tokens_are_never_chosen():
    rng = np.random.default_rng(0)
    logits = _row(rng, 500)
    logits[100:] = -np.inf
    for filters in (SamplingArgs(5.0), SamplingArgs(5.0, top_p=0.99), SamplingArgs(5.0, top_k=300)):
        assert all(_choose(logits, filters, 3, position) < 100 for position in range(50))
    logits[:99] = -np.inf
    assert _choose(logits, SamplingArgs(1.0)) == 99


def test_penalties_equal_reference():
    rng = np.random.default_rng(1)
    logits, kept = _row(rng, 200), None
    ids = rng.choice(200, 60, replace=False).astype(np.int64)
    counts = rng.integers(0, 4, 60)
    before = logits.copy()
    for penalties in ((1.3, 0.0, 0.0), (1.0, 0.6, 0.2), (0.8, -0.5, 0.4)):
        seen = dict(zip(ids.tolist(), counts.tolist(), strict=True))
        kept = penalize_reference(torch.from_numpy(logits), seen, *penalties).float()
        for position in range(40):
            filters = SamplingArgs(1.0, 0, 1.0, 0.0, *penalties)
            found = _choose(logits, filters, 5, position, seen_ids=ids, seen_counts=counts)
            assert found == choose_reference(kept, 1.0, 0, 1.0, 0.0, 5, position)
        greedy = SamplingArgs(0.0, 0, 1.0, 0.0, *penalties)
        assert _choose(logits, greedy, seen_ids=ids, seen_counts=counts) == int(kept.argmax())
    np.testing.assert_array_equal(logits, before)


@pytest.mark.parametrize("size", [8, 65, 5000])
def test_largest_candidates(size):
    rng = np.random.default_rng(size)
    logits = np.round(np.stack([_row(rng, size) for _ in range(5)]), 1)
    _, ids, log_probs = rank_rows(logits, EVERY, 0.0, 0, 0, 0.0, 8)
    expected = torch.from_numpy(logits).double().log_softmax(1).numpy()
    for row in range(5):
        order = np.lexsort((np.arange(size), -logits[row]))[:8]
        np.testing.assert_array_equal(ids[row], order)
        np.testing.assert_allclose(log_probs[row], expected[row][order], atol=2e-6)


@settings(max_examples=40, deadline=None)
@given(
    seed=st.integers(0, 2**63 - 1),
    size=st.sampled_from([65, 700]),
    spread=st.sampled_from([0.0, 2.0, 8.0]),
    temperature=st.sampled_from([0.2, 1.0, 3.0]),
)
def test_noisy_candidates(seed, size, spread, temperature):
    logits = np.stack([_row(np.random.default_rng(seed + i), size, spread) for i in range(3)])
    _, ids, log_probs = rank_rows(logits, EVERY, temperature, seed, 40, np.inf, 6)
    expected = torch.from_numpy(logits).double().log_softmax(1).numpy()
    for row in range(3):
        noise = [gumbel_reference(seed, 40 + row, token) for token in range(size)]
        order = np.argsort(-(logits[row].astype(np.float64) / temperature + noise))[:6]
        np.testing.assert_array_equal(ids[row], order)
        np.testing.assert_allclose(log_probs[row], expected[row][order], atol=2e-6)
        filters = SamplingArgs(temperature)
        assert ids[row, 0] == _choose(logits[row], filters, seed, 40 + row)
