"""What a start consists of."""

import pytest

from benchmarks import start
from draftree.errors import BenchError

TRACE = """\
import time: self [us] | cumulative | imported package
import time:       100 |        100 |   _io
import time:      2000 |       2100 | numpy.core
import time:      3000 |       5100 |   numpy
import time:       500 |        500 | draftree.cli
import time:       150 |        150 | json
some other line
"""


def test_imports_are_summed_by_package():
    assert start.group_imports(TRACE) == {"numpy": 5.0, "draftree": 0.5, "standard library": 0.2}


def test_small_imports_are_put_together():
    lines = [f"import time: {1000 + 100 * i} | 1 | package{i}" for i in range(20)]
    groups = start.group_imports("\n".join(lines))
    assert len(groups) == 13
    assert sum(groups.values()) == pytest.approx(sum(1 + i / 10 for i in range(20)), abs=0.1)


def test_first_token_comes_before_the_end(tiny_path, say):
    measures = start.measure_start(tiny_path, 1, 1, say)
    assert measures.interpreter_s.median > 0.0
    assert measures.open_s.median > 0.0
    assert measures.first_token_s.median <= measures.exit_s.median
    assert measures.imports_ms["numpy"] > 0.0
    assert "numba" not in measures.imports_ms  # one run before the others has compiled everything


def test_a_failing_run_is_a_sentence(tmp_path, say):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(BenchError, match="failed with status 1"):
        start.measure_start(path, 2, 1, say)
