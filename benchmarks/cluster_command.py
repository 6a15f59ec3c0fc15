"""The command that measures replicas on Ray Serve.

Ray's processes are not our children, so their time would count as that of others: how busy the
machine is with others is looked at before they start.
"""

import json
import time
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Final

import typer

from benchmarks.result import check_record, check_same_machine
from benchmarks.session import Session
from draftree.bench.record import Json, ModelId
from draftree.cli.bench import RESULTS, Model, Results, Rounds
from draftree.cli.measurement import finish, open_measurement, say_skipped
from draftree.cli.option import DEFAULT_MODEL
from draftree.errors import BenchError, require_packages
from draftree.memory import usable_cores

_QUIET_S: Final = 5.0
_KEPT: Final = {  # by --keep, with the settings that they were measured with
    "routing": ("num_conversations", "num_turns"),
    "chaos": ("num_streams", "chaos_s", "kill_s", "num_replicas"),
}


def cluster(
    model: Model = DEFAULT_MODEL,
    rounds: Rounds = 3,
    chaos: Annotated[
        float, typer.Option(help="Seconds in which replicas are killed.", min=1.0)
    ] = 180.0,
    keep: Annotated[
        bool,
        typer.Option(
            "--keep",
            help="Measure two over one and the start; keep conversations and killed replicas as "
            "the result file that is there has them.",
        ),
    ] = False,
    results: Results = RESULTS / "cluster",
) -> None:
    """Replicas on Ray Serve: two over one, conversations, killed replicas, and the start."""
    require_packages("This measurement", "cluster", "ray")
    from benchmarks.cluster import ClusterOptions, measure_cluster
    from draftree.bench.disturbance import foreign_share, look
    from draftree.bench.record import make_record, write_record

    options = ClusterOptions(rounds=rounds, chaos_s=chaos)
    with open_measurement(Session, model, 1, results, say_skipped) as session:
        settings, kept = options.settings(), None
        if keep:
            old = read_kept(results, session.model)
            settings, kept = settings | keep_settings(old), old["measures"]
        before = look()
        time.sleep(_QUIET_S)
        share = foreign_share(before, look(), usable_cores())
        measures = measure_cluster(session.path, options, session.say, kept)
        record = make_record("cluster", session.model, settings, measures, share)
        path = write_record(results, record)
        finish({"kind": "cluster", "file": str(path), "disturbance": share} | measures.headline())


def read_kept(results: Path, model: ModelId) -> Json:
    """The result of this model on this machine; anything else is refused."""
    from draftree.bench.machine import describe_machine

    path = results / f"cluster-{model.name}.json"
    if not path.exists():
        raise BenchError(f"--keep needs {path}, which is not there.")
    record = check_record(json.loads(path.read_text(encoding="utf-8")), str(path))
    if record["model"]["sha256"] != model.sha256:
        raise BenchError(f"{path} is of another model, so nothing of it can be kept.")
    check_same_machine({str(path): record, "this run": {"machine": asdict(describe_machine())}})
    return record


def keep_settings(old: Json) -> Json:
    """The settings of what is kept, and what says when that was measured, with which kernels."""
    settings = old["settings"]
    source = {"timestamp": old["timestamp"], "kernels": old["machine"]["kernels"]}
    kept = settings.get("kept") or {"measures": list(_KEPT), **source}
    own = {name: settings[name] for names in _KEPT.values() for name in names}
    return own | {"kept": kept}
