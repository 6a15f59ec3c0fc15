"""Trees for the target's pass out of a draft's larger ones, without what a grammar forbids.

While the host asks the grammar, the device waits. So it asks about the draft's first choices, which
is one question, and about other nodes only if their token has been refused before; about the rest
it asks when the pass is under way, and knows better the next time.
"""

from collections.abc import Sequence

from draftree.core import DraftTree, TokenSource
from draftree.decode.tree import CountValid

# An enum's members are looked up slowly, and a tree needs them for every node.
_CHAIN, _SIBLING = TokenSource.CHAIN, TokenSource.SIBLING


class DraftFilter:
    """Outlives a request: formats have much in common."""

    def __init__(self) -> None:
        self._refused: set[int] = set()  # tokens, at some place
        self._unasked: list[int] = []  # nodes of the last tree

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
        refused = self._refused if count_valid is not None else ()
        places, self._unasked = [0], []  # of the draft's nodes, -1: not taken
        for node in range(1, len(drafted[0])):
            if len(tokens) > budget:
                break
            token, parent = drafted[0][node], places[drafted[1][node]]
            place = children.get((parent, token), -1) if first else -1
            if place >= 0 or parent < 0 or (is_forced and parent == 0):
                places.append(place)
                continue
            if node in are_first:
                is_taken = node in are_valid
            elif token in refused and count_valid is not None:
                path = [*_path(tokens, parents, parent), token]
                is_taken = count_valid(path) == len(path)
            else:
                is_taken = True
                self._unasked.append(len(tokens))
            places.append(len(tokens) if is_taken else -1)
            if is_taken:
                tokens.append(token)
                parents.append(parent)
                depths.append(depths[parent] + 1)
                sources.append(_CHAIN if node in are_first else _SIBLING)
        return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(sources))

    def learn(self, tree: DraftTree, count_valid: CountValid) -> None:
        """Ask about the nodes of the last tree that were taken unasked."""
        for node in self._unasked:
            path = _path(tree.tokens, tree.parents, node)
            if count_valid(path) == len(path) - 1:
                self._refused.add(tree.tokens[node])


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
