"""The few environment variables that draftree reads, typed. Nothing else uses the environment."""

import os
from pathlib import Path


def cache_dir() -> Path:
    """Where downloaded models and compiled kernels live: DRAFTREE_CACHE, or the user's cache
    folder.
    """
    explicit = os.environ.get("DRAFTREE_CACHE")
    if explicit:
        return Path(explicit).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "draftree"


def hub_token() -> str | None:
    """HF_TOKEN, for gated repositories."""
    return os.environ.get("HF_TOKEN") or None


def forced_isa() -> str | None:
    """DRAFTREE_ISA: use this CPU kernel variant instead of the best one (tests, bug reports)."""
    return os.environ.get("DRAFTREE_ISA") or None


def api_keys() -> tuple[str, ...]:
    """DRAFTREE_API_KEY, for servers: unlike an option, other users of the machine cannot see it."""
    key = os.environ.get("DRAFTREE_API_KEY")
    return (key,) if key else ()


def prepare_ray() -> None:
    """What a Ray that is started here is told, unless its user says otherwise: nothing leaves the
    machine, and little runs beside the engines. A request goes to its replica by gRPC, each process
    handles it in one event loop, who supervises them looks once a second, and what Ray counts for a
    dashboard that is not there is counted rarely.
    """
    settings = {
        "RAY_USAGE_STATS_ENABLED": "0",
        "RAY_SERVE_USE_GRPC_BY_DEFAULT": "1",
        "RAY_SERVE_REPLICA_GRPC_MAX_MESSAGE_LENGTH": str(2**31 - 1),  # bodies have a limit of ours
        "RAY_SERVE_RUN_USER_CODE_IN_SEPARATE_THREAD": "0",
        "RAY_SERVE_RUN_ROUTER_IN_SEPARATE_LOOP": "0",
        "RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "1",
        "RAY_SERVE_METRICS_EXPORT_INTERVAL_MS": "5000",
        "RAY_enable_metrics_collection": "0",
        "REPORTER_UPDATE_INTERVAL_MS": "60000",
        "RAY_LOG_MONITOR_MANY_FILES_THRESHOLD": "0",  # so that the next one counts
        "LOG_NAME_UPDATE_INTERVAL_S": "10",
    }
    for name, value in settings.items():
        os.environ.setdefault(name, value)
