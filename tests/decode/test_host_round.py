"""A round is one pass, its statistics add up, and an automatic budget follows the clock."""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import pytest

from draftree.core import SamplingParams, TokenSource, Usage
from draftree.decode import host_round, plain
from draftree.decode.accept import accept
from draftree.decode.controller import SpeculationController
from draftree.decode.cost import CostModel
from draftree.decode.decoder import Emitted, Round
from draftree.decode.host_round import SpeculationOptions, SpeculativeDecoder
from draftree.decode.plain import PlainDecoder
from draftree.decode.sampler import Sampler
from draftree.decode.tree import build_tree
from draftree.drafts.drafter import Proposal, Proposer
from draftree.kernels.cpu.pass_args import PassArgs
from draftree.prefill.chunked import prefill
from tests.decode.oracle import OracleDrafter, run_plain
from tests.decode.table import Clock, TableDrafter, TableTarget
from tests.tiny import open_target, tiny_path

VOCAB = 40
TABLE = np.random.default_rng(21).standard_normal((VOCAB, VOCAB)).astype(np.float32) * 2
NOISE = np.random.default_rng(22).standard_normal((VOCAB, VOCAB)).astype(np.float32)
WARM = SamplingParams(temperature=1.0, seed=8)


def fixed(budget: int, *, use_lookup: bool = False) -> SpeculationOptions:
    return SpeculationOptions(budget, is_auto=False, use_lookup=use_lookup)


@dataclass
class Run:
    """A decoder at work on a table, and all it says."""

    target: TableTarget
    decoder: SpeculativeDecoder
    rounds: list[Round]
    emitted: list[Emitted] = field(default_factory=list)

    @property
    def tokens(self) -> list[int]:
        return [e.token for e in self.emitted]

    def until(self, count: int) -> "Run":
        while len(self.emitted) < count:
            self.emitted += self.decoder.step(count - len(self.emitted))
        return self


def start(
    target: TableTarget,
    drafter: Proposer | None,
    options: SpeculationOptions,
    sampling: SamplingParams = WARM,
    cost: CostModel | None = None,
) -> Run:
    rounds: list[Round] = []
    sampler = Sampler(sampling, target.model.vocab_size, (1,))
    controller = SpeculationController(cost=cost)
    decoder = SpeculativeDecoder(target, sampler, drafter, options, controller, rounds.append)
    decoder.start(1)
    return Run(target, decoder, rounds)


def plain_tokens(sampling: SamplingParams, count: int, table: np.ndarray = TABLE) -> list[int]:
    decoder = PlainDecoder(TableTarget(table), Sampler(sampling, len(table), (1,)))
    decoder.start(1)
    return [decoder.step(1)[0].token for _ in range(count)]


def half_right(target: TableTarget) -> TableDrafter:
    return TableDrafter(TABLE + NOISE, target.state)


@pytest.mark.parametrize("budget", [1, 8, 22])
def test_one_pass_a_round_and_statistics_add_up(budget: int) -> None:
    target = TableTarget(TABLE)
    run = start(target, half_right(target), fixed(budget)).until(120)
    stats, accepted = run.decoder.stats, [len(one.path) - 1 for one in run.rounds]
    assert run.tokens == plain_tokens(WARM, 120)
    assert target.num_forwards == stats.num_rounds == len(run.rounds)
    assert target.pass_sizes == [one.tree.num_nodes for one in run.rounds]
    assert stats.num_drafted == sum(target.pass_sizes) - stats.num_rounds
    assert stats.num_accepted == sum(accepted) and 0 < stats.num_accepted < 120
    assert stats.num_accepted + stats.num_rounds == 120 == target.state.committed
    usage = Usage(completion_tokens=120, rounds=stats)
    assert usage.acceptance_length == pytest.approx(1 + np.mean(accepted))


def test_counts_by_depth() -> None:
    target = TableTarget(TABLE)
    run = start(target, half_right(target), fixed(22)).until(120)
    stats = run.decoder.stats
    for counts, depths in (
        (stats.accepted_by_depth, [len(one.path) - 1 for one in run.rounds]),
        (stats.verified_by_depth, [max(one.tree.depths) for one in run.rounds]),
    ):
        assert counts == [sum(d > i for d in depths) for i in range(max(depths))]
        assert counts == sorted(counts, reverse=True)
    pairs = zip(stats.verified_by_depth, stats.accepted_by_depth, strict=False)
    assert all(verified >= accepted for verified, accepted in pairs)
    assert sum(stats.accepted_by_depth) == stats.num_accepted


