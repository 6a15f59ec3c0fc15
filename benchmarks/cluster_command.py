"""The command that measures replicas on Ray Serve."""

from dataclasses import asdict
from typing import Annotated

import typer

from benchmarks.session import Session
from draftree.cli.bench import RESULTS, Model, Results, Rounds
from draftree.cli.measurement import finish, open_measurement, say_skipped
from draftree.cli.option import DEFAULT_MODEL
from draftree.errors import require_packages


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

    options = ClusterOptions(rounds=rounds, chaos_s=chaos)
    with open_measurement(Session, model, 1, results, say_skipped) as session:
        finish(
            session.record(
                "cluster",
                asdict(options),
                lambda: measure_cluster(session.path, options, session.say),
            )
        )
