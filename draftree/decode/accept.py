"""The accept walk: follow the target's own choices through the tree for as long as it holds them.

Each choice is the one that plain decoding would make at that position, so the tree decides how many
tokens a round yields, never which.
"""

from dataclasses import dataclass

import numpy as np

from draftree.core import DraftTree, TokenScores
from draftree.decode.sampler import Sampler


@dataclass(frozen=True, slots=True)
class Accepted:
    """path: nodes to commit, root first. bonus: the target's token after them, the next anchor."""

    path: tuple[int, ...]
    bonus: int
    scores: tuple[TokenScores, ...] = ()  # of every token of the round, bonus last, if wanted


def accept(
    tree: DraftTree,
    logits: np.ndarray,  # [num_nodes, vocab_size]
    sampler: Sampler,
    position: int,  # absolute position of the root
    max_tokens: int,
    stop_ids: frozenset[int] = frozenset(),
) -> Accepted:
    """The sampler is advanced over every token of the round, bonus included."""
    edges = zip(tree.parents, tree.tokens, strict=True)
    children = {edge: node for node, edge in enumerate(edges)}
    path, last = [0], 0
    scores: list[TokenScores] = []
    while True:
        token = sampler.choose(logits[last], position + len(path))
        sampler.accept(token)
        if sampler.scores is not None:
            scores.append(sampler.scores)
        node = children.get((last, token))
        is_end = len(path) >= max_tokens or token in stop_ids or sampler.is_complete
        if node is None or is_end:
            return Accepted(tuple(path), token, tuple(scores))
        path.append(node)
        last = node
