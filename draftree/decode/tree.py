"""Draft trees (DDTree): the most probable nodes first, as if block positions were independent, or
by what follows what, where the draft says so.

In: per block position, candidate tokens with log-probabilities, best first. Out: a DraftTree whose
nodes come in the order in which they were added. A pure function; how many nodes pay is decided
elsewhere.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from heapq import heappop, heappush, heapreplace
from typing import NamedTuple

import numpy as np

from draftree.core import DraftTree, TokenSource
from draftree.drafts.drafter import Proposal


class NodeKind(IntEnum):
    """Candidates whose confidence is worth different trust."""

    FIRST = 0  # the draft's first choice after its parent: the first of its children to be added
    OTHER = 1  # a lower choice
    LOOKUP = 2  # found in the text so far, or known from the grammar


@dataclass(frozen=True, slots=True)
class RankedTree:
    """A tree and, for each node but the root (in the tree's order), the log-probability of its path
    and its kind.
    """

    tree: DraftTree
    path_log_probs: tuple[float, ...]
    kinds: tuple[NodeKind, ...]

    def select(self, nodes: Sequence[int]) -> "RankedTree":
        """Those nodes only, in order; the root and every parent of a node must be among them."""
        tree = self.tree
        if len(nodes) == tree.num_nodes:
            return self
        place = {node: i for i, node in enumerate(nodes)}
        place[-1] = -1  # the root's parent
        selected = DraftTree(
            tuple([tree.tokens[n] for n in nodes]),
            tuple([place[tree.parents[n]] for n in nodes]),
            tuple([tree.depths[n] for n in nodes]),
            tuple([tree.sources[n] for n in nodes]),
        )
        log_probs = tuple([self.path_log_probs[n - 1] for n in nodes[1:]])
        return RankedTree(selected, log_probs, tuple([self.kinds[n - 1] for n in nodes[1:]]))


# An enum's members are looked up slowly, and a tree needs them for every node.
_CHAIN, _SIBLING = TokenSource.CHAIN, TokenSource.SIBLING
_FIRST, _OTHER, _LOOKUP = NodeKind
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
        self.kinds: list[NodeKind] = []
        self.children: dict[tuple[int, int], int] = {}  # by parent and token
        self._has_first: set[int] = set()  # parents whose first choice is there

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
        kind = _LOOKUP
        if source is _CHAIN or source is _SIBLING:
            kind = _OTHER if parent in self._has_first else _FIRST
            self._has_first.add(parent)
        node = len(self.tokens)
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        self.sources.append(source)
        self.path_log_probs.append(log_prob)
        self.kinds.append(kind)
        self.children[parent, token] = node
        return node

    def finish(self) -> RankedTree:
        tree = DraftTree(
            tuple(self.tokens), tuple(self.parents), tuple(self.depths), tuple(self.sources)
        )
        return RankedTree(tree, tuple(self.path_log_probs), tuple(self.kinds))


def build_tree(
    anchor: int,
    block: Proposal | None,
    budget: int,
    width: int = 0,
    *,
    seed_chain: bool = False,
    lookup: Sequence[int] = (),
    lookup_log_prob: float = -0.1,
    forced: Sequence[int] = (),
    count_valid: CountValid | None = None,
) -> RankedTree:
    """At most budget nodes besides the root: looked-up text, then the most probable ones, so that a
    smaller tree is the beginning of a larger one. width: of each row's candidates at most, 0: all.
    seed_chain: the first choices come before all others, however unsure they are, for somebody who
    will choose among the nodes and knows better what they are worth.

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
        _grow(growth, block, budget, width or budget, seed_chain=seed_chain)
    return growth.finish()


class _Row(NamedTuple):
    """Candidates after a parent, best first. ranks: where the draft's row has each of them."""

    tokens: list[int]
    log_probs: list[float]
    ranks: Sequence[int]


class _Rows:
    """The candidates after each possible parent."""

    def __init__(self, block: Proposal) -> None:
        tokens, log_probs = block.tokens.tolist(), block.log_probs.tolist()
        self.num_positions = len(tokens)
        every = range(len(tokens[0]) if tokens else 0)
        self.num_candidates = len(every)
        self._rows = [_Row(*row, every) for row in zip(tokens, log_probs, strict=True)]
        self._edges = block.edges
        self._sorted: dict[tuple[int, int], _Row] = {}

    def after(self, depth: int, parent: int) -> _Row:
        """Those of the depth's row that may follow a candidate of the row before."""
        if self._edges is None or depth == 0:
            return self._rows[depth]
        found = self._sorted.get((depth, parent))
        if found is None:
            edges, tokens = self._edges[depth - 1, parent], self._rows[depth].tokens
            ranks = np.argsort(-edges, kind="stable").tolist()
            found = _Row([tokens[rank] for rank in ranks], edges[ranks].tolist(), ranks)
            self._sorted[depth, parent] = found
        return found


def _grow(growth: _Growth, block: Proposal, budget: int, width: int, *, seed_chain: bool) -> None:
    rows = _Rows(block)
    num_positions, num_candidates = rows.num_positions, min(budget, width, rows.num_candidates)
    if num_candidates == 0:
        return
    children = growth.children
    if seed_chain:
        node, total, rank = 0, 0.0, 0
        for depth in range(num_positions):
            if len(growth.kinds) >= budget:
                return
            row = rows.after(depth, rank)
            total += row.log_probs[0]
            token, rank = row.tokens[0], row.ranks[0]
            known = children.get((node, token))
            if known is None and not growth.may_add(node, token):
                break
            node = growth.add(node, token, _CHAIN, total) if known is None else known
    # (cost, places on the way from the root, parent node, cost of the parent's path, its row)
    first = rows.after(0, 0)
    heap: list[tuple[float, tuple[int, ...], int, float, _Row]] = [
        (-first.log_probs[0], (0,), 0, 0.0, first)
    ]
    while heap and len(growth.kinds) < budget and growth.num_refused <= budget:
        cost, path, parent, parent_cost, row = heap[0]
        depth, place = len(path) - 1, path[-1]
        token = row.tokens[place]
        known = children.get((parent, token))
        if place + 1 < num_candidates:
            sibling = parent_cost - row.log_probs[place + 1]
            heapreplace(heap, (sibling, (*path[:-1], place + 1), parent, parent_cost, row))
        else:
            heappop(heap)
        if known is None:
            if not growth.may_add(parent, token):
                continue
            source = _SIBLING if any(path) else _CHAIN
            known = growth.add(parent, token, source, -cost)
        if depth + 1 < num_positions:
            following = rows.after(depth + 1, row.ranks[place])
            heappush(heap, (cost - following.log_probs[0], (*path, 0), known, cost, following))