def test_accepted_tokens_are_not_run_again() -> None:
    """The real target: as many passes as rounds, each of the tree alone."""
    target = open_target(tiny_path("llama"), num_threads=1)
    plain = run_plain(target, (3, 4, 5), SamplingParams(), 32)
    target.state.restore(plain.states[0])
    before = target.num_forwards
    oracle = OracleDrafter(target.state, plain.text, target.model.vocab_size, 1, is_perfect=True)
    sampler = Sampler(SamplingParams(), target.model.vocab_size, plain.prompt)
    decoder = SpeculativeDecoder(target, sampler, oracle, replace(fixed(15), width=1))
    decoder.start(plain.prompt[-1])
    tokens = [e.token for max_tokens in (32, 16) for e in decoder.step(max_tokens)]
    assert tuple(tokens) == plain.tokens
    assert target.num_forwards - before == decoder.stats.num_rounds == 2


def test_whoever_watches_gets_the_tree_and_the_path() -> None:
    target = TableTarget(TABLE)
    run = start(target, half_right(target), fixed(8)).until(60)
    text, position = [1, *run.tokens], 0
    for one in run.rounds:
        path_tokens = [one.tree.tokens[node] for node in one.path]
        assert path_tokens == text[position : position + len(one.path)]
        position += len(one.path)
        assert one.bonus == text[position]
    assert position == 60


def test_the_drafter_sees_the_whole_text() -> None:
    """Before the anchor, in rounds, and in plain steps, each token once."""
    target = TableTarget(TABLE)
    prefill(target, (4, 7, 4), 64)
    drafter = half_right(target)
    run = start(target, drafter, fixed(8))
    assert drafter.seen == [4, 7, 4, 1]
    run.until(60)
    assert drafter.seen == [4, 7, 4, 1, *run.tokens]
    run.until(61).until(62)
    assert [one.tree.num_nodes for one in run.rounds[-2:]] == [1, 1]
    assert drafter.seen == [4, 7, 4, 1, *run.tokens]


def test_every_token_names_its_source() -> None:
    target = TableTarget(TABLE)
    run = start(target, half_right(target), fixed(40)).until(60)
    expected: list[TokenSource] = []
    for one in run.rounds:
        expected += [one.tree.sources[node] for node in one.path[1:]]
        expected.append(TokenSource.BONUS if one.tree.num_nodes > 1 else TokenSource.PLAIN)
    assert [e.source for e in run.emitted] == expected
    assert {TokenSource.CHAIN, TokenSource.SIBLING, TokenSource.BONUS} <= set(expected)


def test_the_example_in_the_docs() -> None:
    """docs/decoding.md shows the tree that this block really makes."""
    words = ["the", "mat", "rug", "and", ".", "slept", "purred"]
    proposed = [{"mat": 0.6, "rug": 0.3}, {"and": 0.5, ".": 0.4}, {"slept": 0.6, "purred": 0.2}]
    block = Proposal(
        np.array([[words.index(word) for word in row] for row in proposed]),
        np.log([list(row.values()) for row in proposed]),
    )
    ranked = build_tree(0, block, 6)
    tree, step = ranked.tree, PassArgs(16, 16)
    step.set_tree(*(np.array(part) for part in (tree.tokens, tree.parents, tree.depths)), 4)
    chances = np.exp([0.0, *ranked.path_log_probs])
    rows = [
        f"| {node} | `{words[tree.tokens[node]]}` | {tree.parents[node]} | {depth} "
        f"| {step.positions[node]} | {' '.join(map(str, step.ancestors[node, : depth + 1]))} "
        f"| {chances[node]:.2f} |"
        for node, depth in enumerate(tree.depths)
    ]
    page = (Path(__file__).parents[2] / "docs" / "decoding.md").read_text()
    assert "\n".join(rows) in page
    table = np.full((7, 7), -9.0, dtype=np.float32)
    for word, following in (("the", "rug"), ("rug", "and"), ("and", "purred")):
        table[words.index(word), words.index(following)] = 9.0
    sampler = Sampler(SamplingParams(), 7, ())
    accepted = accept(tree, table[list(tree.tokens)], sampler, 4, max_tokens=9)
    assert accepted.path == (0, 3, 6) and words[accepted.bonus] == "purred"


