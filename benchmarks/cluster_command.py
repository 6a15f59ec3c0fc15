"""The command that measures replicas on Ray Serve.

Ray's processes are not our children, so their time would count as that of others: how busy the
machine is with others is looked at before they start.
"""

import time
from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.session import Session
from draftree.cli.bench import RESULTS, Model, Results, Rounds
from draftree.cli.measurement import finish, open_measurement, say_skipped
from draftree.cli.option import DEFAULT_MODEL
from draftree.errors import require_packages
from draftree.memory import usable_cores

_QUIET_S = 5.0


def cluster(
    model: Model = DEFAULT_MODEL,
    rounds: Rounds = 3,
    chaos: Annotated[
        float, typer.Option(help="Seconds in which replicas are killed.", min=1.0)
    ] = 180.0,
    results: Results = RESULTS / "cluster",
) -> None:
    """Replicas on Ray Serve: two over one, conversations, killed replicas, and the start."""
    require_packages("This measurement", "cluster", "ray")
    from benchmarks.cluster import ClusterOptions, measure_cluster
    from draftree.bench.disturbance import foreign_share, look
    from draftree.bench.record import make_record, write_record

    options = ClusterOptions(rounds=rounds, chaos_s=chaos)
    with open_measurement(Session, model, 1, results, say_skipped) as session:
        before = look()
        time.sleep(_QUIET_S)
        share = foreign_share(before, look(), usable_cores())
        measures = measure_cluster(session.path, options, session.say)
        record = make_record("cluster", session.model, asdict(options), measures, share)
        path = write_record(results, record)
        finish({"kind": "cluster", "file": str(path), "disturbance": share} | measures.headline())
