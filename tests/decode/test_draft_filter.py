"""Trees out of larger drafts: those that the host builds itself, once it has asked about them."""

import numpy as np
import pytest

from draftree.core import DraftTree, TokenSource
from draftree.decode.draft_filter import DraftFilter
from draftree.decode.tree import build_tree
from draftree.drafts.drafter import Proposal
from tests.decode.rule import RuleGrammar

VOCAB, ANCHOR, BUDGET = 64, 9, 22


def made_block(rng: np.random.Generator) -> Proposal:
    rows = [rng.choice(VOCAB, 6, replace=False) for _ in range(12)]
    logits = np.sort(rng.standard_normal((12, 6)), axis=1)[:, ::-1]
    return Proposal(np.stack(rows), (logits - np.logaddexp.reduce(logits, 1)[:, None]) * 1.0)


def draft(block: Proposal) -> tuple[tuple[int, ...], tuple[int, ...]]:
    tree = build_tree(ANCHOR, block, 63).tree
    return tree.tokens, tree.parents


def ask_often(kept: DraftFilter, block: Proposal, count_valid, **first) -> DraftTree:
    """Until nothing is new."""
    tree = None
    while tree != (
        tree := kept.build(ANCHOR, draft(block), BUDGET, count_valid=count_valid, **first)
    ):
        kept.learn(tree, count_valid)
    return tree


def is_begin(tree: DraftTree, whole: DraftTree) -> None:
    """Either has fewer nodes, where too much was refused."""
    count = min(tree.num_nodes, whole.num_nodes)
    for name in ("tokens", "parents", "depths", "sources"):
        assert getattr(tree, name)[:count] == getattr(whole, name)[:count]


def paths(tree: DraftTree) -> set[tuple[int, ...]]:
    """The tokens that lead to each node."""
    found = [()]
    for token, parent in list(zip(tree.tokens, tree.parents, strict=True))[1:]:
        found.append((*found[parent], token))
    return set(found)


def is_allowed(tree: DraftTree, count_valid) -> bool:
    for node in range(1, tree.num_nodes):
        path = []
        while node > 0:
            path.append(tree.tokens[node])
            node = tree.parents[node]
        if count_valid(path[::-1]) < len(path):
            return False
    return True


@pytest.mark.parametrize("seed", range(20))
def test_what_is_refused_is_left_out_the_next_time(seed: int) -> None:
    rng, grammar = np.random.default_rng(seed), RuleGrammar(VOCAB, seed, share=0.7)
    matcher, block = grammar.new_matcher(), made_block(rng)
    while matcher.propose_forced():
        matcher.advance(int(rng.integers(VOCAB)))
    kept = DraftFilter()
    first = kept.build(ANCHOR, draft(block), BUDGET, count_valid=matcher.count_valid)
    assert first.num_nodes == BUDGET + 1 and not is_allowed(first, matcher.count_valid)
    tree = ask_often(kept, block, matcher.count_valid)
    whole = build_tree(ANCHOR, block, 63, count_valid=matcher.count_valid).tree
    assert tree.num_nodes > 4 and is_allowed(tree, matcher.count_valid)
    assert paths(tree) <= paths(whole), "a token may be left out after the same two elsewhere"


def test_nothing_is_asked_before_the_pass_but_first_choices() -> None:
    """And what was left out comes back where it is allowed."""
    block = made_block(np.random.default_rng(3))
    refused = {int(block.tokens[0, 1])}

    def count_valid(tokens) -> int:
        asked.append(list(tokens))
        return next((i for i, token in enumerate(tokens) if token in refused), len(tokens))

    kept, trees = DraftFilter(), []
    for wanted in (refused, refused, *[set()] * 8):
        asked, refused = [], wanted
        trees.append(kept.build(ANCHOR, draft(block), BUDGET, count_valid=count_valid))
        assert len(asked) == 1
        kept.learn(trees[-1], count_valid)
        assert len(asked) < 2 * BUDGET
    assert trees[0] == trees[-1] == build_tree(ANCHOR, block, BUDGET).tree
    assert not is_allowed(trees[0], lambda t: 0 if t[0] == block.tokens[0, 1] else len(t))
    assert is_allowed(trees[1], lambda t: 0 if t[0] == block.tokens[0, 1] else len(t))


def test_first_choices_are_asked_about_at_once() -> None:
    asked: list[list[int]] = []

    def count_valid(tokens) -> int:
        asked.append(list(tokens))
        return 3

    block = made_block(np.random.default_rng(1))
    tree = DraftFilter().build(ANCHOR, draft(block), BUDGET, count_valid=count_valid)
    (chain,) = asked
    assert len(chain) > 3 and chain == block.tokens[: len(chain), 0].tolist()
    assert tree.sources.count(TokenSource.CHAIN) == 3 and tree.num_nodes == BUDGET + 1


def test_what_is_remembered_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    """An engine serves for weeks, and every text has places of its own."""
    monkeypatch.setattr("draftree.decode.draft_filter._MOST_REFUSED", 100)
    kept, sizes = DraftFilter(), []
    for seed in range(60):
        block = made_block(np.random.default_rng(seed))
        tree = kept.build(ANCHOR, draft(block), BUDGET, count_valid=lambda tokens: 1)
        kept.learn(tree, lambda tokens: 0)
        sizes.append(len(kept._refused))
    assert 100 <= max(sizes) < 100 + 2 * BUDGET and sizes != sorted(sizes)


def test_without_a_grammar_the_tree_is_the_drafts_beginning() -> None:
    block = made_block(np.random.default_rng(2))
    assert (
        DraftFilter().build(ANCHOR, draft(block), BUDGET) == build_tree(ANCHOR, block, BUDGET).tree
    )
    looked = (*block.tokens[:2, 1].tolist(), 3)
    args = {"first": looked, "source": TokenSource.NGRAM}
    tree = DraftFilter().build(ANCHOR, draft(block), BUDGET, **args)
    assert tree == build_tree(ANCHOR, block, BUDGET, lookup=looked).tree
    assert DraftFilter().build(ANCHOR, ((), ()), BUDGET, **args) == DraftTree(
        (ANCHOR, *looked), (-1, 0, 1, 2), (0, 1, 2, 3), tree.sources[:4]
    )


@pytest.mark.parametrize("seed", range(8))
def test_what_a_grammar_forces_comes_first(seed: int) -> None:
    rng, grammar = np.random.default_rng(seed), RuleGrammar(VOCAB, seed, share=0.7)
    matcher, block = grammar.new_matcher(), made_block(rng)
    forced = matcher.propose_forced()  # from the first state
    block.tokens[0, seed % 6] = forced[0]
    tree = ask_often(DraftFilter(), block, matcher.count_valid, first=forced)
    is_begin(
        tree, build_tree(ANCHOR, block, BUDGET, forced=forced, count_valid=matcher.count_valid).tree
    )
    assert tree.parents.count(0) == 1 and tree.tokens[1 : len(forced) + 1] == tuple(forced)


def test_a_token_that_leads_nowhere_is_not_taken_for_the_root() -> None:
    """A refused node's child may carry the anchor's token."""
    drafted = (ANCHOR, 1, ANCHOR, 5), (-1, 0, 1, 0)
    tree = DraftFilter().build(ANCHOR, drafted, BUDGET, count_valid=lambda tokens: tokens[0] != 1)
    assert (tree.tokens, tree.parents) == ((ANCHOR, 5), (-1, 0))