def check_features(run: Run, drafter: TableDrafter) -> None:
    """The draft has seen each committed token at its position, once, in order."""
    expected = [[token, position] for position, token in enumerate(run.target.state.tokens)]
    assert np.concatenate(drafter.observed).tolist() == expected, "the features differ"


@pytest.mark.parametrize("is_auto", [False, True])
def test_the_draft_is_told_the_features_of_the_path(is_auto: bool) -> None:
    target = TableTarget(TABLE, has_features=True)
    drafter = half_right(target)
    options = SpeculationOptions(22, is_auto=is_auto, use_lookup=False)
    run = start(target, drafter, options).until(100)
    check_features(run, drafter)
    assert any(one.path != tuple(range(len(one.path))) for one in run.rounds) or is_auto


def check_coupling(new_sampler: Callable[..., Sampler] = Sampler) -> None:
    """A draft that knows the target's logits is right to the end at any temperature."""
    for seed in range(4):
        target, sampling = TableTarget(TABLE), SamplingParams(temperature=1.0, seed=seed)
        sampler = new_sampler(sampling, VOCAB, (1,))
        drafter = TableDrafter(TABLE, target.state)
        decoder = SpeculativeDecoder(target, sampler, drafter, replace(fixed(15), width=1))
        decoder.start(1)
        assert len(decoder.step(16)) == 16, "the draft and the target drew different noise"


def test_draft_and_target_draw_the_same_noise() -> None:
    check_coupling()


def test_budget_0_never_drafts() -> None:
    target = TableTarget(TABLE)
    drafter = half_right(target)
    for options in (fixed(0, use_lookup=True), SpeculationOptions(0, True, True)):
        target.state.reset()
        run = start(target, drafter, options).until(30)
        assert run.tokens == plain_tokens(WARM, 30)
        assert {one.tree.num_nodes for one in run.rounds} == {1}
        assert {e.source for e in run.emitted} == {TokenSource.PLAIN}
    assert drafter.num_proposals == 0


def test_the_context_is_filled_to_its_end_and_not_beyond() -> None:
    target = TableTarget(TABLE, max_ctx=40)
    run = start(target, TableDrafter(TABLE, target.state), fixed(22))
    while target.state.committed < 40:
        run.emitted += run.decoder.step(100)
    assert run.tokens == plain_tokens(WARM, 40)


def test_a_text_that_repeats_is_looked_up() -> None:
    """A cycle of seven tokens: after two turns lookups carry the text."""
    cycle = np.full((7, 7), -9.0, dtype=np.float32)
    cycle[np.arange(7), (np.arange(7) + 1) % 7] = 9.0
    target = TableTarget(cycle)
    run = start(target, None, fixed(15, use_lookup=True), SamplingParams()).until(100)
    assert run.tokens == plain_tokens(SamplingParams(), 100, cycle)
    sources = [e.source for e in run.emitted]
    assert set(sources[:7]) == {TokenSource.PLAIN}
    assert sources[20:].count(TokenSource.NGRAM) > 60


