"""Times target passes of several sizes on the live sequence, without changing it."""

import time

from draftree.core import DraftTree
from draftree.decode.budget import CostModel
from draftree.models.target import Target


def measure_cost(cost: CostModel, target: Target, max_nodes: int) -> None:
    """Tentative passes after the committed text, all rolled back."""
    room = target.state.max_ctx - target.state.committed

    def run(num_nodes: int) -> float:
        start = time.perf_counter()
        target.state.begin(DraftTree.chain((0,) * num_nodes))
        target.forward(rows=range(num_nodes))
        elapsed = (time.perf_counter() - start) * 1000
        target.state.rollback()
        return elapsed

    cost.measure(run, min(max_nodes, room))
