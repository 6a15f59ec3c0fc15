"""A real server beside a real engine, with a tiny model."""

import sys

import pytest

from benchmarks.overhead import (
    OverheadOptions,
    Reply,
    divide_pairs,
    measure_overhead,
    read_reply,
    run_llama_server,
    run_server,
    summarize_replies,
)
from draftree.bench.http import ask
from draftree.bench.median import Ratio, summarize
from draftree.errors import BenchError


def test_rounds_are_compared_in_turns():
    served = [[Reply("a", 4, 0.1, 1.0), Reply("b", 4, 0.2, 1.0)]] * 2
    direct = [[Reply("a", 4, 0.1, 0.5), Reply("x", 4, 0.1, 0.5)]] * 2
    measures = summarize_replies(served, direct)
    assert (measures.server.samples, measures.direct.samples) == ((4.0, 4.0), (8.0, 8.0))
    assert measures.ratio.value == 0.5
    assert measures.decode_ratio.value == round(0.8 / 1.7, 4)
    assert measures.server_ttft_ms.samples == (100.0, 200.0, 100.0, 200.0)
    assert (measures.num_replies, measures.num_equal) == (4, 2)


HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(*events):
    data = b"".join(b"data: " + event.encode() + b"\n\n" for event in events)
    return b"%x\r\n%b\r\n" % (len(data), data)


def content(text):
    return '{"choices":[{"delta":{"content":"' + text + '"}}]}'


def test_bytes_are_read_after_they_came():
    usage = '{"choices":[],"usage":{"completion_tokens":2}}'
    first, last = chunk(content(""), content("He")), chunk(content("y"), usage, "[DONE]")
    pieces = [(0.1, HEAD), (0.2, first[:-9]), (0.3, first[-9:] + last), (0.4, b"0\r\n\r\n")]
    assert read_reply(pieces) == Reply("Hey", 2, 0.3, 0.4)
    assert read_reply([(0.1, HEAD + first), (0.2, last + b"0\r\n\r\n")]).first_s == 0.1
    with pytest.raises(BenchError, match="broke off"):
        read_reply([(0.1, HEAD), (0.2, first + b"0\r\n\r\n")])
    with pytest.raises(BenchError, match="no such model"):
        read_reply([(0.1, b"HTTP/1.1 404 No\r\nContent-Length: 13\r\n\r\nno such model")])


def test_server_and_engine_say_the_same(tiny_path, say):
    measures = measure_overhead(tiny_path, ["Hello", "Count."], OverheadOptions(1, 1, 6), say)
    assert measures.num_equal == measures.num_replies == 2
    assert measures.server.median > 0.0 and measures.server_ttft_ms.low > 0.0
    assert say.lines[-1] == "server and engine in turns: round 1 of 1"


def test_a_server_that_cannot_start_is_a_sentence(tmp_path):
    path = tmp_path / "model.gguf"
    path.write_bytes(b"GGUF")
    with pytest.raises(BenchError, match="did not start"), run_server(path, 2):
        pass


def test_another_systems_server_is_started_alike(tiny_path, tmp_path):
    """A stand-in that takes llama-server's options and is ours."""
    program = tmp_path / "llama-server"
    program.write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        "given = dict(zip(sys.argv[1::2], sys.argv[2::2]))\n"
        f"open({str(tmp_path / 'given')!r}, 'w').write(str(given))\n"
        "names = ('--host', '--port', '--threads', '--api-key')\n"
        "own = [word for name in names for word in (name, given[name])]\n"
        "serve = ['-m', 'draftree', 'serve', given['--model'], '--max-ctx', '256']\n"
        "os.execv(sys.executable, [sys.executable, *serve, *own])\n"
    )
    program.chmod(0o755)
    with run_llama_server(program, tiny_path, 1) as endpoint:
        assert ask(endpoint, endpoint.find_model(), "Hello", 3).num_tokens == 3
    given = (tmp_path / "given").read_text()
    assert "'--parallel': '8'" in given and "'--ctx-size': '32768'" in given
    assert f"'--alias': '{tiny_path.name}'" in given  # no path of this machine in results
    with pytest.raises(BenchError, match="`absent` cannot be run"):
        run_llama_server(tmp_path / "absent", tiny_path, 1).__enter__()


def test_pairs_are_compared_while_the_machine_drifts() -> None:
    ours, theirs = summarize([100.0, 80.0, 50.0], "tok/s"), summarize([101.0, 40.0, 51.0], "tok/s")
    assert divide_pairs(ours, theirs) == Ratio(0.9901, 0.9804, 2.0)