def test_a_round_that_was_looked_up_ends_a_run_of_plain_steps(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    clock = Clock()
    for module in (plain, host_round):
        monkeypatch.setattr(module, "time", clock)
    cycle = np.full((7, 7), -9.0, dtype=np.float32)
    cycle[np.arange(7), (np.arange(7) + 1) % 7] = 9.0
    target = TableTarget(cycle, clock=clock, pass_ms=lambda num_nodes: 10.0 + 0.1 * num_nodes)
    options = SpeculationOptions(15, is_auto=True, use_lookup=True)
    run = start(target, None, options, SamplingParams()).until(100)
    assert run.rounds[-1].tree.num_nodes > 1 and run.decoder._controller._plain_run == 0


def test_a_trial_that_finds_nothing_to_look_up_is_forgiven_once(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What was learnt counts for less at the start of a trial, not again in each of its rounds."""
    forgiven: list[int] = []
    options = SpeculationOptions(15, is_auto=True, use_lookup=True)
    run = start(TableTarget(TABLE), None, options, WARM)
    monkeypatch.setattr(run.decoder._controller._calibration, "forgive", lambda: forgiven.append(1))
    run.until(20)  # plain steps are known now
    run.decoder._controller._observe_gain(-100.0)
    monkeypatch.setattr(run.decoder._lookup, "propose", lambda _: ((), 0))
    run.until(120)
    assert len(forgiven) == 1


@dataclass
class Timed:
    """A table whose passes take known times, and a draft of known time and quality."""

    monkeypatch: pytest.MonkeyPatch
    clock: Clock = field(default_factory=Clock)
    node_ms: float = 0.3

    def pass_ms(self, num_nodes: int) -> float:
        return 10.0 + self.node_ms * num_nodes

    def run(
        self,
        table: np.ndarray,
        draft_ms: float,
        count: int,
        sampling: SamplingParams = WARM,
        new_drafter: type[TableDrafter] = TableDrafter,
    ) -> tuple[Run, TableDrafter, float]:
        """The last value: time over that of plain decoding."""
        for module in (plain, host_round):
            self.monkeypatch.setattr(module, "time", self.clock)
        target = TableTarget(TABLE, clock=self.clock, pass_ms=self.pass_ms)
        drafter = new_drafter(table, target.state, clock=self.clock, draft_ms=draft_ms)
        cost = CostModel()
        for num_nodes in (1, 64):
            cost.observe_verify(num_nodes, self.pass_ms(num_nodes))
        options = SpeculationOptions(64, is_auto=True, use_lookup=False)
        before = self.clock.now_ms
        run = start(target, drafter, options, sampling, cost).until(count)
        assert run.tokens == plain_tokens(sampling, count)
        return run, drafter, (self.clock.now_ms - before) / (count * self.pass_ms(1))


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> Timed:
    return Timed(monkeypatch)


def test_a_useless_draft_is_dropped(timed: Timed) -> None:
    _, drafter, time = timed.run(-TABLE * 4, draft_ms=4.0, count=400)
    assert drafter.num_proposals < 40
    assert time < 1.05


def test_a_draft_that_takes_too_long_is_dropped(timed: Timed) -> None:
    _, drafter, time = timed.run(TABLE + NOISE, draft_ms=100.0, count=1000)
    assert drafter.num_proposals < 40
    assert time < 1.5


def test_a_good_draft_is_used_every_round(timed: Timed) -> None:
    run, drafter, time = timed.run(TABLE * 4, draft_ms=4.0, count=400, sampling=SamplingParams())
    assert drafter.num_proposals >= 0.9 * (len(run.rounds) - 8)  # plain steps to compare come first
    assert time < 0.2


def test_the_tree_is_as_large_as_it_pays(timed: Timed) -> None:
    """Between the two: some nodes, not all, and a gain."""
    run, _, time = timed.run(TABLE + NOISE, draft_ms=4.0, count=400)
    sizes = [one.tree.num_nodes for one in run.rounds]
    assert 2 < np.mean(sizes) < 60
    assert time < 0.8


class _LateDrafter(TableDrafter):
    """Useless for the first 200 tokens, then right."""

    def propose(
        self, anchor: int, sampler: Sampler, num_candidates: int, num_positions: int
    ) -> Proposal:
        self._table = TABLE * (3 if self._state.committed >= 200 else -4)
        return super().propose(anchor, sampler, num_candidates, num_positions)


@pytest.mark.parametrize("node_ms", [0.3, 3.0])
def test_a_draft_that_becomes_good_is_used_again(timed: Timed, node_ms: float) -> None:
    """Also where nodes cost so much that a draft of ill repute gets none: it is still judged."""
    timed.node_ms = node_ms
    run, _, _ = timed.run(
        TABLE, draft_ms=4.0, count=800, sampling=SamplingParams(), new_drafter=_LateDrafter
    )
    early, late = run.rounds[100:150], run.rounds[-30:-1]
    assert np.mean([one.tree.num_nodes > 1 for one in early]) < 0.3
    assert np.mean([len(one.path) for one in late]) > 2.5


def test_rounds_that_often_take_far_longer_are_no_gain(timed: Timed) -> None:
    """A single slow pass is a pause of the machine; where every other one is, drafting loses."""
    num_passes = 0

    def pass_ms(num_nodes: int) -> float:
        nonlocal num_passes
        num_passes += num_nodes > 1
        return 10.0 + 0.3 * num_nodes + (30.0 if num_nodes > 1 and num_passes % 2 == 0 else 0.0)

    timed.pass_ms = pass_ms  # type: ignore[method-assign]
    _, drafter, _ = timed.run(TABLE + NOISE, draft_ms=4.0, count=1500)
    assert drafter.num_proposals < 110
