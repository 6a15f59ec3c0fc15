"""What changes from one pass to the next, in arrays that never move, so that a recorded program
can read it.

A pass runs `num_tokens` rows that follow `committed` earlier positions. In a certain pass the
rows are a chain that will be kept: recurrent state is advanced in place. In a tentative pass the
rows are a tree: committed state is only read, and what a later commit needs is stored per node.
"""

import numpy as np

NUM_TOKENS, COMMITTED, IS_TREE, PATH_LEN, NUM_ROWS = range(5)


class Step:
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

    def set_chain(self, tokens: np.ndarray, committed: int) -> None:
        """A certain pass over tokens that follow `committed` earlier ones."""
        count = len(tokens)
        assert 1 <= count <= self.max_tokens
        self.control[NUM_TOKENS], self.control[COMMITTED], self.control[IS_TREE] = (
            count,
            committed,
            0,
        )
        self.tokens[:count] = tokens
        self.positions[:count] = np.arange(committed, committed + count)

    def set_tree(
        self, tokens: np.ndarray, parents: np.ndarray, depths: np.ndarray, committed: int
    ) -> None:
        """A tentative pass over a tree whose root is at position `committed`."""
        count = len(tokens)
        assert 1 <= count <= self.max_nodes
        self.control[NUM_TOKENS], self.control[COMMITTED], self.control[IS_TREE] = (
            count,
            committed,
            1,
        )
        self.tokens[:count] = tokens
        self.positions[:count] = committed + depths
        self.parents[:count] = parents
        self.depths[:count] = depths
        for node in range(count):
            depth, parent = depths[node], parents[node]
            if parent >= 0:
                self.ancestors[node, :depth] = self.ancestors[parent, :depth]
            self.ancestors[node, depth] = node

    def set_path(self, path: np.ndarray) -> None:
        self.control[PATH_LEN] = len(path)
        self.path[: len(path)] = path

    def set_rows(self, rows: np.ndarray) -> None:
        self.control[NUM_ROWS] = len(rows)
        self.rows[: len(rows)] = rows
