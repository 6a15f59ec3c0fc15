"""What is kept of earlier sequences, in host memory: token prefixes in, snapshots out.

A tree of spans: conversations with a common beginning hold it once. Bounded in bytes; what was used
longest ago goes first, ends before beginnings. A recurrent model can only return to positions that
were marked with a copy of its recurrent state, others to any. Knows neither models nor devices.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace

import numpy as np

from draftree.state.sequence import common_len
from draftree.state.span import Parts, Span, count_bytes

_SPAN_LEN = 512


@dataclass(frozen=True, slots=True)
class Match:
    """What is kept of a sequence: its first `length` tokens, keys and values in spans."""

    length: int = 0
    spans: tuple[Span, ...] = ()
    recurrent: Parts = ()
    shared: int = 0  # tokens that anything kept begins with; at least length


@dataclass(eq=False, slots=True)
class _Node:
    """Tokens that follow a prefix of the parent's, up to its end or a fork before that."""

    parent: "_Node | None"
    span: Span
    tokens: np.ndarray  # int64
    children: "dict[tuple[int, int], _Node]" = field(default_factory=dict)  # by start, first token
    checkpoints: dict[int, Parts] = field(default_factory=dict)  # by position in (start, end]

    @property
    def key(self) -> tuple[int, int]:
        return self.span.start, int(self.tokens[0])

    @property
    def is_kept(self) -> bool:
        return self.parent is None or self.parent.children.get(self.key) is self

    @property
    def num_bytes(self) -> int:
        """Without the checkpoints."""
        return count_bytes(self.span.parts) + self.tokens.nbytes


class PrefixStore:
    """Holds at most max_bytes less those reserved, and one span or checkpoint more while it is
    added. span_len: positions that are kept or given up together, at most.
    """

    def __init__(self, max_bytes: int, *, is_recurrent: bool, span_len: int = _SPAN_LEN) -> None:
        self.max_bytes = max_bytes
        self.reserved_bytes = 0
        self.num_bytes = 0
        self._least_bytes = 0.0  # of a position, in any span so far
        self._is_recurrent, self._span_len = is_recurrent, span_len
        self._root = _Node(None, Span(0, 0, ()), np.empty(0, np.int64))
        # Oldest first. Where no recurrent state is needed, every node has one checkpoint, at its
        # end, and using it uses those before it: the oldest is always the end of a branch.
        self._checkpoints: OrderedDict[tuple[_Node, int], None] = OrderedDict()

    def clear(self) -> None:
        self._root.children.clear()
        self._checkpoints.clear()
        self.num_bytes = 0

    def reserve(self, num_bytes: int) -> None:
        """Leave so much of the bound to the owner, who keeps it elsewhere."""
        self.reserved_bytes = num_bytes
        self._make_room()

    def find(self, tokens: Sequence[int]) -> Match:
        """The longest prefix of the tokens that can be restored."""
        path = list(self._walk(np.asarray(tokens, np.int64)))
        shared = path[-1][1]
        # A node's span ends where the walk leaves it: behind a fork lies another text.
        spans = tuple(replace(node.span, end=end) for node, end in path[1:])
        if not self._is_recurrent:
            self._use(path[-1][0])
            return Match(shared, spans, (), shared)
        for i in range(len(path) - 1, 0, -1):
            node, end = path[i]
            position = max((at for at in node.checkpoints if at <= end), default=0)
            if position:
                self._checkpoints.move_to_end((node, position))
                return Match(position, spans[:i], node.checkpoints[position], shared)
        return Match(shared=shared)

    def insert(
        self,
        tokens: Sequence[int],
        copy: Callable[[int, int], Parts],
        copy_recurrent: Callable[[], Parts],
        cut: int = 0,
    ) -> None:
        """Keep a sequence: only what is not here yet is copied, and nothing that does not fit. No
        span goes across cut.
        """
        ids = np.asarray(tokens, np.int64)
        # The beginning of a recurrent sequence is worth nothing without its end.
        least = len(ids) * self._least_bytes if self._is_recurrent else 0.0
        if self._excess_bytes - self.num_bytes + least >= 0:
            return
        node, at = list(self._walk(ids))[-1]
        try:
            while at < len(ids):
                end = min(at + self._span_len, len(ids), cut if cut > at else len(ids))
                node, at = self._add(node, Span(at, end, copy(at, end)), ids[at:end]), end
                self._make_room()
                if self._excess_bytes > 0 or not node.is_kept:
                    return
            if self._is_recurrent and at > 0:
                if at not in node.checkpoints:
                    node.checkpoints[at] = copy_recurrent()
                    self.num_bytes += count_bytes(node.checkpoints[at])
                self._checkpoints[node, at] = None
                self._checkpoints.move_to_end((node, at))
                self._make_room()
        finally:
            self._prune(node)

    def _add(self, parent: _Node, span: Span, tokens: np.ndarray) -> _Node:
        node = _Node(parent, span, tokens.copy())
        parent.children[node.key] = node
        self.num_bytes += node.num_bytes
        position_bytes = node.num_bytes / len(tokens)
        self._least_bytes = min(self._least_bytes or position_bytes, position_bytes)
        if not self._is_recurrent:
            self._checkpoints[node, span.end] = None
            node.checkpoints[span.end] = ()
            self._use(node)
        return node

    @property
    def _excess_bytes(self) -> int:
        return self.num_bytes + self.reserved_bytes - self.max_bytes

    def _walk(self, ids: np.ndarray) -> Iterator[tuple[_Node, int]]:
        """The nodes along the tokens, from the root, each with the position up to which it agrees.

        A child differs from its parent in its first token, so only one can go on.
        """
        node: _Node | None = self._root
        at = 0
        while node is not None:
            at += common_len(node.tokens, ids[at:])
            yield node, at
            node = node.children.get((at, int(ids[at]))) if at < len(ids) else None

    def _use(self, node: _Node) -> None:
        while node.parent is not None:
            self._checkpoints.move_to_end((node, node.span.end))
            node = node.parent

    def _make_room(self) -> None:
        """Give up the oldest until all fits, or nothing is left but what is being added."""
        while self._excess_bytes > 0 and self._checkpoints:
            (node, position), _ = self._checkpoints.popitem(last=False)
            self.num_bytes -= count_bytes(node.checkpoints.pop(position))
            self._prune(node)

    def _prune(self, node: _Node) -> None:
        """Remove nodes that lead nowhere."""
        while (
            node.parent is not None and node.is_kept and not node.children and not node.checkpoints
        ):
            del node.parent.children[node.key]
            self.num_bytes -= node.num_bytes
            node = node.parent
