"""What is kept of earlier sequences, in host memory and files: token prefixes in, snapshots out.

A tree of spans: conversations with a common beginning hold it once. Bounded in bytes; what was used
longest ago goes first, ends before beginnings. A recurrent model can only return to positions that
were marked with a copy of its recurrent state, others to any. Knows neither models nor devices.
"""

from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from draftree.state.prefix_file import Copy, KeptFile, PrefixFolder
from draftree.state.sequence import common_len
from draftree.state.span import Parts, Span

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
    start: int
    tokens: np.ndarray  # int64
    copy: Copy  # of keys and values
    children: "dict[tuple[int, int], _Node]" = field(default_factory=dict)  # by start, first token
    checkpoints: dict[int, Copy] = field(default_factory=dict)  # by position in (start, end]

    @property
    def end(self) -> int:
        return self.start + len(self.tokens)

    @property
    def key(self) -> tuple[int, int]:
        return self.start, int(self.tokens[0])

    @property
    def is_kept(self) -> bool:
        return self.parent is None or self.parent.children.get(self.key) is self

    @property
    def num_bytes(self) -> int:
        """Without the checkpoints."""
        return self.copy.num_bytes + self.tokens.nbytes


class PrefixStore:
    """Holds at most max_bytes less those reserved, and one span or checkpoint more while it is
    added. span_len: positions that are kept or given up together, at most. folder: where copies
    outlive the process; those that are there are read when they are needed.
    """

    def __init__(
        self,
        max_bytes: int,
        *,
        is_recurrent: bool,
        span_len: int = _SPAN_LEN,
        folder: PrefixFolder | None = None,
    ) -> None:
        self.max_bytes = max_bytes
        self.reserved_bytes = 0
        self.num_bytes = 0
        self._least_bytes = 0.0  # of a position, in any span so far
        self._is_recurrent, self._span_len = is_recurrent, span_len
        self._folder = folder
        self._root = _Node(None, 0, np.empty(0, np.int64), Copy(0, ()))
        # Oldest first. Where no recurrent state is needed, every node has one checkpoint, at its
        # end, and using it uses those before it: the oldest is always the end of a branch.
        self._checkpoints: OrderedDict[tuple[_Node, int], None] = OrderedDict()
        if folder is not None:
            self._adopt(folder.scan())

    def clear(self) -> None:
        for child in list(self._root.children.values()):
            self._remove(child)

    def reserve(self, num_bytes: int) -> None:
        """Leave so much of the bound to the owner, who keeps it elsewhere."""
        self.reserved_bytes = num_bytes
        self._make_room()

    def find(self, tokens: Sequence[int]) -> Match:
        """The longest prefix of the tokens that can be restored."""
        ids = np.asarray(tokens, np.int64)
        while (match := self._try_find(ids)) is None:
            continue  # a file was damaged, and what depends on it is gone
        return match

    def _try_find(self, ids: np.ndarray) -> Match | None:
        path = list(self._walk(ids))
        shared = path[-1][1]
        if not self._is_recurrent:
            if (spans := self._read_spans(path[1:])) is None:
                return None
            self._use(path[-1][0])
            return Match(shared, spans, (), shared)
        for i in range(len(path) - 1, 0, -1):
            node, end = path[i]
            position = max((at for at in node.checkpoints if at <= end), default=0)
            if position:
                recurrent = self._read(node.checkpoints[position])
                if recurrent is None:
                    self._give_up(node, position)
                if recurrent is None or (spans := self._read_spans(path[1 : i + 1])) is None:
                    return None
                self._checkpoints.move_to_end((node, position))
                return Match(position, spans, recurrent, shared)
        return Match(shared=shared)

    def write(self, should_stop: Callable[[], bool]) -> None:
        """Put into files what is not in one yet, until asked to stop."""
        if self._folder is None:
            return
        waiting = [(child, child.tokens[:0]) for child in self._root.children.values()]
        for node, before in waiting:
            tokens = np.concatenate((before, node.tokens))
            copies = [(node.start, node.end, node.copy)]
            copies += [(at, at, copy) for at, copy in node.checkpoints.items()]
            for start, end, copy in copies:
                if copy.path is None and copy.num_bytes:
                    if should_stop():
                        return
                    self._folder.write(tokens[:end], start, copy)
            children = node.children.values()
            waiting += [(child, tokens[: child.start]) for child in children]
        self._folder.limit()

    def insert(
        self,
        tokens: Sequence[int] | np.ndarray,
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
                node = self._add(node, at, ids[at:end], Copy.of(copy(at, end)))
                at = end
                self._make_room()
                if self._excess_bytes > 0 or not node.is_kept:
                    return
            if self._is_recurrent and at > 0:
                if at not in node.checkpoints:
                    node.checkpoints[at] = Copy.of(copy_recurrent())
                    self.num_bytes += node.checkpoints[at].num_bytes
                self._checkpoints[node, at] = None
                self._checkpoints.move_to_end((node, at))
                self._make_room()
        finally:
            self._prune(node)

    def _adopt(self, files: list[KeptFile]) -> None:
        """Hang up what an earlier process left, beginnings first; files that lead nowhere go."""
        assert self._folder is not None
        uses: dict[int, tuple[_Node, int]] = {}
        for age, file in sorted(enumerate(files), key=lambda each: each[1].start):
            node, at = list(self._walk(file.tokens))[-1]
            length = len(file.tokens)
            if at == file.start < length:
                node = self._add(node, at, file.tokens[at:], file.copy)
            elif self._is_recurrent and node.start < at == file.start == length:
                node.checkpoints[at] = file.copy
                self._checkpoints[node, at] = None
                self.num_bytes += file.copy.num_bytes
            else:
                self._folder.remove(file.copy)
                continue
            uses[age] = node, length
        for _, (node, at) in sorted(uses.items()):
            if not self._is_recurrent:
                self._use(node)
            elif (node, at) in self._checkpoints:
                self._checkpoints.move_to_end((node, at))
        for node, _ in uses.values():
            self._prune(node)
        self._make_room()

    def _add(self, parent: _Node, start: int, tokens: np.ndarray, copy: Copy) -> _Node:
        node = _Node(parent, start, tokens.copy(), copy)
        parent.children[node.key] = node
        self.num_bytes += node.num_bytes
        position_bytes = node.num_bytes / len(tokens)
        self._least_bytes = min(self._least_bytes or position_bytes, position_bytes)
        if not self._is_recurrent:
            self._checkpoints[node, node.end] = None
            node.checkpoints[node.end] = Copy(0, ())
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
            self._checkpoints.move_to_end((node, node.end))
            node = node.parent

    def _make_room(self) -> None:
        """Give up the oldest until all fits, or nothing is left but what is being added."""
        while self._excess_bytes > 0 and self._checkpoints:
            node, position = next(iter(self._checkpoints))
            self._give_up(node, position)

    def _give_up(self, node: _Node, position: int) -> None:
        """Remove a checkpoint, and what leads to it alone."""
        del self._checkpoints[node, position]
        self._drop(node.checkpoints.pop(position))
        self._prune(node)

    def _prune(self, node: _Node) -> None:
        """Remove nodes that lead nowhere."""
        while (
            node.parent is not None and node.is_kept and not node.children and not node.checkpoints
        ):
            del node.parent.children[node.key]
            self.num_bytes -= node.tokens.nbytes
            self._drop(node.copy)
            node = node.parent

    def _remove(self, node: _Node) -> None:
        """With all that follows it."""
        nodes = [node]
        for each in nodes:
            nodes += each.children.values()
        for each in reversed(nodes):
            for position in list(each.checkpoints):
                self._give_up(each, position)
            self._prune(each)

    def _drop(self, copy: Copy) -> None:
        self.num_bytes -= copy.num_bytes
        if self._folder is not None:
            self._folder.remove(copy)

    def _read_spans(self, path: Sequence[tuple[_Node, int]]) -> tuple[Span, ...] | None:
        """Of nodes up to where a walk leaves them: behind a fork lies another text."""
        spans = []
        for node, end in path:
            parts = self._read(node.copy)
            if parts is None:
                self._remove(node)
                return None
            spans.append(Span(node.start, end, parts))
        return tuple(spans)

    def _read(self, copy: Copy) -> Parts | None:
        if copy.parts is None:
            assert self._folder is not None
            copy.parts = self._folder.read(copy)
        return copy.parts
