"""Tiny models on a GPU against transformers in float32: 16-bit arithmetic, to a hundredth."""

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.core import DraftTree
from draftree.kernels.cuda.compile import Gpu
from tests.cuda import CudaPlace, logits_of, relative_error
from tests.golden import golden
from tests.models.test_golden import ARRAYS
from tests.tiny import tiny_path

TOLERANCE = 1e-2


@pytest.mark.parametrize("name", ARRAYS)
def test_logits(name: str, any_gpu: Gpu) -> None:
    arrays, target = np.load(golden(ARRAYS[name])), CudaPlace(any_gpu).open_target(tiny_path(name))
    ids, expected = arrays["len33.ids"].tolist(), arrays["len33.logits"]
    together, num_alone = logits_of(target, ids, 33), 33 if any_gpu.is_real else 5
    alone = logits_of(target, ids[:num_alone], 1)
    assert np.array_equal(together[:num_alone], alone), "the pass is not batch-invariant"
    assert relative_error(together, expected) < TOLERANCE
    agreement = (together.argmax(axis=1) == expected.argmax(axis=1)).mean()
    assert agreement > 0.9, f"{agreement:.0%} of the best tokens agree"


@pytest.mark.parametrize("name", ["llama", "qwen35"])
def test_a_long_pass_is_prefill(name: str, any_gpu: Gpu) -> None:
    """More rows than the exact kernels take at once: another way, nearly the same numbers."""
    arrays, target = np.load(golden(ARRAYS[name])), CudaPlace(any_gpu).open_target(tiny_path(name))
    key = max((k for k in arrays.files if k.endswith(".logits")), key=lambda k: len(arrays[k]))
    ids, expected = arrays[key.replace(".logits", ".ids")].tolist(), arrays[key]
    assert len(ids) > 64
    target.state.begin(DraftTree.chain(tuple(ids)), is_committed=True)
    logits = target.forward(range(len(ids) - 8, len(ids))).logits
    assert relative_error(logits, expected[-8:]) < TOLERANCE
