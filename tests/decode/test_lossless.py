"""Speculation never changes text or state: every target, draft, budget and way of sampling."""

from collections import Counter
from dataclasses import replace
from functools import cache

import numpy as np
import pytest

from draftree.core import SamplingParams, TokenSource
from draftree.decode import host_round
from draftree.decode.cost import CostModel
from draftree.decode.host_round import SpeculationOptions, SpeculativeDecoder
from draftree.decode.sampler import Sampler
from draftree.drafts.dflash import BlockDrafter
from draftree.drafts.dflash_model import load_draft
from draftree.drafts.drafter import Proposer
from draftree.drafts.lookup import LookupIndex
from draftree.kernels.cpu.attention_chunk import CHUNK
from draftree.models.target import Target
from draftree.weights.file import open_checkpoint
from tests.decode.oracle import (
    EdgeDrafter,
    OracleDrafter,
    PlainRun,
    RandomDrafter,
    check_lossless,
    count_kinds,
    run_plain,
)
from tests.decode.table import TableTarget
from tests.examples import share
from tests.golden import golden
from tests.made import DRAFT_FEATURE_LAYERS, make_draft, make_quantised
from tests.tiny import new_ops, open_target, same_state, tiny_path

BUDGETS = (0, 1, 8, 15, 22, 40, 64)
TARGETS = ("llama", "qwen2", "qwen3", "qwen35-mtp", "quantised")  # the last two are hybrid
NUM_TOKENS = 32
NUM_WITHOUT_LUCK = 12  # a random draft is hardly ever right: a round a token
_FILTERS = SamplingParams(temperature=1.0, top_p=0.9, top_k=40, min_p=0.05)
_PENALTIES = SamplingParams(repetition_penalty=1.2, presence_penalty=0.4, frequency_penalty=0.3)
SAMPLINGS = {
    "greedy": SamplingParams(),
    "warm": SamplingParams(temperature=0.7),
    "filtered": _FILTERS,
    "penalised": replace(_PENALTIES, temperature=1.0, top_p=0.9, top_k=40, min_p=0.05),
    "greedy penalised": _PENALTIES,
}
_HOT = SamplingParams(temperature=3.0)  # the noise decides, and any draft knows the noise
KINDS = ("zero", "partial", "whole", "deep", "sibling", "after a sibling", "moved")


def fixed(budget: int) -> SpeculationOptions:
    return SpeculationOptions(budget, is_auto=False, use_lookup=False)


@cache
def one_thread(name: str) -> Target:
    """Threads never change a bit (tests/state), and one is faster where cores are shared."""
    if name in ("quantised", "qwen35-q4"):
        path = make_quantised() if name == "quantised" else tiny_path(name)
        return open_target(path, exact=False, num_threads=1, kv_dtype=np.float16)
    layers = {"qwen35": (1, 2, 3, 4, 5), "qwen35-mtp": DRAFT_FEATURE_LAYERS}.get(name, ())
    return open_target(tiny_path(name), num_threads=1, feature_layers=layers)


@cache
def plain_run(name: str, sampling: str, seed: int) -> PlainRun:
    target = one_thread(name)
    rng = np.random.default_rng(seed)
    prompt = rng.integers(0, target.model.vocab_size, int(rng.integers(1, 20))).tolist()
    params = replace(SAMPLINGS.get(sampling, _HOT), seed=seed)
    return run_plain(target, prompt, params, NUM_TOKENS)


@cache
def block_drafter(name: str) -> BlockDrafter:
    """A DFlash draft: random weights for one hybrid model; for the other, weights that were trained
    before the model was quantised.
    """
    path = make_draft() if name == "qwen35-mtp" else golden("dflash/tiny-dflash-A-F16.gguf")
    ops = new_ops(exact=True, num_threads=1)
    return BlockDrafter(load_draft(open_checkpoint(path), ops), one_thread(name).model, ops)


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", TARGETS)
def test_oracle_drafts(name: str, sampling: str) -> None:
    target, kinds = one_thread(name), Counter()
    for budget in BUDGETS:
        for seed in range(1, 1 + share(6)):
            plain = plain_run(name, sampling, seed)
            oracle = OracleDrafter(
                target.state, plain.text, target.model.vocab_size, seed * 100 + budget
            )
            kinds += count_kinds(check_lossless(target, plain, oracle, fixed(budget)))
    assert all(kinds[kind] > 0 for kind in KINDS), kinds


@pytest.mark.parametrize("sampling", SAMPLINGS)
@pytest.mark.parametrize("name", TARGETS)
def test_random_drafts(name: str, sampling: str) -> None:
    target, kinds = one_thread(name), Counter()
    for i, budget in enumerate(BUDGETS):
        plain = plain_run(name, sampling, 1 + i % 2).first(NUM_WITHOUT_LUCK)
        drafter = RandomDrafter(target.state, target.model.vocab_size, budget)
        kinds += count_kinds(check_lossless(target, plain, drafter, fixed(budget)))
    assert kinds["zero"] > 0


