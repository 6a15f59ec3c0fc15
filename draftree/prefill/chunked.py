"""Prefill: the prompt as committed chains of at most chunk_len tokens, without logits."""

from collections.abc import Callable, Sequence

from draftree.core import DraftTree
from draftree.kernels.ops import Array
from draftree.models.target import Target


def prefill(
    target: Target,
    tokens: Sequence[int],
    chunk_len: int,
    extend_context: Callable[[Array], None] | None = None,
) -> None:
    """Run the tokens and keep them. extend_context gets each chunk's features, where the target
    captures any.
    """
    for start in range(0, len(tokens), chunk_len):
        chunk = DraftTree.chain(tuple(tokens[start : start + chunk_len]))
        target.state.begin(chunk, is_committed=True)
        features = target.forward(rows=()).features
        target.state.commit(range(chunk.num_nodes))
        if extend_context is not None and features is not None:
            extend_context(features[: chunk.num_nodes])
