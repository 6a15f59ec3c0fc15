"""Draft trees (DDTree): the most probable nodes first, as if block positions were independent.

In: per block position, candidate tokens with log-probabilities, best first. Out: a DraftTree whose
nodes come in the order in which they were added. A pure function; how many nodes pay is decided
elsewhere.
"""

import heapq
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from draftree.core import DraftTree, TokenSource


@dataclass(frozen=True, slots=True)
class DraftBlock:
    """What a draft proposes after the anchor. Row d holds the candidates at depth d + 1."""

    tokens: np.ndarray  # int64 [num_positions, num_candidates]
    log_probs: np.ndarray  # float [num_positions, num_candidates], falling along a row


@dataclass(frozen=True, slots=True)
class RankedTree:
    """A tree and, for each node but the root, the log-probability of its path (in the tree's
    order).
    """

    tree: DraftTree
    path_log_probs: tuple[float, ...]

    def select(self, nodes: Sequence[int]) -> "RankedTree":
        """Those nodes only; the root and every parent of a node must be among them."""
        tree = self.tree
        place = {node: i for i, node in enumerate(nodes)}
        selected = DraftTree(
            tuple(tree.tokens[n] for n in nodes),
            tuple(place[tree.parents[n]] if n else -1 for n in nodes),
            tuple(tree.depths[n] for n in nodes),
            tuple(tree.sources[n] for n in nodes),
        )
        return RankedTree(selected, tuple(self.path_log_probs[n - 1] for n in nodes if n))


_FORCED_LOG_PROB = -0.01  # nothing else may follow, as far as can be seen from here
CountValid = Callable[[Sequence[int]], int]  # how many of some tokens may follow the anchor


class _Growth:
    """A tree under construction."""

    def __init__(self, anchor: int, count_valid: CountValid | None = None) -> None:
        self._count_valid = count_valid
        self.num_refused = 0
        self.tokens, self.parents, self.depths = [anchor], [-1], [0]
        self.sources = [TokenSource.BONUS]
        self.path_log_probs: list[float] = []
        self._children: dict[tuple[int, int], int] = {}

    def child(self, parent: int, token: int) -> int | None:
        return self._children.get((parent, token))

    def may_add(self, parent: int, token: int) -> bool:
        """Whether the request's grammar lets the token follow."""
        if self._count_valid is None:
            return True
        path = [token]
        while parent > 0:
            path.append(self.tokens[parent])
            parent = self.parents[parent]
        is_valid = self._count_valid(path[::-1]) == len(path)
        self.num_refused += not is_valid
        return is_valid

    def add(self, parent: int, token: int, source: TokenSource, log_prob: float) -> int:
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.sources.append(source)
        self.path_log_probs.append(log_prob)
        self._children[parent, token] = node
        return node

    def finish(self) -> RankedTree:
        tree = DraftTree(
            tuple(self.tokens), tuple(self.parents), tuple(self.depths), tuple(self.sources)
        )
        return RankedTree(tree, tuple(self.path_log_probs))


def build_tree(
    anchor: int,
    block: DraftBlock | None,
    budget: int,
    *,
    seed_chain: bool = True,
    lookup: Sequence[int] = (),
    lookup_log_prob: float = -0.1,
    forced: Sequence[int] = (),
    count_valid: CountValid | None = None,
) -> RankedTree:
    """At most budget nodes besides the root: looked-up text first, then the top-1 chain, then best
    first.

    lookup is a continuation found in the text so far; lookup_log_prob is the trust in each of its
    tokens. forced is one that the request's grammar asks for, in its place; tokens that the grammar
    forbids are left out, with all that would follow them.
    """
    growth = _Growth(anchor, count_valid)
    node, log_prob = 0, 0.0
    source = TokenSource.GRAMMAR if forced else TokenSource.NGRAM
    for token in (forced or lookup)[:budget]:
        if not forced and not growth.may_add(node, int(token)):
            break
        log_prob += _FORCED_LOG_PROB if forced else lookup_log_prob
        node = growth.add(node, int(token), source, log_prob)
    if block is not None:
        _grow(growth, block, budget, seed_chain=seed_chain)
    return growth.finish()


def _grow(growth: _Growth, block: DraftBlock, budget: int, *, seed_chain: bool) -> None:
    tokens, log_probs = block.tokens.tolist(), block.log_probs.tolist()
    num_positions, num_candidates = len(tokens), min(budget, len(tokens[0]) if tokens else 0)
    if seed_chain:
        node, total = 0, 0.0
        for depth in range(num_positions):
            if len(growth.path_log_probs) >= budget:
                return
            total += log_probs[depth][0]
            token = tokens[depth][0]
            known = growth.child(node, token)
            if known is None and not growth.may_add(node, token):
                break
            node = growth.add(node, token, TokenSource.CHAIN, total) if known is None else known
    if num_candidates == 0:
        return
    # (cost, ranks on the way from the root, parent node, cost of the parent's path)
    heap: list[tuple[float, tuple[int, ...], int, float]] = [(-log_probs[0][0], (0,), 0, 0.0)]
    while heap and len(growth.path_log_probs) < budget and growth.num_refused <= budget:
        cost, ranks, parent, parent_cost = heapq.heappop(heap)
        depth, rank = len(ranks) - 1, ranks[-1]
        token = tokens[depth][rank]
        known = growth.child(parent, token)
        if rank + 1 < num_candidates:
            sibling = parent_cost - log_probs[depth][rank + 1]
            heapq.heappush(heap, (sibling, (*ranks[:-1], rank + 1), parent, parent_cost))
        if known is None and not growth.may_add(parent, token):
            continue
        source = TokenSource.SIBLING if any(ranks) else TokenSource.CHAIN
        node = growth.add(parent, token, source, -cost) if known is None else known
        if depth + 1 < num_positions:
            heapq.heappush(heap, (cost - log_probs[depth + 1][0], (*ranks, 0), node, cost))
