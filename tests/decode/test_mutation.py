"""The tests can fail: whatever is broken on purpose is found by a check that a real test uses.

docs/decoding.md lists these mutations; the list is compared with the one here.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from draftree.core import SamplingParams
from draftree.decode import host_round
from draftree.decode.accept import Accepted, accept
from draftree.decode.host_round import SpeculativeDecoder
from draftree.decode.plain import PlainDecoder
from draftree.decode.sampler import Sampler
from draftree.drafts.drafter import Proposal
from draftree.kernels.cpu import conv, gated_delta
from draftree.kernels.cpu.conv import ConvState
from draftree.kernels.cpu.gated_delta import DeltaState
from draftree.kernels.cpu.kv_cache import KvCache
from draftree.kernels.cpu.ops import CpuOps
from draftree.kernels.cpu.pass_args import PassArgs
from draftree.kernels.ops import LayerStore
from tests.decode import test_frequencies as frequencies
from tests.decode import test_host_round as rounds
from tests.decode import test_host_round_constrained as constrained
from tests.decode import test_lossless as lossless
from tests.decode.oracle import OracleDrafter, RandomDrafter, check_lossless, run_plain
from tests.decode.table import TableTarget
from tests.made import DRAFT_FEATURE_LAYERS
from tests.tiny import open_target, tiny_path

ROOT = Path(__file__).parents[2]
Patch = pytest.MonkeyPatch


def _oracle_drafts(name: str) -> None:
    """What test_oracle_drafts does, on a target that is opened while the mutation is in force."""
    layers = DRAFT_FEATURE_LAYERS if name == "qwen35-mtp" else ()
    target = open_target(tiny_path(name), num_threads=1, feature_layers=layers)
    params = replace(lossless.SAMPLINGS["warm"], seed=5)
    plain = run_plain(target, (9, 4, 77, 30, 2), params, 24)
    for budget in (8, 22, 40):
        oracle = OracleDrafter(target.state, plain.text, target.model.vocab_size, budget, sure=0.5)
        check_lossless(target, plain, oracle, lossless.fixed(budget))


def _random_drafts() -> None:
    """What test_random_drafts does: the draft's candidates are ranked by the sampler."""
    target = open_target(tiny_path("llama"), num_threads=1)
    plain = run_plain(target, (9, 4, 77), SamplingParams(temperature=0.7, seed=5), 12)
    drafter = RandomDrafter(target.state, target.model.vocab_size, 1)
    check_lossless(target, plain, drafter, lossless.fixed(8))


def _constrained(num_logprobs: int | None) -> None:
    constrained.check_constrained(TableTarget(constrained.TABLE), "warm", num_logprobs)


def _features() -> None:
    target = TableTarget(rounds.TABLE, has_features=True)
    drafter = rounds.half_right(target)
    rounds.check_features(rounds.start(target, drafter, rounds.fixed(40)).until(100), drafter)


def _frequencies() -> None:
    params = frequencies.SAMPLINGS["warm"]
    frequencies.check_frequencies(frequencies.sample(params, 0, PlainDecoder), params)


def _as_in_a_chain(patch: Patch) -> None:
    """The node at depth d counts as the ancestor at depth d of every node."""
    set_tree = PassArgs.set_tree

    def mutated(self: PassArgs, tokens: np.ndarray, *rest: Any) -> None:
        set_tree(self, tokens, *rest)
        for node in range(len(tokens)):
            depth = int(self.depths[node])
            self.ancestors[node, :depth] = np.arange(depth)

    patch.setattr(PassArgs, "set_tree", mutated)


def _positions_by_node(patch: Patch) -> None:
    set_tree = PassArgs.set_tree

    def mutated(self: PassArgs, tokens: np.ndarray, *rest: Any) -> None:
        set_tree(self, tokens, *rest)
        self.positions[: len(tokens)] = self.positions[0] + np.arange(len(tokens))

    patch.setattr(PassArgs, "set_tree", mutated)


def _view(step: PassArgs, **changed: np.ndarray) -> SimpleNamespace:
    """A step of which one kernel sees another array."""
    return SimpleNamespace(**{**vars(step), **changed})


