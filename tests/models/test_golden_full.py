"""The full set of references, which only a developer has; nothing here is collected without it.

A 16-bit hybrid of twice the size, the same model in four block formats, and whole greedy runs of
its draft as z-lab's code does them. tests/data holds a cut of it.
"""

import numpy as np
import pytest

from draftree.core import DraftTree
from draftree.prefill.chunked import prefill
from tests.drafts.test_dflash_model import check_greedy_run, open_draft
from tests.golden import FULL_SET, golden
from tests.models.test_golden import TOLERANCE, check_divergence, greedy
from tests.tiny import open_target, run_chain

QUANTS = ("Q8_0", "Q5_K_M", "Q4_K_M", "Q4_0")
A = FULL_SET / "qwen35"


def test_sixteen_bit_files() -> None:
    arrays = np.load(A / "logits.npz")
    target = open_target(A / "tiny-qwen35-A-F16.gguf", feature_layers=tuple(range(8)))
    for sequence in ("len1", "len5", "len33", "len130", "len300", "text"):
        target.state.reset()
        logits = run_chain(target, arrays[f"{sequence}.ids"])
        assert np.abs(logits - arrays[f"{sequence}.logits"]).max() < TOLERANCE
    for prompt in ("g1", "g5", "g33", "g130", "gtext"):
        expected = arrays[f"{prompt}.ids"].tolist()
        assert greedy(target, arrays[f"{prompt}.prompt"], len(expected)) == expected
    target.state.reset()
    target.state.begin(DraftTree.chain(tuple(arrays["len33.ids"].tolist())), is_committed=True)
    features = target.forward(()).features
    assert features is not None
    found = features[:33].reshape(33, 8, -1).transpose(1, 0, 2)
    assert np.abs(found - arrays["len33.layer_out"]).max() < TOLERANCE


@pytest.mark.parametrize("quant", QUANTS)
def test_quantised_files_in_exact_math(quant: str) -> None:
    """Weights dequantised to float32 and computed in float32: the strict reference of a
    quantised file.
    """
    arrays, plain = np.load(A / "quants_logits.npz"), np.load(A / "logits.npz")
    target = open_target(A / f"tiny-qwen35-A-{quant}.gguf")
    for sequence in ("len33", "text"):
        target.state.reset()
        logits = run_chain(target, plain[f"{sequence}.ids"])
        assert np.abs(logits - arrays[f"{quant}.{sequence}.deq_logits"]).max() < TOLERANCE
    for prompt in ("g33", "gtext"):
        expected, gaps = arrays[f"{quant}.{prompt}.deq_ids"], arrays[f"{quant}.{prompt}.deq_gap"]
        sure = int(np.argmax(gaps < 2e-3)) if (gaps < 2e-3).any() else len(gaps)
        found = greedy(target, plain[f"{prompt}.prompt"], len(expected))
        assert sure > 4 and found[:sure] == expected[:sure].tolist()


@pytest.mark.parametrize("quant", QUANTS)
def test_quantised_kernels_diverge_no_more_than_llamacpp(quant: str) -> None:
    arrays = np.load(A / "quants_logits.npz")
    target = open_target(A / f"tiny-qwen35-A-{quant}.gguf", exact=False)
    logits = run_chain(target, np.load(A / "logits.npz")["text.ids"])
    native = [arrays[f"{quant}.text.native_top20_{key}"] for key in ("ids", "logits")]
    check_divergence(logits, arrays[f"{quant}.text.deq_logits"], *native)


@pytest.mark.parametrize("prompt", ["g5", "g33", "gtext"])
def test_whole_greedy_runs(prompt: str) -> None:
    target = open_target(
        A / "tiny-qwen35-A-F16.gguf", feature_layers=(1, 2, 3, 4, 5), num_threads=1
    )
    arrays = np.load(golden("dflash/dflash.npz"))
    _, drafter = open_draft(golden("dflash/tiny-dflash-A-F16.gguf"))
    check_greedy_run(arrays, f"full.run_{prompt}", target, drafter)


def test_the_target_gives_the_features() -> None:
    arrays, rows = np.load(golden("dflash/dflash.npz")), []
    target = open_target(A / "tiny-qwen35-A-F16.gguf", feature_layers=(1, 2, 3, 4, 5))
    prefill(target, arrays["target_ids"].tolist(), 32, lambda part: rows.append(part.copy()))
    assert np.abs(np.concatenate(rows) - arrays["target_features"]).max() < TOLERANCE
