"""Speculation on a GPU never changes text or state; every round's parts run on the host here."""

from collections import Counter

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.core import SamplingParams
from draftree.decode.host_round import SpeculationOptions
from draftree.kernels.cuda.compile import Gpu
from tests.cuda import CudaPlace
from tests.decode.oracle import OracleDrafter, check_lossless, count_kinds, run_plain
from tests.tiny import tiny_path

NUM_TOKENS = {"emulated": 12, "real": 200}
BUDGETS = (8, 22, 40)


@pytest.mark.parametrize("sampling", [SamplingParams(), SamplingParams(temperature=0.8, seed=3)])
@pytest.mark.parametrize("name", ["llama", "qwen35-mtp"])
def test_an_oracle_changes_nothing(name: str, sampling: SamplingParams, any_gpu: Gpu) -> None:
    target = CudaPlace(any_gpu).open_target(tiny_path(name))
    count = NUM_TOKENS["real" if any_gpu.is_real else "emulated"]
    plain, kinds = run_plain(target, (5, 9, 200, 31), sampling, count), Counter[str]()
    for budget in BUDGETS if any_gpu.is_real else (22,):
        oracle = OracleDrafter(target.state, plain.text, target.model.vocab_size, budget)
        options = SpeculationOptions(budget, is_auto=False, use_lookup=False)
        kinds += count_kinds(check_lossless(target, plain, oracle, options))
    assert kinds["partial"] > 0 or kinds["whole"] > 0, kinds
