"""A real server beside a real engine, with a tiny model."""

import pytest

from draftree.bench.fault import BenchError
from draftree.bench.overhead import (
    OverheadOptions,
    Reply,
    measure_overhead,
    run_server,
    summarize_replies,
)


def test_rounds_are_compared_in_turns():
    served = [[Reply("a", 4, 0.1, 1.0), Reply("b", 4, 0.2, 1.0)]] * 2
    direct = [[Reply("a", 4, 0.1, 0.5), Reply("x", 4, 0.1, 0.5)]] * 2
    measures = summarize_replies(served, direct)
    assert (measures.server.samples, measures.direct.samples) == ((4.0, 4.0), (8.0, 8.0))
    assert measures.ratio.value == 0.5
    assert measures.server_ttft_ms.samples == (100.0, 200.0, 100.0, 200.0)
    assert (measures.num_replies, measures.num_equal) == (4, 2)


def test_server_and_engine_say_the_same(tiny_path, say):
    measures = measure_overhead(tiny_path, ["Hello", "Count."], OverheadOptions(2, 1, 6), say)
    assert measures.num_equal == measures.num_replies == 2
    assert measures.server.median > 0.0 and measures.server_ttft_ms.low > 0.0
    assert say.lines[-1] == "server and engine in turns: round 1 of 1"


def test_a_server_that_cannot_start_is_a_sentence(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(BenchError, match="did not start"), run_server(path, 2):
        pass
