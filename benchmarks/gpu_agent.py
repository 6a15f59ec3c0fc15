"""A coding agent's session against `draftree serve`, which is started for it and stopped."""

from dataclasses import dataclass, fields, replace
from pathlib import Path

from benchmarks.overhead import run_server
from draftree.bench.agent import AgentOptions, AgentReport, measure_agent
from draftree.bench.median import Report
from draftree.engine.gpu import find_gpu


@dataclass(frozen=True, slots=True)
class DeviceAgentReport(AgentReport):
    device: str  # where the server ran


def measure_session(
    path: Path, threads: int, device: str, max_ctx: int, options: AgentOptions, report: Report
) -> DeviceAgentReport:
    report("starting the server")
    asked = "--device", device, "--max-ctx", str(max_ctx)
    with run_server(path, threads, *asked) as endpoint:
        model = endpoint.find_model()
        found = measure_agent(replace(endpoint, model=model), model, options, report)
    gpu = find_gpu(device)
    known = {field.name: getattr(found, field.name) for field in fields(found)}
    return DeviceAgentReport(**known, device="CPU" if gpu is None else gpu.name)
