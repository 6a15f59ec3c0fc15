"""How many replicas, and what each takes. In: what was asked, what there is. Out: a Scale."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Final

from draftree.errors import CapacityError

AUTO: Final = "auto"
_SHARE: Final = 4  # cores of a replica, where their number is not known


@dataclass(frozen=True, slots=True)
class Scale:
    """num_min and num_max differ where Serve is to follow the load. num_threads: of a replica."""

    num_min: int
    num_max: int
    num_threads: int
    num_gpus: float = 0.0

    @property
    def resources(self) -> dict[str, Any]:
        """In Ray's words."""
        gpus = {"num_gpus": self.num_gpus} if self.num_gpus else {}
        return {"num_cpus": 1 if self.num_gpus else self.num_threads, **gpus}


def choose_scale(
    replicas: str, threads: int | None, gpus: float | None, has: Mapping[str, float]
) -> Scale:
    """replicas: a number, or `auto` for as many as the load needs and the cluster can hold.
    gpus: of each; one where there are any. has: the cluster's resources, as Ray names them.
    """
    num_cores = max(int(has.get("CPU", 1)), 1)
    num_gpus = gpus if gpus is not None else float(bool(has.get("GPU")))
    is_auto = replicas == AUTO
    if not is_auto and not (replicas.isdecimal() and int(replicas)):
        raise CapacityError(f"--replicas is {replicas!r}; it must be a number or `auto`.")
    share = min(_SHARE, num_cores) if is_auto else max(num_cores // int(replicas), 1)
    num_threads = threads or share
    if not is_auto:
        return Scale(int(replicas), int(replicas), num_threads, num_gpus)
    room = has.get("GPU", 0) // num_gpus if num_gpus else num_cores // num_threads
    return Scale(1, max(int(room), 1), num_threads, num_gpus)
