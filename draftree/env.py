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


def disable_ray_reports() -> None:
    """RAY_USAGE_STATS_ENABLED: nothing leaves the machine, unless its user says so."""
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
