"""Trees for the target's pass out of a draft's larger ones, without what a grammar forbids.

While the host asks the grammar, the device waits. So it asks about the draft's first choices, which
is one question, and about other nodes only if their token has been refused before; about the rest
it asks when the pass is under way, and knows better the next time.
"""

from collections.abc import Sequence

from draftree.core import DraftTree, TokenSource
from draftree.decode.tree import CountValid


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
        chain_len = _count_chain(drafted[1])
        num_valid = chain_len
        if count_valid is not None and chain_len > 0:
            num_valid = count_valid(drafted[0][1 : chain_len + 1])
        places, self._unasked = [0], []  # of the draft's nodes, -1: not taken
        for node, (token, drafted_parent) in enumerate(zip(*drafted, strict=True)):
            if len(tokens) > budget:
                break
            if node == 0:
                continue
            parent = places[drafted_parent]
            place = children.get((parent, token))
            if place is None:
                is_taken = parent >= 0 and not (is_forced and parent == 0)
                if node <= chain_len:
                    is_taken = is_taken and node <= num_valid
                elif is_taken and count_valid is not None:
                    if token in self._refused:
                        path = [*_path(tokens, parents, parent), token]
                        is_taken = count_valid(path) == len(path)
                    else:
                        self._unasked.append(len(tokens))
                place = len(tokens) if is_taken else -1
                if is_taken:
                    children[parent, token] = place
                    tokens.append(token)
                    parents.append(parent)
                    depths.append(depths[parent] + 1)
                    is_chain = node <= chain_len
                    sources.append(TokenSource.CHAIN if is_chain else TokenSource.SIBLING)
            places.append(place)
        return DraftTree(tuple(tokens), tuple(parents), tuple(depths), tuple(sources))

    def learn(self, tree: DraftTree, count_valid: CountValid) -> None:
        """Ask about the nodes of the last tree that were taken unasked."""
        for node in self._unasked:
            path = _path(tree.tokens, tree.parents, node)
            if count_valid(path) == len(path) - 1:
                self._refused.add(tree.tokens[node])


def _count_chain(parents: Sequence[int]) -> int:
    """The draft's first choices, one after another, come first."""
    return next((i - 1 for i, parent in enumerate(parents) if parent != i - 1), len(parents) - 1)


def _path(tokens: Sequence[int], parents: Sequence[int], node: int) -> list[int]:
    """The tokens after the root, up to a node."""
    path: list[int] = []
    while node > 0:
        path.append(tokens[node])
        node = parents[node]
    return path[::-1]
