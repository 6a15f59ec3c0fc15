"""What changes from one pass to the next, in arrays that never move, so that a recorded program
can read it.

A pass runs `num_tokens` rows that follow `committed` earlier positions. In a committed pass the
rows are a chain that will be kept: recurrent state is advanced in place. In a speculative pass the
rows are a tree: committed state is only read, and what a later commit needs is stored per node.
"""

import ctypes
from collections.abc import Sequence
from typing import Any

import numpy as np

from draftree.kernels.ops import Integers

NUM_TOKENS, COMMITTED, IS_TREE, PATH_LEN, NUM_ROWS, FIRST, SINKS = range(7)


class PassArgs:
    """Control words and per-row arrays (all int64) for passes of at most max_tokens rows, trees
    of max_nodes.
    """

    def __init__(self, max_tokens: int, max_nodes: int) -> None:
        assert 1 <= max_nodes <= max_tokens
        self.max_tokens, self.max_nodes = max_tokens, max_nodes
        self.control = np.zeros(8, dtype=np.int64)
        self.tokens = np.zeros(max_tokens, dtype=np.int64)
        self.positions = np.zeros(max_tokens, dtype=np.int64)  # absolute
        self.parents = np.full(max_nodes, -1, dtype=np.int64)
        self.depths = np.zeros(max_nodes, dtype=np.int64)
        # ancestors[i, d]: the node at depth d on the way from the root to i; i itself at its own
        # depth
        self.ancestors = np.zeros((max_nodes, max_nodes), dtype=np.int64)
        self.path = np.zeros(max_nodes, dtype=np.int64)  # accepted nodes, root first
        self.rows = np.zeros(max_nodes, dtype=np.int64)  # rows whose logits are wanted
        self._control, self._tokens = _words(self.control), _words(self.tokens)
        self._positions, self._parents = _words(self.positions), _words(self.parents)
        self._depths, self._ancestors = _words(self.depths), _words(self.ancestors)
        self._path, self._rows = _words(self.path), _words(self.rows)

    def set_chain(self, tokens: Integers, committed: int) -> None:
        """A committed pass over tokens that follow `committed` earlier ones."""
        count = len(tokens)
        assert 1 <= count <= self.max_tokens
        control = self._control
        control[NUM_TOKENS], control[COMMITTED], control[IS_TREE] = count, committed, 0
        self._tokens[:count] = _integers(tokens)
        self._positions[:count] = range(committed, committed + count)

    def set_batch(self, tokens: Integers, positions: Integers) -> None:
        """Rows of several sequences, each at a position of its own, all of whose logits count."""
        count = len(tokens)
        assert 1 <= count <= self.max_nodes
        self._control[NUM_TOKENS] = count
        self._tokens[:count] = _integers(tokens)
        self._positions[:count] = _integers(positions)
        self.set_rows(range(count))

    def set_tree(
        self, tokens: Integers, parents: Integers, depths: Integers, committed: int
    ) -> None:
        """A speculative pass over a tree whose root is at position `committed`."""
        count = len(tokens)
        assert 1 <= count <= self.max_nodes
        parents, depths = _integers(parents), _integers(depths)
        control = self._control
        control[NUM_TOKENS], control[COMMITTED], control[IS_TREE] = count, committed, 1
        self._tokens[:count] = _integers(tokens)
        self._positions[:count] = [committed + depth for depth in depths]
        self._parents[:count] = parents
        self._depths[:count] = depths
        ways: list[tuple[int, ...]] = []
        for node, parent in enumerate(parents):
            way = (*ways[parent], node) if parent >= 0 else (node,)
            ways.append(way)
            first = node * self.max_nodes
            self._ancestors[first : first + len(way)] = way

    def set_path(self, path: Integers) -> None:
        self._control[PATH_LEN] = len(path)
        self._path[: len(path)] = _integers(path)

    def set_rows(self, rows: Integers) -> None:
        self._control[NUM_ROWS] = len(rows)
        self._rows[: len(rows)] = _integers(rows)

    def set_first(self, position: int) -> None:
        """Attention does not look before it, in this pass and those after."""
        self._control[FIRST] = position

    def set_sinks(self, count: int) -> None:
        """So many positions at the beginning are seen from now on, whatever the window."""
        self._control[SINKS] = count


def _words(array: np.ndarray) -> Any:
    """The array's memory, flat, in a form that takes a few integers faster than numpy does."""
    return (ctypes.c_int64 * array.size).from_buffer(array.data)


def _integers(values: Integers) -> Sequence[int]:
    return values.tolist() if isinstance(values, np.ndarray) else values
