"""What a sequence remembers between passes, and the only verbs that change it.

begin(tree) opens a pass, commit(path) keeps the nodes on the path, rollback() forgets the pass.
After commit the state equals, bit for bit, the one reached by running those tokens one at a time. A
committed pass (prefill, plain decoding) is a chain that will be kept whole: recurrent state then
advances during the pass itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftree.core import DraftTree, common_prefix_len
from draftree.errors import CapacityError
from draftree.kernels.ops import LayerStore, Ops, Runnable
from draftree.state.span import KvLayers, Parts, Span


@dataclass(frozen=True, slots=True)
class Snapshot:
    """A copy of a committed state. spans: what of its keys and values cannot be
    known from elsewhere, in order.
    """

    tokens: tuple[int, ...]
    spans: tuple[Span, ...] = ()
    recurrent: Parts = ()

    @property
    def parts(self) -> Parts:
        return (*(arrays for span in self.spans for arrays in span.parts), *self.recurrent)


class SequenceState:
    """tokens: what the target has read. A tree's root is the next position, so the anchor is not in
    it yet.
    """

    def __init__(
        self,
        ops: Ops,
        kv: tuple[LayerStore, ...],
        max_ctx: int,
        recurrent: tuple[LayerStore, ...] = (),
    ) -> None:
        self.tokens: list[int] = []
        self.max_ctx = max_ctx
        self.checkpoints: dict[int, Parts] = {}  # recurrent states at positions that were passed
        self.kv = KvLayers(ops, kv)
        self._ops = ops
        self._stores = (*kv, *recurrent)
        self._recurrent = recurrent
        self._tree: DraftTree | None = None
        self._is_committed = False
        self._commit_program: Runnable | None = None

    @property
    def committed(self) -> int:
        return len(self.tokens)

    @property
    def is_recurrent(self) -> bool:
        """Whether it can only return to positions that a snapshot was taken at."""
        return bool(self._recurrent)

    def set_sinks(self, count: int) -> None:
        """So many positions at the beginning are seen from now on, whatever the window."""
        self._ops.step.set_sinks(count)

    def begin(self, tree: DraftTree, *, is_committed: bool = False) -> None:
        """Open a pass over the tree. It is an error to begin twice, or beyond the context."""
        assert self._tree is None, "the last pass was neither committed nor rolled back"
        committed = len(self.tokens)
        length = committed + max(tree.depths) + 1
        if length > self.max_ctx:
            raise CapacityError(
                f"The text has reached {length} tokens, but the context was planned for "
                f"{self.max_ctx}; start again with a larger --max-ctx."
            )
        if is_committed:
            assert tree.is_chain
            self._ops.step.set_chain(tree.tokens, committed)
        else:
            depths = np.asarray(tree.depths, dtype=np.int64)
            self._ops.step.set_tree(tree.tokens, tree.parents, depths, committed)
        self._tree, self._is_committed = tree, is_committed

    def commit(self, path: Sequence[int]) -> None:
        """Keep the nodes on the path (root first, each the child of the one before)."""
        tree = self._tree
        assert tree is not None, "commit without begin"
        assert _is_path(tree, path), "a path goes from the root down, parent to child"
        if self._is_committed:
            assert len(path) == tree.num_nodes, "a committed pass is kept whole"
        elif self._recurrent or path[-1] >= len(path):  # else all lies in its place already
            self._ops.step.set_path(path)
            self.commit_program().run()
        self.tokens += [tree.tokens[node] for node in path]
        self._tree = None

    def record(self, tokens: Sequence[int]) -> None:
        """What the device has committed in a round of its own."""
        assert self._tree is None, "a round begins between passes"
        self.tokens.extend(tokens)

    def rollback(self) -> None:
        """Forget the pass; only a speculative one can be forgotten."""
        assert self._tree is None or not self._is_committed, "a committed pass cannot be forgotten"
        self._tree = None

    def reset(self) -> None:
        """Back to the empty sequence."""
        self.restore(Snapshot(()))

    def snapshot(self) -> Snapshot:
        length = self.committed
        span = Span(0, length, self.kv.copy(0, length))
        return Snapshot(tuple(self.tokens), (span,), self.copy_recurrent())

    def copy_recurrent(self) -> Parts:
        assert self._tree is None, "a snapshot is taken between passes"
        length = self.committed
        return tuple(self._ops.snapshot(store, 0, length) for store in self._recurrent)

    def save_checkpoint(self) -> None:
        """Make this position one that the sequence can come back to."""
        if self._recurrent and self.committed not in self.checkpoints:
            self.checkpoints[self.committed] = self.copy_recurrent()

    def restore(self, snapshot: Snapshot) -> None:
        """Return to a snapshot of this same sequence kind, whatever happened since. Keys and values
        of tokens that both begin with are here already: they are neither needed nor copied.
        """
        length = len(snapshot.tokens)
        shared = common_len(self.tokens, snapshot.tokens)
        self._tree = None
        del self.tokens[shared:]
        self.checkpoints = {at: parts for at, parts in self.checkpoints.items() if at <= shared}
        first = self.kv.put(snapshot.spans, range(shared), length)
        assert first == 0, "the spans have a gap"
        if length == 0:
            for store in self._recurrent:
                self._ops.restore(store, ())
        else:
            for store, parts in zip(self._recurrent, snapshot.recurrent, strict=True):
                self._ops.restore(store, parts)
            if self._recurrent:
                self.checkpoints[length] = snapshot.recurrent
        self.tokens = list(snapshot.tokens)

    def commit_program(self) -> Runnable:
        """Keeps the nodes on step.path in every store."""
        if self._commit_program is None:
            with self._ops.capture() as program:
                self._ops.commit(self._stores)
            self._commit_program = program
        return self._commit_program


def _is_path(tree: DraftTree, path: Sequence[int]) -> bool:
    return [tree.parents[node] for node in path] == [-1, *path[:-1]]


def common_len(a: Sequence[int] | np.ndarray, b: Sequence[int] | np.ndarray) -> int:
    """How many tokens both begin with."""
    if not (isinstance(a, np.ndarray) and isinstance(b, np.ndarray)):
        return common_prefix_len(tuple(a), tuple(b))
    length = min(len(a), len(b))
    differs = a[:length] != b[:length]
    return int(differs.argmax()) if differs.any() else length
