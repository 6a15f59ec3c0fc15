"""Times that blocks note become a layer's phases."""

import numpy as np
import pytest

from benchmarks.gpu_phases import read_phases


def test_phases_add_up() -> None:
    """Two blocks: one works alone in the first operation, both in the others."""
    cycles = np.array(
        [
            [[0, 10, 40], [0, 0, 40]],
            [[40, 50, 90], [40, 60, 100]],
            [[100, 120, 200], [100, 110, 200]],
        ]
    )
    phases = read_phases(["norm", "linear", "linear"], cycles, total_us=400.0, num_layers=2)
    assert list(phases) == ["norm", "linear"]
    norm, linear = phases.values()
    assert (norm.count, norm.wait_us, norm.work_us, norm.idle_us) == (0.5, 5.0, 15.0, 20.0)
    assert (linear.count, linear.wait_us, linear.idle_us) == (1.0, 30.0, 0.0)
    assert linear.work_us == pytest.approx(40.0 + 85.0)
