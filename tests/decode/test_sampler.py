"""Bias, log-probabilities and grammars: what they do to one choice, against plain numpy."""

import numpy as np
import pytest

from draftree.core import Request, SamplingParams
from draftree.decode import sampler
from draftree.decode.sampler import FIRST_WEIGHTS, LATER_WEIGHTS, Sampler
from draftree.drafts.drafter import Proposal
from draftree.kernels.cpu.noise import gumbel
from draftree.kernels.cpu.sampling import SamplingArgs, SamplingScratch, choose
from tests.decode.rule import RuleGrammar

VOCAB = 300
SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.8, seed=3),
    "top k": SamplingParams(temperature=1.2, top_k=20, seed=3),
    "top p": SamplingParams(temperature=1.2, top_p=0.8, seed=3),
    "min p": SamplingParams(temperature=1.2, min_p=0.05, seed=3),
    "penalised": SamplingParams(
        temperature=1.0, repetition_penalty=1.3, presence_penalty=0.5, frequency_penalty=0.2
    ),
}


def rows(count: int, seed: int = 1) -> np.ndarray:
    return (3 * np.random.default_rng(seed).standard_normal((count, VOCAB))).astype(np.float32)


def choose_again(row: np.ndarray, params: SamplingParams, position: int) -> int:
    """The kernel's choice where penalties have been dealt with."""
    filters = SamplingArgs(params.temperature, params.top_k, params.top_p, params.min_p)
    return choose(row, filters, params.seed, position, SamplingScratch(len(row)))


def penalise(row: np.ndarray, params: SamplingParams, prompt: list[int], said: list[int]) -> None:
    for token in {*prompt, *said}:
        factor = np.float32(params.repetition_penalty)
        row[token] = row[token] / factor if row[token] > 0 else row[token] * factor
        if token in said:
            count = np.float32(said.count(token))
            row[token] -= np.float32(params.presence_penalty) + count * np.float32(
                params.frequency_penalty
            )


