"""Which kernels a model's operations launch, in order: what is fused stays fused."""

from functools import cache

import numpy as np
import pytest

torch = pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.compile import Gpu, KernelSource  # noqa: E402
from draftree.kernels.cuda.program import Program  # noqa: E402
from tests.cuda import CudaPlace  # noqa: E402
from tests.golden import golden  # noqa: E402
from tests.made import HYBRID, make_draft  # noqa: E402
from tests.tiny import tiny_path  # noqa: E402

ATTENTION = ("prepare", "linear", "rotary", "attention", "attention_merge", "prepare", "linear")
DELTA_NET = ("prepare", "linear", "gated_delta", "prepare", "linear")
FFN = ("prepare", "linear", "prepare", "linear")
MIXERS = {
    "llama": [ATTENTION] * 3,
    "qwen3": [ATTENTION] * 3,
    "qwen35-mtp": [DELTA_NET, DELTA_NET, DELTA_NET, ATTENTION],
}


@cache
def recording_gpu() -> tuple[Gpu, list[str]]:
    """A GPU whose kernels do nothing, and the names of those that were launched."""
    names: list[str] = []

    class Recorder:
        def __init__(self, source: KernelSource) -> None:
            self._name = source.name.removesuffix("_kernel")

        def launch(self, *args: object, **options: object) -> None:
            names.append(self._name)

    return Gpu(98, 90, 4, 232448, 232448, Recorder), names


def launches(program: Program, num_rows: int = 8) -> list[str]:
    names = recording_gpu()[1]
    names.clear()
    program.launch(num_rows)
    return list(names)


@pytest.mark.parametrize("name", MIXERS)
def test_a_pass_launches_no_more_than_its_operations(name: str) -> None:
    blocks = [part for mixer in MIXERS[name] for part in (*mixer, *FFN)]
    last = len(MIXERS[name]) - 1
    for feature_layers in ((), (0, 1), (1, last)):
        target = CudaPlace(recording_gpu()[0]).open_target(tiny_path(name), feature_layers)
        programs = target.programs()
        copy = ["copy"] if last in feature_layers else []  # the others are made by the next norm
        assert launches(programs.body) == ["embed", *blocks, *copy]
        assert launches(programs.head) == ["prepare", "linear"]
        recurrent = ["conv_commit", "delta_commit"] if DELTA_NET in MIXERS[name] else []
        assert launches(programs.commit) == ["kv_commit", *recurrent]


def test_a_layer_that_is_named_twice_is_copied_twice() -> None:
    target = CudaPlace(recording_gpu()[0]).open_target(tiny_path("llama"), (0, 0))
    assert launches(target.programs().body).count("copy") == 1  # and once by the norm


def test_a_draft_prepares_its_context_once_for_all_layers() -> None:
    place = CudaPlace(recording_gpu()[0])
    drafter = place.open_drafter(make_draft("Q8_0"), place.open_target(golden(HYBRID), (0, 1, 3)))
    programs = drafter.programs()
    layer = ("linear", "rotary")
    assert launches(programs.context) == ["prepare", "linear", "prepare", *layer, *layer]
    queries, *rest = ATTENTION[1:]
    block = ("prepare", queries, "linear", *rest, *FFN)  # keys and values apart from queries
    assert launches(programs.block) == ["embed", *block, *block]


def test_states_of_another_device_are_refused() -> None:
    ops = CudaPlace(recording_gpu()[0]).new_ops()
    with ops.capture(), pytest.raises(TypeError, match="expected a LazyMatrix of this device"):
        ops.linear(ops.matmul_input(torch.zeros(512, 64)), np.zeros((64, 64)))
