"""Which launches of a long pass become part of a graph: none that depend on the host's numbers."""

from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda import program as program_module
from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.program import Program


def test_a_graph_does_not_hold_the_sinks_of_an_earlier_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is captured replays with the numbers of that moment."""
    step = SimpleNamespace(num_tokens=100, max_tokens=2048, committed=0, sinks=0)
    seen: list[int] = []

    def capture(launch, before_it=None):
        before = len(seen)
        launch()
        held = seen[before:]
        del seen[before:]
        return SimpleNamespace(replay=lambda: seen.extend(held))

    monkeypatch.setattr(program_module, "capture", capture)
    program = Program(step, Gpu(0, 90, 1, 1, 1))
    program.add(lambda size: seen.append(step.sinks), is_host_sized=True)
    for sinks in (0, 0, 0, 20, 20, 20, 70, 0, 5):
        step.sinks = sinks
        program.run()
    assert seen == [0, 0, 0, 20, 20, 20, 70, 0, 5]
