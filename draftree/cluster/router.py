"""Ray Serve's request router for conversations: asks `routing` in which order to try replicas.

In: a request that the ingress relays, and replicas with their queue lengths. Knows no HTTP.
"""

from typing import Any

from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica

from draftree.cluster.message import Relayed
from draftree.cluster.routing import rank_replicas


class ConversationRouter(RequestRouter):
    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        prefers, avoids = "", tuple[str, ...]()
        if pending_request is not None:
            pending_request.routing_context.should_backoff = True  # where all are full
            first: Any = pending_request.args[0] if pending_request.args else None
            if isinstance(first, Relayed):
                prefers, avoids = first.prefers, first.avoids
        replicas = {replica.replica_id.unique_id: replica for replica in candidate_replicas}
        groups = rank_replicas(await self._find_lens(replicas), prefers, avoids)
        return [[replicas[name] for name in group] for group in groups]

    async def _find_lens(self, replicas: dict[str, RunningReplica]) -> dict[str, int]:
        """Serve forgets a length after a while, in which requests may still run: such a replica is
        asked, and one that does not answer in time counts as the busiest.
        """
        cache = self.replica_queue_len_cache
        lens = {name: cache.get(replica.replica_id) for name, replica in replicas.items()}
        unknown = [replicas[name] for name, length in lens.items() if length is None]
        for replica, length in await self._probe_queue_lens(unknown, 0):
            lens[replica.replica_id.unique_id] = length
        most = max((length for length in lens.values() if length is not None), default=0)
        return {name: most if length is None else length for name, length in lens.items()}