def _convolution_over_earlier_rows(patch: Patch) -> None:
    record = conv.record_conv

    def mutated(program: Any, step: PassArgs, *rest: Any) -> None:
        rows = np.tile(np.arange(step.max_nodes, dtype=np.int64), (step.max_nodes, 1))
        record(program, _view(step, ancestors=rows), *rest)

    patch.setattr(conv, "record_conv", mutated)


def _delta_rule_in_node_order(patch: Patch) -> None:
    record = gated_delta.record_gated_delta

    def mutated(program: Any, step: PassArgs, *rest: Any) -> None:
        chain = np.arange(-1, step.max_nodes - 1, dtype=np.int64)
        record(program, _view(step, parents=chain), *rest)

    patch.setattr(gated_delta, "record_gated_delta", mutated)


def _replay_of_the_first_nodes(patch: Patch) -> None:
    record = gated_delta.record_delta_commit

    def mutated(program: Any, step: PassArgs, state: DeltaState) -> None:
        record(program, _view(step, path=np.arange(step.max_nodes, dtype=np.int64)), state)

    patch.setattr(gated_delta, "record_delta_commit", mutated)


def _commit_without(kind: type) -> Callable[[Patch], None]:
    def mutate(patch: Patch) -> None:
        commit = CpuOps.commit

        def mutated(self: CpuOps, stores: Sequence[LayerStore]) -> None:
            commit(self, [store for store in stores if not isinstance(store, kind)])

        patch.setattr(CpuOps, "commit", mutated)

    return mutate


def _features_of_the_first_nodes(patch: Patch) -> None:
    def mutated(self: SpeculativeDecoder, tree: Any, accepted: Accepted, verified: Any) -> None:
        self._target.state.commit(accepted.path)
        if self._drafter is not None and verified.features is not None:
            self._drafter.extend_context(verified.features[: len(accepted.path)])

    patch.setattr(SpeculativeDecoder, "_commit", mutated)


def _noise_from_a_stream(patch: Patch) -> None:
    """Whoever asks next, draft or target, gets the next numbers."""
    choose, rank = Sampler.choose, Sampler.rank

    def take(self: Any, count: int) -> int:
        self.taken = getattr(self, "taken", 0) + count
        return self.taken - count

    patch.setattr(Sampler, "choose", lambda self, x, position: choose(self, x, take(self, 1)))
    patch.setattr(
        Sampler, "rank", lambda self, x, position, k: rank(self, x, take(self, len(x)), k)
    )


def _noise_by_depth(patch: Patch) -> None:
    def mutated(tree: Any, logits: Any, sampler: Any, position: int, *rest: Any) -> Accepted:
        return accept(tree, logits, sampler, 0, *rest)

    patch.setattr(host_round, "accept", mutated)


def _noise_without_position(patch: Patch) -> None:
    choose = Sampler.choose
    patch.setattr(Sampler, "choose", lambda self, logits, position: choose(self, logits, 0))


def _other_noise_for_the_draft(patch: Patch) -> None:
    rank = Sampler.rank

    def mutated(self: Sampler, logits: np.ndarray, position: int, count: int) -> Proposal:
        return rank(self, logits, position + 1, count)

    patch.setattr(Sampler, "rank", mutated)


def _penalties_after_the_round(patch: Patch) -> None:
    def mutated(tree: Any, logits: Any, sampler: Any, *rest: Any) -> Accepted:
        late = SimpleNamespace(
            choose=sampler.choose, accept=lambda token: None, scores=None, is_complete=False
        )
        accepted = accept(tree, logits, late, *rest)
        for token in (*(tree.tokens[node] for node in accepted.path[1:]), accepted.bonus):
            sampler.accept(token)
        return accepted

    patch.setattr(host_round, "accept", mutated)


def _a_sibling_instead(patch: Patch) -> None:
    """The walk goes on into a child with another token."""

    def mutated(tree: Any, *rest: Any) -> Accepted:
        found = accept(tree, *rest)
        children = [n for n, parent in enumerate(tree.parents) if parent == found.path[-1]]
        return Accepted((*found.path, children[0]), found.bonus) if children else found

    patch.setattr(host_round, "accept", mutated)


def _scores_of_the_root(patch: Patch) -> None:
    def mutated(*args: Any) -> Accepted:
        found = accept(*args)
        return replace(found, scores=found.scores[:1] * len(found.scores))

    patch.setattr(host_round, "accept", mutated)


