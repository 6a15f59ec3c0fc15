"""What passes between the ingress and the replicas. In and out: plain values that can be pickled.

A replica answers with its name, then (status, headers), then pieces of the body.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass
from typing import Any, Protocol

from draftree.serve.identity import Identity

Head = tuple[int, list[tuple[bytes, bytes]]]


@dataclass(frozen=True, slots=True)
class Relayed:
    """An HTTP request on its way to a replica. prefers: the replica that has read its beginning;
    avoids: replicas that were tried already.
    """

    method: str
    path: str
    raw_path: bytes
    query: bytes
    headers: tuple[tuple[bytes, bytes], ...]
    body: bytes
    client: tuple[str, int] | None
    identity: Identity
    prefers: str = ""
    avoids: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Report:
    """What a replica says of itself: the text for Prometheus, and its part of /health."""

    name: str
    metrics: str
    health: dict[str, Any]


class ReplicaLost(Exception):
    """The replica died, or broke off; another one may do what was asked."""


class Refused(Exception):
    """The replica has as many requests as it takes; another one may have room."""


class Unavailable(Exception):
    """There is no replica that could be asked."""


class Pool(Protocol):
    """All replicas."""

    def ask(self, request: Relayed) -> AsyncGenerator[Any, None]:
        """The answer of one of them. Raises ReplicaLost, Unavailable; closing it cancels."""
        ...

    async def survey(self) -> list[Report]: ...
