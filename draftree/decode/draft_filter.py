"""Trees for the target's pass out of a draft's larger ones, without what a grammar forbids.

While the host asks the grammar, the device waits. So it asks about the draft's first choices, which
is one question, and leaves out other nodes whose token has been refused after the same two tokens.
About those it asks when the pass is under way, and knows better the next time.
"""

from collections.abc import Sequence

from draftree.core import DraftTree, TokenSource
from draftree.decode.tree import CountValid

# An enum's members are looked up slowly, and a tree needs them for every node.
_CHAIN, _SIBLING = TokenSource.CHAIN, TokenSource.SIBLING
_MOST_ASKED_AGAIN = 8  # of what was left out of a tree
_MOST_REFUSED = 1 << 16  # that are remembered; then it begins anew
Place = tuple[int, int, int]  # a token and the two before it


class DraftFilter:
    """Outlives a request: formats have much in common."""

    def __init__(self) -> None:
        self._refused: set[Place] = set()
        self._unasked: list[tuple[int, Place]] = []  # parents in the last tree, and what follows

    def build(
        self,
        anchor: int,
        drafted: tuple[Sequence[int], Sequence[int]],  # tokens, parents; the root first
        budget: int,
        *,
        first: Sequence[int] = (),
        source: TokenSource = TokenSource.GRAMMAR,
        count_valid: CountValid | None = None,
    ) -> DraftTree:
        """At most budget nodes besides the root: `first`, which the grammar allows, then the
        draft's in their order. source: of `first`; of a grammar, nothing else may follow the root.
        """
        tokens, parents = [anchor, *first], list(range(-1, len(first)))
        depths, sources = list(range(len(tokens))), [TokenSource.BONUS, *[source] * len(first)]
        children = {(parent, token): parent + 1 for parent, token in enumerate(first)}
        is_forced = bool(first) and source is TokenSource.GRAMMAR
        chain = _find_chain(drafted[1])
        num_valid = len(chain)
        if count_valid is not None and chain:
            num_valid = count_valid([drafted[0][node] for node in chain])
        are_first, are_valid = frozenset(chain), frozenset(chain[:num_valid])
        places = [0]  # of the draft's nodes, -1: not taken
        self._unasked, left_out = [], list[tuple[int, Place]]()
        for node in range(1, len(drafted[0])):
            if len(tokens) > budget:
                break
            token, parent = drafted[0][node], places[drafted[1][node]]
            known = children.get((parent, token), -1) if first else -1
            if known >= 0 or parent < 0 or (is_forced and parent == 0):
                places.append(known)
                continue
            if node in are_first:
                is_taken = node in are_valid
            else:
                after = tokens[parents[parent]] if parent > 0 else -1
                place = token, tokens[parent], after
                is_taken = count_valid is None or place not in self._refused
                (self._unasked if is_taken else left_out).append((parent, place))
            places.append(len(tokens) if is_taken else -1)
            if is_taken:
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
                sources.append(_CHAIN if node in are_first else _SIBLING)
        self._unasked += left_out[:_MOST_ASKED_AGAIN]
        return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(sources))

    def learn(self, tree: DraftTree, count_valid: CountValid) -> None:
        """Ask about what the last tree has, or has not, without having been asked about."""
        if len(self._refused) >= _MOST_REFUSED:
            self._refused.clear()
        for parent, place in self._unasked:
            path = [*_path(tree.tokens, tree.parents, parent), place[0]]
            if count_valid(path) == len(path):
                self._refused.discard(place)
            else:
                self._refused.add(place)


def _find_chain(parents: Sequence[int]) -> list[int]:
    """The draft's first choices, one after another: of a node's children the first is the best."""
    chain: list[int] = []
    tip = 0
    for node, parent in enumerate(parents):
        if parent == tip:
            chain.append(node)
            tip = node
    return chain


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """The tokens after the root, up to a node."""
    path: list[int] = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
