"""Sampled continuations occur as often as the model says, with and without speculation.

8,000 seeds each, or 40,000; Pearson's chi-square over all continuations against probabilities
that are computed here, in float64, from the definition of each filter.
"""

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import product
from math import exp, factorial, sqrt

import numpy as np
import pytest

from draftree.core import SamplingParams
from draftree.decode.decoder import Decoder
from draftree.decode.host_round import SpeculationOptions, SpeculativeDecoder
from draftree.decode.plain import PlainDecoder
from draftree.decode.sampler import Sampler
from tests.decode.table import TableDrafter, TableTarget

NUM_RUNS, MANY_RUNS = 8_000, 40_000  # the second with -m long
VOCAB, LENGTH = 5, 3
PROMPT = (2, 0)
TABLE = np.random.default_rng(11).standard_normal((VOCAB, VOCAB)).astype(np.float32) * 1.2
DRAFT_TABLE = TABLE + np.random.default_rng(12).standard_normal((VOCAB, VOCAB)) * 0.7
SAMPLINGS = {
    "warm": SamplingParams(temperature=0.8),
    "filtered and penalised": SamplingParams(
        temperature=1.3,
        top_k=4,
        top_p=0.9,
        min_p=0.12,
        repetition_penalty=1.4,
        presence_penalty=0.5,
        frequency_penalty=0.4,
    ),
}


def next_probabilities(params: SamplingParams, reply: tuple[int, ...]) -> np.ndarray:
    """float64 [VOCAB]: penalties, temperature, the top_k largest, of them a top_p share, min_p."""
    logits = TABLE[(*PROMPT, *reply)[-1]].astype(np.float64)
    for token in {*PROMPT, *reply}:
        scale = params.repetition_penalty
        logits[token] = logits[token] / scale if logits[token] > 0 else logits[token] * scale
        count = reply.count(token)
        logits[token] -= params.presence_penalty * (count > 0) + params.frequency_penalty * count
    weights = np.exp((logits - logits.max()) / params.temperature)
    order = np.argsort(-weights, kind="stable")[: params.top_k or VOCAB]
    shares = weights[order] / weights[order].sum()
    kept = order[: int(np.argmax(shares.cumsum() >= params.top_p)) + 1]
    kept = order if params.top_p == 1.0 else kept
    kept = kept[weights[kept] >= params.min_p * weights.max()]
    result = np.zeros(VOCAB)
    result[kept] = weights[kept] / weights[kept].sum()
    return result


def continuation_probabilities(params: SamplingParams) -> dict[tuple[int, ...], float]:
    result = {}
    for reply in product(range(VOCAB), repeat=LENGTH):
        chances = [next_probabilities(params, reply[:i])[reply[i]] for i in range(LENGTH)]
        result[reply] = float(np.prod(chances))
    return result


def chi_square_limit(num_cells: int) -> float:
    """Exceeded once in 31,574 (z = 4) for num_cells - 1 degrees of freedom (Wilson, Hilferty)."""
    freedom = num_cells - 1
    return float(freedom * (1 - 2 / (9 * freedom) + 4.0 * sqrt(2 / (9 * freedom))) ** 3)


def check_frequencies(found: Counter[tuple[int, ...]], params: SamplingParams) -> None:
    """Rare continuations share a cell, so that every cell expects at least five."""
    num_runs = found.total()
    expected = {reply: num_runs * p for reply, p in continuation_probabilities(params).items()}
    assert all(expected[reply] > 0 for reply in found), "a filtered token was sampled"
    common = [reply for reply, count in expected.items() if count >= 5]
    cells = [(found[reply], expected[reply]) for reply in common]
    rest = num_runs - sum(count for _, count in cells)
    if rest >= 5:
        cells.append((num_runs - sum(count for count, _ in cells), rest))
    statistic = sum((seen - count) ** 2 / count for seen, count in cells)
    assert len(cells) >= 8
    limit = chi_square_limit(len(cells))
    assert statistic < limit, f"chi-square {statistic:.0f}, limit {limit:.0f}"


def sample(
    params: SamplingParams,
    first_seed: int,
    new_decoder: Callable[[TableTarget, Sampler], Decoder],
    new_sampler: Callable[..., Sampler] = Sampler,
    num_runs: int = NUM_RUNS,
) -> Counter[tuple[int, ...]]:
    found: Counter[tuple[int, ...]] = Counter()
    target = TableTarget(TABLE)
    for seed in range(first_seed, first_seed + num_runs):
        target.state.reset()
        target.state.tokens = list(PROMPT[:-1])
        decoder = new_decoder(target, new_sampler(replace(params, seed=seed), VOCAB, PROMPT))
        decoder.start(PROMPT[-1])
        reply: list[int] = []
        while len(reply) < LENGTH:
            reply += [e.token for e in decoder.step(LENGTH - len(reply))]
        found[tuple(reply)] += 1
    return found


def speculative(target: TableTarget, sampler: Sampler) -> SpeculativeDecoder:
    drafter = TableDrafter(DRAFT_TABLE, target.state, num_positions=2)
    options = SpeculationOptions(4, is_auto=False, use_lookup=False)
    return SpeculativeDecoder(target, sampler, drafter, options)


several = pytest.mark.parametrize(
    "num_runs", [NUM_RUNS, pytest.param(MANY_RUNS, marks=pytest.mark.long)]
)


@several
@pytest.mark.parametrize("name", SAMPLINGS)
def test_without_speculation(name: str, num_runs: int) -> None:
    found = sample(SAMPLINGS[name], 0, PlainDecoder, num_runs=num_runs)
    check_frequencies(found, SAMPLINGS[name])


@several
@pytest.mark.parametrize("name", SAMPLINGS)
def test_with_speculation(name: str, num_runs: int) -> None:
    rounds = []

    def watched(target: TableTarget, sampler: Sampler) -> SpeculativeDecoder:
        decoder = speculative(target, sampler)
        decoder._watch = rounds.append
        return decoder

    found = sample(SAMPLINGS[name], 1_000_000, watched, num_runs=num_runs)
    check_frequencies(found, SAMPLINGS[name])
    accepted = [len(one.path) - 1 for one in rounds if one.tree.num_nodes > 1]
    assert min(accepted) == 0 and max(accepted) == 2


@pytest.mark.parametrize("freedom", [8, 50, 124])
def test_the_limit_is_the_quantile(freedom: int) -> None:
    """For even degrees of freedom the tail of chi-square is a finite sum."""
    half = chi_square_limit(freedom + 1) / 2
    tail = exp(-half) * sum(half**i / factorial(i) for i in range(freedom // 2))
    assert 2e-5 < tail < 4e-5


def test_the_check_can_fail() -> None:
    """Counts as expected pass; those of a slightly higher temperature do not."""
    params, cases = SAMPLINGS["warm"], ((NUM_RUNS, 0.8), (NUM_RUNS, 0.92), (MANY_RUNS, 0.86))
    for num_runs, temperature in cases:
        is_right = temperature == params.temperature
        chances = continuation_probabilities(replace(params, temperature=temperature))
        found = Counter({reply: round(num_runs * p) for reply, p in chances.items()})
        if is_right:
            check_frequencies(found, params)
        else:
            with pytest.raises(AssertionError):
                check_frequencies(found, params)
