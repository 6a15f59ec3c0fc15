"""Which launches of a long pass become part of a graph: none that depend on the host's numbers."""

import threading
from types import SimpleNamespace

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda import program as program_module
from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.program import Program, bucket


def capturing(seen: list, note: str = ""):
    """In place of a capture: what launches append to seen is appended by each replay."""

    def capture(launch, before_it=None):
        before = len(seen)
        launch()
        held = seen[before:]
        seen[before:] = [note] if note else []
        return SimpleNamespace(replay=lambda: seen.extend(held))

    return capture


def test_a_graph_does_not_hold_the_sinks_of_an_earlier_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is captured replays with the numbers of that moment."""
    step = SimpleNamespace(num_tokens=100, max_tokens=2048, committed=0, sinks=0)
    seen: list[int] = []

    monkeypatch.setattr(program_module, "capture", capturing(seen))
    program = Program(step, Gpu(0, 90, 1, 1, 1))
    program.add(lambda size: seen.append(step.sinks), is_host_sized=True)
    for sinks in (0, 0, 0, 20, 20, 20, 70, 0, 5):
        step.sinks = sinks
        program.run()
    assert seen == [0, 0, 0, 20, 20, 20, 70, 0, 5]


def test_every_thread_runs_before_it_captures(monkeypatch: pytest.MonkeyPatch) -> None:
    """Libraries make what a thread has of its own at its first use, which breaks a capture."""
    step = SimpleNamespace(num_tokens=100, max_tokens=2048, committed=0, sinks=0)
    seen: list[object] = []
    monkeypatch.setattr(program_module, "capture", capturing(seen, "captured"))
    program = Program(step, Gpu(0, 90, 1, 1, 1))
    program.add(seen.append)
    program.run()
    other = threading.Thread(target=program.run)
    other.start()
    other.join()
    assert seen == [128, 128]
    program.run()
    program.run()
    assert seen == [128, 128, "captured", 128, 128]


def test_warming_captures_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    step = SimpleNamespace(num_tokens=600, max_tokens=2048, committed=0, sinks=0)
    seen: list[object] = []
    monkeypatch.setattr(program_module, "capture", capturing(seen, "captured"))
    gpu = Gpu(0, 90, 1, 1, 1)
    program = Program(step, gpu)
    program.add(seen.append)
    with gpu.rehearsal.warm():
        program.run()
    assert seen == [768, "captured"]
    program.run()
    assert seen == [768, "captured", 768]


def test_sizes_are_few_and_waste_little() -> None:
    sizes = [bucket(rows) for rows in range(1, 4097)]
    assert len(set(sizes)) == 18
    assert all(size >= rows for rows, size in enumerate(sizes, 1))
    assert all(size <= 1.5 * rows + 1 for rows, size in enumerate(sizes, 1) if rows > 85)
