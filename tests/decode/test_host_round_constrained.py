"""Bias, log-probabilities and grammars do not depend on drafting: tokens, scores, state, ends."""

from collections import Counter
from dataclasses import replace

import numpy as np
import pytest

from draftree.core import SamplingParams, TokenSource
from draftree.decode.decoder import Round
from draftree.decode.host_round import SpeculationOptions, SpeculativeDecoder
from draftree.decode.sampler import Sampler
from draftree.models.target import Target
from tests.decode.oracle import (
    NewSampler,
    OracleDrafter,
    RandomDrafter,
    check_lossless,
    count_kinds,
    run_plain,
)
from tests.decode.rule import RuleGrammar, RuleMatcher
from tests.decode.table import TableDrafter, TableTarget
from tests.tiny import open_target, tiny_path

BIAS = ((3, 2.0), (17, -100.0), (40, 1.5))
SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.9),
    "filtered": SamplingParams(
        temperature=1.0, top_p=0.9, top_k=40, min_p=0.02, repetition_penalty=1.2
    ),
}
NUM_TOKENS = 40
TABLE = 2 * np.random.default_rng(21).standard_normal((64, 64))


def fixed(budget: int) -> SpeculationOptions:
    return SpeculationOptions(budget, is_auto=False, use_lookup=False)


def new_sampler(
    grammar: RuleGrammar | None, *, bias: tuple = BIAS, num_logprobs: int | None = None
) -> NewSampler:
    return lambda params, vocab_size, prompt: Sampler(
        params,
        vocab_size,
        prompt,
        logit_bias=bias,
        num_logprobs=num_logprobs,
        matcher=grammar.new_matcher() if grammar is not None else None,
    )


@pytest.fixture(scope="module", params=["llama", "qwen35-mtp", "table"])
def target(request: pytest.FixtureRequest) -> Target:
    if request.param == "table":
        return TableTarget(TABLE)
    return open_target(tiny_path(request.param), num_threads=1)


def check_constrained(target: Target, sampling: str, num_logprobs: int | None) -> Counter[str]:
    kinds: Counter[str] = Counter()
    vocab_size = target.model.vocab_size
    for seed in (1, 2):
        grammar = RuleGrammar(vocab_size, seed)
        make = new_sampler(grammar, num_logprobs=num_logprobs)
        params = replace(SAMPLINGS[sampling], seed=seed)
        plain = run_plain(target, (1, 2, 3), params, NUM_TOKENS, make)
        assert grammar.follows(plain.tokens)
        assert all(score is not None for score in plain.scores) == (num_logprobs is not None)
        for budget in (1, 8, 22):
            oracle = OracleDrafter(target.state, plain.text, vocab_size, 100 * seed + budget)
            for drafter in (oracle, RandomDrafter(target.state, vocab_size, budget), None):
                rounds = check_lossless(target, plain, drafter, fixed(budget), new_sampler=make)
                kinds += count_kinds(rounds)
                kinds["forced"] += sum(TokenSource.GRAMMAR in r.tree.sources for r in rounds)
    return kinds


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("num_logprobs", [None, 3])
def test_lossless(target: Target, sampling: str, num_logprobs: int | None) -> None:
    kinds = check_constrained(target, sampling, num_logprobs)
    wanted = ("zero", "partial", "whole", "sibling", "moved", "forced")
    assert all(kinds[kind] > 0 for kind in wanted), kinds


@pytest.mark.parametrize("sampling", SAMPLINGS)
def test_bias_and_scores_without_a_grammar(target: Target, sampling: str) -> None:
    vocab_size = target.model.vocab_size
    make = new_sampler(None, num_logprobs=2)
    plain = run_plain(target, (1, 2, 3), SAMPLINGS[sampling], NUM_TOKENS, make)
    assert 17 not in plain.tokens
    for budget in (8, 22):
        oracle = OracleDrafter(target.state, plain.text, vocab_size, budget)
        rounds = check_lossless(target, plain, oracle, fixed(budget), new_sampler=make)
        assert count_kinds(rounds)["partial"] > 0