@pytest.mark.parametrize("sampling", ["greedy", "warm", "penalised"])
@pytest.mark.parametrize("name", ["llama", "qwen35-mtp"])
def test_drafts_with_edges(name: str, sampling: str) -> None:
    target, kinds = one_thread(name), Counter()
    for budget in (1, 8, 22, 64):
        plain = plain_run(name, sampling, 1 + budget % 2)
        drafter = EdgeDrafter(target.state, plain.text, target.model.vocab_size, budget)
        kinds += count_kinds(check_lossless(target, plain, drafter, fixed(budget)))
    assert all(kinds[kind] > 0 for kind in ("zero", "partial", "sibling", "moved")), kinds


REAL_DRAFTS = [
    *(("qwen35-mtp", sampling) for sampling in (*SAMPLINGS, "hot")),
    *(("qwen35", sampling) for sampling in ("filtered", "hot")),
    *(pytest.param("qwen35", name, marks=pytest.mark.long) for name in ("greedy", "warm")),
    *(pytest.param("qwen35", n, marks=pytest.mark.long) for n in SAMPLINGS if "penalised" in n),
]


@pytest.mark.parametrize(("name", "sampling"), REAL_DRAFTS)
def test_a_real_draft(name: str, sampling: str) -> None:
    target, kinds = one_thread(name), Counter()
    for i, budget in enumerate(BUDGETS):
        plain = plain_run(name, sampling, 1 + i % 2).first(NUM_WITHOUT_LUCK)
        kinds += count_kinds(check_lossless(target, plain, block_drafter(name), fixed(budget)))
    assert kinds["zero"] > 0
    if sampling == "hot":
        assert all(kinds[kind] > 0 for kind in ("partial", "sibling", "moved")), kinds


@pytest.mark.parametrize("sampling", ["greedy", "filtered"])
def test_k_quants(sampling: str) -> None:
    target, kinds = one_thread("qwen35-q4"), Counter()
    plain = plain_run("qwen35-q4", sampling, 1)
    for budget in (8, 22, 64):
        oracle = OracleDrafter(target.state, plain.text, target.model.vocab_size, budget)
        kinds += count_kinds(check_lossless(target, plain, oracle, fixed(budget)))
    assert kinds["partial"] > 0


def check_penalties(sampling: str) -> Counter[str]:
    """With few tokens to choose from, what a round has accepted weighs on its next choice."""
    rng, kinds = np.random.default_rng(6), Counter()
    target = TableTarget(rng.standard_normal((8, 8)))
    for seed in (1, 2):
        plain = run_plain(target, (1, 2, 3), replace(SAMPLINGS[sampling], seed=seed), 60)
        for budget in BUDGETS:
            oracle = OracleDrafter(target.state, plain.text, 8, seed * 100 + budget)
            kinds += count_kinds(check_lossless(target, plain, oracle, fixed(budget)))
    return kinds


@pytest.mark.parametrize("sampling", ["penalised", "greedy penalised"])
def test_penalties_within_a_round(sampling: str) -> None:
    kinds = check_penalties(sampling)
    assert all(kinds[kind] > 0 for kind in KINDS), kinds


@pytest.mark.parametrize("name", ["llama", "qwen35-mtp"])
def test_trees_across_the_chunks_of_attention(name: str) -> None:
    target, kinds = one_thread(name), Counter()
    prompt = np.random.default_rng(4).integers(0, 500, CHUNK - 12).tolist()
    plain = run_plain(target, prompt, SamplingParams(temperature=0.7, seed=4), NUM_TOKENS)
    for budget in (15, 40):
        oracle = OracleDrafter(target.state, plain.text, target.model.vocab_size, budget)
        kinds += count_kinds(check_lossless(target, plain, oracle, fixed(budget)))
    assert kinds["partial"] > 0 and kinds["moved"] > 0


def test_seeds_and_temperature_matter() -> None:
    """Otherwise the runs above would all be the same one."""
    target, prompt = one_thread("llama"), (5, 9, 200, 31)
    texts = {
        run_plain(target, prompt, replace(sampling, seed=seed), 8).tokens
        for sampling in SAMPLINGS.values()
        for seed in (1, 2, 3)
    }
    assert len(texts) >= 1 + 1 + 3 * 2  # greedy ones once each; some filtered ones may agree