@pytest.mark.parametrize("wants_scores", [False, True])
@pytest.mark.parametrize("name", SAMPLINGS)
def test_bias_then_penalties_then_grammar_then_filters(name: str, wants_scores: bool) -> None:
    params, grammar = SAMPLINGS[name], RuleGrammar(VOCAB, seed=5)
    bias = ((7, 4.0), (9, -100.0), (250, 2.5))
    prompt, said = [1, 2, 7], []
    sampler = Sampler(
        params,
        VOCAB,
        prompt,
        logit_bias=bias,
        num_logprobs=2 if wants_scores else None,
        matcher=grammar.new_matcher(),
    )
    oracle = grammar.new_matcher()
    for position, row in enumerate(rows(60), start=3):
        expected = row.copy()
        for token, value in bias:
            expected[token] += np.float32(value)
        if params.has_penalties:
            penalise(expected, params, prompt, said)
        bits = np.zeros((VOCAB + 31) // 32, dtype=np.uint32)
        oracle.fill_mask(bits)
        allowed = np.unpackbits(bits.view(np.uint8), bitorder="little", count=VOCAB)
        expected[allowed == 0] = -np.inf
        untouched = row.copy()
        token = sampler.choose(row, position)
        assert np.array_equal(row, untouched)
        assert token == choose_again(expected, params, position)
        assert (sampler.scores is not None) == wants_scores
        sampler.accept(token)
        oracle.advance(token)
        said.append(token)
    assert grammar.follows(said)


def test_scores_are_log_probabilities_before_temperature() -> None:
    params = SamplingParams(temperature=1.7, top_k=4, seed=2)
    sampler = Sampler(params, VOCAB, (1,), logit_bias=((3, 5.0),), num_logprobs=4)
    for position, row in enumerate(rows(20)):
        token = sampler.choose(row, position)
        biased = row.astype(np.float64)
        biased[3] += 5.0
        expected = biased - np.log(np.exp(biased - biased.max()).sum()) - biased.max()
        best = np.argsort(-expected, kind="stable")[:4]
        assert sampler.scores is not None
        assert [i for i, _ in sampler.scores.top] == best.tolist()
        assert [v for _, v in sampler.scores.top] == pytest.approx(expected[best], abs=1e-5)
        assert sampler.scores.logprob == pytest.approx(expected[token], abs=1e-5)
        assert dict(sampler.scores.top).get(token, sampler.scores.logprob) == sampler.scores.logprob


def test_scores_without_alternatives_and_of_forbidden_tokens() -> None:
    row = rows(1)[0]
    sampler = Sampler(SamplingParams(), VOCAB, num_logprobs=0)
    sampler.choose(row, 0)
    assert sampler.scores is not None and sampler.scores.top == () and sampler.scores.logprob < 0
    grammar = RuleGrammar(VOCAB, seed=5)  # its first state allows one token
    sampler = Sampler(SamplingParams(), VOCAB, num_logprobs=5, matcher=grammar.new_matcher())
    token = sampler.choose(row, 0)
    assert sampler.scores is not None
    assert sampler.scores.top == ((token, 0.0),) and sampler.scores.logprob == 0.0


def test_a_small_vocabulary_has_few_alternatives() -> None:
    sampler = Sampler(SamplingParams(), 3, num_logprobs=20)
    sampler.choose(np.array([1, 2, 0], dtype=np.float32), 0)
    assert sampler.scores is not None and [i for i, _ in sampler.scores.top] == [1, 0, 2]


def test_a_draft_is_ranked_with_bias_and_with_the_grammar_where_it_is_known() -> None:
    grammar, logits = RuleGrammar(VOCAB, seed=5, share=0.05), rows(3)
    before = logits.copy()
    sampler = Sampler(
        SamplingParams(), VOCAB, (1, 2), logit_bias=((8, 50.0),), matcher=grammar.new_matcher()
    )
    block = sampler.rank(logits, 2, 4)
    assert np.array_equal(logits, before)
    assert block.tokens[0, 0] == grammar.new_matcher().propose_forced()[0]
    assert block.tokens[1, 0] == block.tokens[2, 0] == 8
    assert sampler.rank(logits, 3, 4).tokens[0, 0] == 8  # not the next position: nothing is known


def test_a_request_that_asks_for_nothing_takes_the_short_way() -> None:
    plain = Sampler.for_request(Request((1, 2), 5), VOCAB)
    assert plain._processor is None and plain.matcher is None and not plain.is_complete
    shaped = Sampler.for_request(
        Request((1, 2), 5, logit_bias=((1, 1.0),), logprobs=1, grammar=RuleGrammar(VOCAB, 1)), VOCAB
    )
    assert shaped._processor is not None and shaped.matcher is not None
    for position, row in enumerate(rows(10)):
        neutral = Sampler(SamplingParams(), VOCAB, num_logprobs=1)
        assert plain.choose(row, position) == neutral.choose(row, position)


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("bias", [(), ((8, 50.0),)])
def test_a_draft_may_know_few_tokens(
    temperature: float, bias: tuple[tuple[int, float], ...]
) -> None:
    """Ranked as if all others were impossible: noise and bias go by token, not by column."""
    tokens, logits = np.array([2, 3, 8, 11, 40]), rows(3)
    params = SamplingParams(temperature=temperature, seed=3)
    sampler = Sampler(params, VOCAB, (1, 2), logit_bias=bias)
    others = np.setdiff1d(np.arange(VOCAB), tokens)
    impossible = logits.copy()
    impossible[:, others] = -np.inf
    expected = sampler.rank(impossible, 2, 4)
    few = np.ascontiguousarray(logits[:, tokens])
    block = sampler.rank(few, 2, 4, tokens)
    assert np.array_equal(block.tokens, expected.tokens)
    np.testing.assert_allclose(block.log_probs, expected.log_probs, atol=1e-5)


def test_a_long_list_of_tokens_is_ranked_by_each_ones_noise(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Several blocks of tokens, the last one short."""
    monkeypatch.setattr(sampler, "_NOISE_REACH", np.inf)
    rng = np.random.default_rng(3)
    tokens = np.sort(rng.choice(5000, 150, replace=False))
    logits = rng.normal(size=(20, 150)).astype(np.float32)
    block = Sampler(SamplingParams(temperature=0.8, seed=7), 5000).rank(logits, 11, 6, tokens)
    for row, values in enumerate(logits):
        weights = FIRST_WEIGHTS if row == 0 else LATER_WEIGHTS
        noise = 0.8 * np.array([gumbel(7, 11 + row, int(token)) for token in tokens])
        order = np.argsort(-(weights.logits * values + weights.noise * noise))[:6]
        assert block.tokens[row].tolist() == tokens[order].tolist()


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tokens", [None, np.arange(1, 3 * VOCAB, 3)])
def test_how_a_row_is_ranked_depends_on_it_and_on_whether_it_is_the_first(
    temperature: float, tokens: np.ndarray | None
) -> None:
    logits = np.round(2 * rows(7)) / 2  # many ties
    logits[3] = logits[2]
    sampler = Sampler(SamplingParams(temperature=temperature, seed=3), 3 * VOCAB)
    block = sampler.rank(logits, 11, 9, tokens)
    for row in range(len(logits)):
        first = max(row - 1, 0)
        part = sampler.rank(logits[first : row + 1], 11 + first, 9, tokens)
        assert np.array_equal(block.tokens[row], part.tokens[-1])
        assert np.array_equal(block.log_probs[row], part.log_probs[-1])
    alone = sampler.rank(logits[2:3], 13, 9, tokens)
    is_same = np.array_equal(block.log_probs[2], alone.log_probs[0])
    assert is_same == (temperature == 0.0)


@pytest.mark.filterwarnings("error")
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_grammar_may_forbid_all_that_a_draft_knows(temperature: float) -> None:
    grammar, logits = RuleGrammar(VOCAB, seed=5), rows(3)
    (allowed,) = grammar.new_matcher().propose_forced()[:1]  # its first state allows no other
    tokens = np.array([token for token in (2, 3, 8, 11, 40) if token != allowed])
    params = SamplingParams(temperature=temperature, seed=3)
    sampler = Sampler(params, VOCAB, (1, 2), matcher=grammar.new_matcher())
    block = sampler.rank(np.ascontiguousarray(logits[:, tokens]), 2, 4, tokens)
    assert np.all(np.isfinite(block.log_probs)) and np.all(block.log_probs[0] < -1000)
    free = Sampler(params, VOCAB, (1, 2)).rank(logits[:, tokens].copy(), 2, 4, tokens)
    assert np.array_equal(block.tokens[1:], free.tokens[1:])
    np.testing.assert_allclose(block.log_probs[1:], free.log_probs[1:], atol=1e-5)


def test_ranks_are_filled_where_few_tokens_are_near(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sampler, "_NOISE_REACH", 0.0)  # many that belong to the best are not seen
    block = Sampler(SamplingParams(temperature=0.9, seed=1), VOCAB).rank(rows(50), 0, 8)
    assert all(len(set(tokens)) == 8 for tokens in block.tokens.tolist())


@pytest.mark.parametrize("is_chain", [False, True])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_edges_rank_as_the_request_chooses(temperature: float, is_chain: bool) -> None:
    """After each parent, the first candidate is what would be chosen of the corrected logits; in
    a block, where rows do not know the token before them, with less noise.
    """
    rng, count = np.random.default_rng(2), 24
    logits = 2 * rng.standard_normal((4, count)).astype(np.float32)
    bias = 3 * rng.standard_normal((4, count, count)).astype(np.float32)  # by parent token
    sampler = Sampler(SamplingParams(temperature=temperature, seed=5), count, (1, 2, 3))
    ranked = sampler.rank(logits, 10, count)  # all tokens are candidates
    if is_chain:
        alone = [sampler.rank(row[None], 10 + i, count) for i, row in enumerate(logits)]
        tokens = np.concatenate([row.tokens for row in alone])
        ranked = Proposal(tokens, np.concatenate([row.log_probs for row in alone]))
    anchor = 7
    parents = [np.full(count, anchor), *ranked.tokens[:-1]]
    corrections = np.stack([bias[i][parents[i]][:, ranked.tokens[i]] for i in range(4)])
    found = sampler.rank_edges(ranked, corrections, is_chain=is_chain)
    assert found.edges is not None
    assert (np.diff(found.log_probs[0]) <= 0).all()
    assert found.tokens[0, 0] == sampler.choose(logits[0] + bias[0, anchor], 10)
    for i in range(1, 4):
        for rank, parent in enumerate(found.tokens[i - 1]):
            first = found.tokens[i, found.edges[i - 1, rank].argmax()]
            corrected = logits[i] + bias[i, parent]
            noise = temperature * np.array([gumbel(5, 10 + i, token) for token in range(count)])
            weights = FIRST_WEIGHTS if is_chain else LATER_WEIGHTS
            assert first == np.argmax(weights.logits * corrected + weights.noise * noise)
            assert not is_chain or first == sampler.choose(corrected, 10 + i)
    np.testing.assert_allclose(np.exp(found.edges).sum(axis=-1), 1.0, atol=1e-5)


def test_edges_keep_the_chance_of_all_candidates_together() -> None:
    logits = np.random.default_rng(3).standard_normal((3, 50)).astype(np.float32)
    sampler = Sampler(SamplingParams(), 50)
    ranked = sampler.rank(logits, 0, 4)
    found = sampler.rank_edges(ranked, np.ones((3, 4, 4), dtype=np.float32))
    assert found.edges is not None
    np.testing.assert_allclose(found.log_probs[0], ranked.log_probs[0], atol=1e-6)
    np.testing.assert_allclose(found.edges[:, 2], ranked.log_probs[1:], atol=1e-6)
