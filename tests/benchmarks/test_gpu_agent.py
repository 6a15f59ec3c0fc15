"""Sessions of a coding agent with one server, and with another one beside it."""

from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from benchmarks import gpu_agent
from benchmarks.gpu_agent import AgentServer, measure_session
from benchmarks.section_request import agent
from draftree.bench.agent import AgentOptions
from draftree.bench.http import Endpoint
from tests.benchmarks import example

OPTIONS = AgentOptions(48, 1.0, 3)


def test_a_peer_takes_the_same_session_with_the_same_context(monkeypatch, say):
    started = []

    def run(*asked, **_):
        @contextmanager
        def serve():
            started.append(asked)
            yield Endpoint("http://127.0.0.1:1")

        return serve()

    ours = example.agent()
    slower = replace(ours, turns=[replace(t, total_ms=4 * t.total_ms) for t in ours.turns])
    reports = iter([ours, ours, slower])
    monkeypatch.setattr(gpu_agent, "run_server", run)
    monkeypatch.setattr(gpu_agent, "run_llama_server", run)
    monkeypatch.setattr(gpu_agent, "measure_agent", lambda *_: next(reports))
    monkeypatch.setattr(Endpoint, "find_model", lambda _: "a")
    server = AgentServer(Path("a.gguf"), 2, "cpu", 4096)
    alone = measure_session(server, OPTIONS, say)
    assert alone.peer is None and "waited_over_peer" not in alone.headline()
    both = measure_session(replace(server, llama_server=Path("llama-server")), OPTIONS, say)
    assert both.device == "CPU" and both.headline()["waited_over_peer"] == 0.25
    assert started[-1] == (Path("llama-server"), Path("a.gguf"), 2, 1, 4096)
    assert (
        "the turns take 9.2 s in all, here 2.3: 0.250" in agent(asdict(both), asdict(OPTIONS))[-1]
    )
    assert "llama" not in agent(asdict(alone), asdict(OPTIONS))[-1]
