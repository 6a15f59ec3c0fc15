"""Speculation on a GPU never changes text or state; every round's parts run on the host here."""

from collections import Counter

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.core import SamplingParams
from draftree.decode.decoder import Round
from draftree.decode.host_round import SpeculationOptions, SpeculativeDecoder
from draftree.decode.sampler import Sampler
from draftree.drafts.registry import find_kind, read_draft_size
from draftree.kernels.cuda.compile import Gpu
from draftree.prefill.chunked import prefill
from tests.cuda import CudaPlace
from tests.decode.oracle import OracleDrafter, check_lossless, count_kinds, run_plain
from tests.drafts.pairs import PAIRS
from tests.tiny import tiny_path

NUM_TOKENS = {"emulated": 10, "real": 200}
BUDGETS = {"emulated": (7,), "real": (8, 22, 40)}


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=3)])
@pytest.mark.parametrize("name", ["llama", "qwen35-mtp"])
def test_an_oracle_changes_nothing(name: str, sampling: SamplingParams, any_gpu: Gpu) -> None:
    target = CudaPlace(any_gpu).open_target(tiny_path(name))
    kind = "real" if any_gpu.is_real else "emulated"
    plain, kinds = run_plain(target, (5, 9, 200, 31), sampling, NUM_TOKENS[kind]), Counter[str]()
    for budget in BUDGETS[kind]:
        oracle = OracleDrafter(target.state, plain.text, target.model.vocab_size, budget)
        options = SpeculationOptions(budget, is_auto=False, use_lookup=False)
        kinds += count_kinds(check_lossless(target, plain, oracle, options))
    assert kinds["partial"] > 0 or kinds["whole"] > 0, kinds


SHORT = ("mtp, hybrid", "dflash2, dense")
OTHERS = [name for name in PAIRS if name not in SHORT]
KINDS = [*SHORT, *(pytest.param(name, marks=pytest.mark.long) for name in OTHERS)]


@pytest.mark.parametrize("name", KINDS)
def test_no_kind_of_draft_changes_anything(name: str, any_gpu: Gpu) -> None:
    place, draft = CudaPlace(any_gpu), PAIRS[name].open_draft()
    layers = read_draft_size(draft).feature_layers
    target = place.open_target(tiny_path(PAIRS[name].target), layers)
    drafter = find_kind(draft).load(
        draft, target.model, place.new_ops(), block_len=0, use_draft_vocab=False
    )
    sampling, prompt = SamplingParams(temperature=3.0, seed=3), (5, 9, 200, 31)
    plain = run_plain(target, prompt, sampling, 7 if not any_gpu.is_real else 100)
    target.state.reset()
    drafter.reset()
    prefill(target, prompt[:-1], 64, drafter.extend_context)
    rounds: list[Round] = []
    options = SpeculationOptions(8, is_auto=False, use_lookup=False)
    sampler = Sampler(sampling, target.model.vocab_size, prompt)
    decoder = SpeculativeDecoder(target, sampler, drafter, options, watch=rounds.append)
    decoder.start(prompt[-1])
    tokens: list[int] = []
    while len(tokens) < len(plain.tokens):
        tokens += [each.token for each in decoder.step(len(plain.tokens) - len(tokens))]
        assert tuple(tokens) == plain.tokens[: len(tokens)]
        assert drafter.position == target.state.committed
    assert any(each.tree.num_nodes > 1 for each in rounds)
