"""A coding agent's session against `draftree serve`, which is started for it and stopped, and
against llama.cpp's server, if there is one.
"""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from benchmarks.overhead import run_llama_server, run_server
from draftree.bench.agent import AgentOptions, AgentReport, measure_agent
from draftree.bench.http import Endpoint
from draftree.bench.median import Report
from draftree.engine.gpu import find_gpu


@dataclass(frozen=True, slots=True)
class DeviceAgentReport(AgentReport):
    device: str  # where the server ran
    peer: AgentReport | None = None  # the same with llama.cpp's server
    waited_over_peer: float | None = None  # time of all turns, without pauses

    def headline(self) -> dict[str, float]:
        found = AgentReport.headline(self)
        if self.waited_over_peer is None:
            return found
        return found | {"waited_over_peer": self.waited_over_peer}


@dataclass(frozen=True, slots=True)
class AgentServer:
    """What is started for a session."""

    path: Path
    threads: int
    device: str
    max_ctx: int
    llama_server: Path | None = None


def measure_session(
    server: AgentServer, options: AgentOptions, report: Report
) -> DeviceAgentReport:
    report("starting the server")
    asked = "--device", server.device, "--max-ctx", str(server.max_ctx)
    with run_server(server.path, server.threads, *asked) as endpoint:
        found = _measure(endpoint, options, report)
    gpu = find_gpu(server.device)
    known = {field.name: getattr(found, field.name) for field in fields(found)}
    own = DeviceAgentReport(**known, device="CPU" if gpu is None else gpu.name)
    if server.llama_server is None:
        return own
    report("starting llama.cpp's server")
    sizes = 1, server.max_ctx  # one client: all of the context is its own
    with run_llama_server(server.llama_server, server.path, server.threads, *sizes) as endpoint:
        peer = _measure(endpoint, options, report)
    return replace(own, peer=peer, waited_over_peer=round(_waited_ms(own) / _waited_ms(peer), 4))


def _measure(endpoint: Endpoint, options: AgentOptions, report: Report) -> AgentReport:
    model = endpoint.find_model()
    return measure_agent(replace(endpoint, model=model), model, options, report)


def _waited_ms(report: AgentReport) -> float:
    return sum(turn.total_ms for turn in report.turns)
