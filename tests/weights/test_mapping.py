"""Files as memory, and pages of them that are given back."""

import mmap
from pathlib import Path

import numpy as np
import pytest

from draftree.weights.mapping import forget_file, forget_rows, map_file

PAGE = mmap.PAGESIZE


def resident_pages(path: Path) -> int:
    """Pages of a mapped file that this process has in memory."""
    lines = Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines()
    start = next(i for i, line in enumerate(lines) if line.endswith(str(path)))
    return int(next(line for line in lines[start:] if line.startswith("Rss:")).split()[1]) // (
        PAGE // 1024
    )


@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="system: there is no smaps")
def test_pages_go_and_come_again(tmp_path: Path) -> None:
    path = tmp_path / "numbers"
    numbers = np.arange(64 * PAGE, dtype=np.uint64).astype(np.uint8)
    path.write_bytes(numbers.tobytes())
    data = map_file(path)
    assert np.array_equal(data, numbers) and resident_pages(path) == 64
    rows = data[10 * PAGE + 5 : 30 * PAGE + 7].reshape(2, -1)
    forget_rows(rows)
    assert resident_pages(path) == 64 - 21  # those at both ends as well
    assert np.array_equal(data, numbers)
    forget_file(rows)
    assert resident_pages(path) == 0
    assert np.array_equal(data, numbers)


def test_arrays_of_no_file_are_left_alone() -> None:
    numbers = np.arange(10 * PAGE, dtype=np.uint8)
    forget_rows(numbers[PAGE : 9 * PAGE])
    forget_file(numbers)
    assert np.array_equal(numbers, np.arange(10 * PAGE, dtype=np.uint8))