@dataclass(frozen=True)
class Mutation:
    mutate: Callable[[Patch], None]
    check: Callable[[], None]
    caught_by: str


_CONSTRAINED = "tests/decode/test_host_round_constrained.py::test_lossless"
_LOSSLESS = "tests/decode/test_lossless.py::test_oracle_drafts"
MUTATIONS = {
    "ancestor mask ignores parents": Mutation(
        _as_in_a_chain, lambda: _oracle_drafts("llama"), _LOSSLESS
    ),
    "positions follow node order": Mutation(
        _positions_by_node, lambda: _oracle_drafts("llama"), _LOSSLESS
    ),
    "convolution reads earlier rows": Mutation(
        _convolution_over_earlier_rows, lambda: _oracle_drafts("qwen35-mtp"), _LOSSLESS
    ),
    "delta rule in node order": Mutation(
        _delta_rule_in_node_order, lambda: _oracle_drafts("qwen35-mtp"), _LOSSLESS
    ),
    "delta replay skipped": Mutation(
        _commit_without(DeltaState), lambda: _oracle_drafts("qwen35-mtp"), _LOSSLESS
    ),
    "delta replay of the first nodes": Mutation(
        _replay_of_the_first_nodes, lambda: _oracle_drafts("qwen35-mtp"), _LOSSLESS
    ),
    "convolution window not moved": Mutation(
        _commit_without(ConvState), lambda: _oracle_drafts("qwen35-mtp"), _LOSSLESS
    ),
    "keys and values not moved": Mutation(
        _commit_without(KvCache), lambda: _oracle_drafts("llama"), _LOSSLESS
    ),
    "features of the first nodes": Mutation(
        _features_of_the_first_nodes,
        _features,
        "tests/decode/test_host_round.py::test_the_draft_is_told_the_features_of_the_path",
    ),
    "features of the first nodes, real target": Mutation(
        _features_of_the_first_nodes, lambda: _oracle_drafts("qwen35-mtp"), _LOSSLESS
    ),
    "noise from a stream": Mutation(
        _noise_from_a_stream, _random_drafts, "tests/decode/test_lossless.py::test_random_drafts"
    ),
    "noise by depth in the round": Mutation(
        _noise_by_depth, lambda: _oracle_drafts("llama"), _LOSSLESS
    ),
    "noise without position": Mutation(
        _noise_without_position,
        _frequencies,
        "tests/decode/test_frequencies.py::test_without_speculation",
    ),
    "other noise for the draft": Mutation(
        _other_noise_for_the_draft,
        rounds.check_coupling,
        "tests/decode/test_host_round.py::test_draft_and_target_draw_the_same_noise",
    ),
    "penalties after the round": Mutation(
        _penalties_after_the_round,
        lambda: lossless.check_penalties("greedy penalised"),
        "tests/decode/test_lossless.py::test_penalties_within_a_round",
    ),
    "a sibling is accepted": Mutation(
        _a_sibling_instead, lambda: _oracle_drafts("llama"), _LOSSLESS
    ),
    "grammar moved after the round": Mutation(
        _penalties_after_the_round, lambda: _constrained(None), _CONSTRAINED
    ),
    "log-probabilities of the root": Mutation(
        _scores_of_the_root, lambda: _constrained(3), _CONSTRAINED
    ),
}


@pytest.mark.parametrize("name", MUTATIONS)
def test_is_caught(name: str) -> None:
    mutation = MUTATIONS[name]
    with pytest.MonkeyPatch.context() as patch:
        mutation.mutate(patch)
        with pytest.raises(AssertionError, match=r"differ|chi-square"):
            mutation.check()


def test_the_checks_pass_when_nothing_is_broken() -> None:
    _oracle_drafts("llama")
    _oracle_drafts("qwen35-mtp")
    _random_drafts()
    _features()


def test_the_list_in_the_docs_is_this_one() -> None:
    page = (ROOT / "docs" / "decoding.md").read_text()
    for name, mutation in MUTATIONS.items():
        path, test = mutation.caught_by.split("::")
        assert f"def {test}(" in (ROOT / path).read_text()
        row = f"| {name} | `{Path(path).name}::{test}` |"
        assert row in page, f"docs/decoding.md lacks: {row}"
    assert page.count("| `test_") == len(MUTATIONS)