@pytest.mark.parametrize("is_auto", [False, True])
@pytest.mark.parametrize("name", TARGETS)
def test_looked_up_drafts_alone_and_merged(
    name: str, is_auto: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    target, kinds = one_thread(name), Counter()
    options = SpeculationOptions(22, is_auto=is_auto, use_lookup=True)
    for sampling in ("greedy", "penalised"):
        plain = plain_run(name, sampling, 1)
        oracle = OracleDrafter(target.state, plain.text, target.model.vocab_size, 5)
        monkeypatch.setattr(host_round, "LookupIndex", lambda p=plain: _KnowingIndex(p.text))
        for drafter in (None, oracle):
            rounds = check_lossless(target, plain, drafter, options, cost=_cost())
            kinds += count_kinds(rounds)
    always = ("lookup", "zero", "partial", "whole", "moved")
    wanted = ("lookup", "partial") if is_auto else always  # how much is drafted hangs on the clock
    assert all(kinds[kind] > 0 for kind in wanted), kinds


class _KnowingIndex(LookupIndex):
    """Looks up a few true tokens, then wrong ones."""

    def __init__(self, text: tuple[int, ...]) -> None:
        super().__init__()
        self._text, self._rng = text, np.random.default_rng(3)

    def propose(self, max_tokens: int) -> tuple[tuple[int, ...], int]:
        start, count = len(self._read_text()), int(self._rng.integers(0, 6))
        tokens = (*self._text[start : start + count], *self._rng.integers(0, 256, 4).tolist())
        return tokens[:max_tokens], int(self._rng.integers(3, 7))


@pytest.mark.parametrize("name", ["llama", "qwen35-mtp"])
def test_looked_up_drafts_of_a_text_that_repeats(name: str) -> None:
    target = one_thread(name)
    loop = run_plain(target, (7, 8, 9), SamplingParams(), 12).text
    plain = run_plain(target, (*loop, 7, 8, 9), SamplingParams(), NUM_TOKENS)
    options = SpeculationOptions(22, is_auto=False, use_lookup=True)
    rounds = check_lossless(target, plain, None, options)
    assert any(TokenSource.NGRAM in one.tree.sources for one in rounds)


def _cost(node_ms: float = 0.01) -> CostModel:
    cost = CostModel()
    for num_nodes in (1, 64):
        cost.observe_verify(num_nodes, 10.0 + node_ms * num_nodes)
    while not cost.is_measured:
        cost.observe_plain(10.0 + node_ms, 100)
    return cost


@pytest.mark.parametrize("name", ["llama", "qwen35-mtp", "quantised"])
def test_automatic_budget(name: str) -> None:
    target, sizes = one_thread(name), set()
    for seed, node_ms in ((1, 0.01), (2, 1.0), (3, 10.0)):
        plain = plain_run(name, "warm", seed)
        oracle = OracleDrafter(target.state, plain.text, target.model.vocab_size, seed)
        options = SpeculationOptions(64, is_auto=True, use_lookup=True)
        rounds = check_lossless(target, plain, oracle, options, cost=_cost(node_ms))
        sizes |= {one.tree.num_nodes for one in rounds}
    assert len(sizes) > 1


@pytest.mark.parametrize("name", ["llama", "qwen35-mtp"])
def test_a_path_ends_at_a_stop_token(name: str) -> None:
    """Wherever it stands in a path that was drafted right, nothing after it is emitted or kept."""
    target, plain = one_thread(name), plain_run(name, "warm", 1)
    for at in range(NUM_TOKENS // 2):
        stop = plain.tokens[at]
        if stop in plain.tokens[:at]:
            continue
        found = _Decoding(target, plain, _perfect(target, plain), 15, stop_ids=frozenset({stop}))
        while stop not in found.tokens:
            found.step(NUM_TOKENS)
        assert tuple(found.tokens) == plain.tokens[: at + 1]
        assert same_state(target.state.snapshot(), plain.states[at + 1])


@pytest.mark.parametrize("name", ["llama", "qwen35-mtp"])
def test_a_path_ends_at_max_tokens(name: str) -> None:
    target, plain = one_thread(name), plain_run(name, "filtered", 2)
    for max_tokens in range(1, 19):
        found = _Decoding(target, plain, _perfect(target, plain), 15)
        assert found.step(max_tokens) == min(max_tokens, 16)
        assert same_state(target.state.snapshot(), plain.states[len(found.tokens)])
        found.step(3)
        assert tuple(found.tokens) == plain.tokens[: len(found.tokens)]


def _perfect(target: Target, plain: PlainRun) -> OracleDrafter:
    return OracleDrafter(target.state, plain.text, target.model.vocab_size, seed=0, is_perfect=True)


class _Decoding:
    """A speculative run by hand."""

    def __init__(
        self,
        target: Target,
        plain: PlainRun,
        drafter: Proposer,
        budget: int,
        stop_ids: frozenset[int] = frozenset(),
    ) -> None:
        self.tokens: list[int] = []
        target.state.restore(plain.states[0])
        sampler = Sampler(plain.sampling, target.model.vocab_size, plain.prompt)
        options = replace(fixed(budget), stop_ids=stop_ids, width=1)
        self._decoder = SpeculativeDecoder(target, sampler, drafter, options)
        self._decoder.start(plain.prompt[-1])

    def step(self, max_tokens: int) -> int:
        emitted = [e.token for e in self._decoder.step(max_tokens)]
        self.tokens += emitted
        return len(emitted)