@pytest.mark.parametrize("length", range(1, 14))
def test_a_complete_grammar_ends_the_path(length: int) -> None:
    """Wherever the end lies in a path that was drafted right, nothing after it is emitted."""
    target, grammar = TableTarget(TABLE), RuleGrammar(64, seed=3, length=length)
    make = new_sampler(grammar)
    plain = run_plain(target, (1, 2, 3), SamplingParams(), NUM_TOKENS, make)
    assert len(plain.tokens) == length
    endless = new_sampler(RuleGrammar(64, seed=3))
    truth = run_plain(target, (1, 2, 3), SamplingParams(), NUM_TOKENS, endless).text
    drafter = OracleDrafter(target.state, truth, 64, seed=0, is_perfect=True)
    target.state.restore(plain.states[0])
    sampler = make(SamplingParams(), 64, plain.prompt)
    rounds: list[Round] = []
    decoder = SpeculativeDecoder(target, sampler, drafter, fixed(22), watch=rounds.append)
    decoder.start(3)
    emitted = []
    while not emitted or not emitted[-1].is_last:
        emitted += decoder.step(NUM_TOKENS)
    assert tuple(e.token for e in emitted) == plain.tokens
    assert [e.is_last for e in emitted] == [False] * (length - 1) + [True]
    assert target.state.committed == len(plain.states[-1].tokens)
    last = rounds[-1]
    end = last.tree.find_child(last.path[-1], last.bonus)
    assert end is not None or len(last.path) > max(last.tree.depths)  # or it lies behind the tree
    if end is not None:  # who guessed the end is named, as for every other token
        assert emitted[-1].source is last.tree.sources[end] is not TokenSource.BONUS


def test_what_the_grammar_forbids_is_not_verified() -> None:
    target, grammar = TableTarget(TABLE), RuleGrammar(64, seed=4, share=0.2)
    make = new_sampler(grammar, bias=())
    plain = run_plain(target, (1, 2, 3), SamplingParams(), 60, make)
    drafter = TableDrafter(TABLE, target.state)
    rounds = check_lossless(target, plain, drafter, fixed(15), new_sampler=make)
    said = list(plain.tokens)
    place = 0
    for one in rounds:
        for node in range(1, one.tree.num_nodes):
            path, at = [], node
            while at > 0:
                path.append(one.tree.tokens[at])
                at = one.tree.parents[at]
            assert grammar.follows([*said[:place], *path[::-1]])
        place += len(one.path)
    assert any(one.tree.num_nodes > 1 for one in rounds)


@pytest.mark.parametrize("use_lookup", [False, True])
def test_forced_tokens_are_verified_even_while_drafting_pauses(use_lookup: bool) -> None:
    target, grammar = TableTarget(TABLE), RuleGrammar(64, seed=6)
    make = new_sampler(grammar)
    plain = run_plain(target, (1, 2, 3), SamplingParams(temperature=1.0), 80, make)
    options = SpeculationOptions(22, is_auto=True, use_lookup=use_lookup)
    rounds = check_lossless(target, plain, None, options, new_sampler=make)
    accepted = [one.tree.sources[node] for one in rounds for node in one.path[1:]]
    assert accepted.count(TokenSource.GRAMMAR) > 5 and len(rounds) < 80


class _Constant(RuleGrammar):
    def new_matcher(self) -> RuleMatcher:
        return _ConstantMatcher(self)


class _ConstantMatcher(RuleMatcher):
    def propose_forced(self) -> list[int]:
        return list(range(20, 40))


@pytest.mark.parametrize("max_budget, num_forced", [(30, 20), (12, 12)])
def test_a_request_that_begins_with_small_trees_has_all_that_is_forced(
    max_budget: int, num_forced: int
) -> None:
    target = TableTarget(TABLE)
    sampler = new_sampler(_Constant(64, 1))(SamplingParams(), 64, (1, 2, 3))
    options = SpeculationOptions(max_budget, is_auto=True, use_lookup=False)
    decoder = SpeculativeDecoder(target, sampler, None, options)
    decoder.start(3)
    ranked, _ = decoder._draft(NUM_TOKENS)
    assert ranked is not None
    assert ranked.tree.sources.count(TokenSource.GRAMMAR) == num_forced
