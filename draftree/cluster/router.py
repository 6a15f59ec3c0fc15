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
        lens = {
            name: self.replica_queue_len_cache.get(replica.replica_id) or 0
            for name, replica in replicas.items()
        }
        groups = rank_replicas(lens, prefers, avoids)
        return [[replicas[name] for name in group] for group in groups]
