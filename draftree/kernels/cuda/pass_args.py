"""What changes from one pass to the next, in device memory that never moves, so that a CUDA graph
can read it.

The words mean what they mean in kernels/cpu/pass_args.py; `order` adds the nodes in depth-first
preorder. The host fills a copy and uploads it; kernels of a round write the device's words
themselves.
"""

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.ops import Integers

NUM_TOKENS, COMMITTED, IS_TREE, PATH_LEN, NUM_ROWS, FIRST, SINKS = range(7)
CONTROL_LEN = 16


class CudaPassArgs:
    """Control words and per-row arrays (int32) for passes of at most max_tokens rows, trees of
    max_nodes.
    """

    def __init__(self, max_tokens: int, max_nodes: int, gpu: Gpu) -> None:
        assert 1 <= max_nodes <= max_tokens
        self.max_tokens, self.max_nodes = max_tokens, max_nodes
        rows, nodes = [max_tokens] * 2, [max_nodes] * 5
        lengths = [-(-n // 4) * 4 for n in (CONTROL_LEN, *rows, *nodes, max_nodes * max_nodes)]
        self._device = torch.zeros(sum(lengths), dtype=torch.int32, device=gpu.place)
        self._host = torch.zeros(sum(lengths), dtype=torch.int32, pin_memory=gpu.is_real)
        self.control, self.tokens, self.positions, *per_node = self._device.split(lengths)
        self.parents, self.depths, self.order, self.path, self.rows, ancestors = per_node
        self.ancestors = ancestors[: max_nodes * max_nodes].view(max_nodes, max_nodes)
        parts = [part.numpy() for part in self._host.split(lengths)]
        self._control, self._tokens, self._positions = parts[:3]
        self._parents, self._depths, self._order, self._path, self._rows = parts[3:8]
        self._ancestors = parts[8][: max_nodes * max_nodes].reshape(max_nodes, max_nodes)

    @property
    def num_tokens(self) -> int:
        """Of the pass that the host has set up last."""
        return int(self._control[NUM_TOKENS])

    @property
    def committed(self) -> int:
        return int(self._control[COMMITTED])

    @property
    def sinks(self) -> int:
        return int(self._control[SINKS])

    @property
    def num_rows(self) -> int:
        return int(self._control[NUM_ROWS])

    def word(self, index: int) -> torch.Tensor:
        """One control word on the device: int32 [1]."""
        return self.control[index : index + 1]

    def set_chain(self, tokens: Integers, committed: int) -> None:
        """A committed pass over tokens that follow `committed` earlier ones."""
        count = len(tokens)
        assert 1 <= count <= self.max_tokens
        self._begin(tokens, np.arange(committed, committed + count), committed, is_tree=False)

    def set_tree(
        self, tokens: Integers, parents: Integers, depths: Integers, committed: int
    ) -> None:
        """A speculative pass over a tree whose root is at position `committed`."""
        count, depths = len(tokens), np.asarray(depths)
        assert 1 <= count <= self.max_nodes
        self._parents[:count], self._depths[:count] = parents, depths
        for node in range(count):
            depth, parent = depths[node], parents[node]
            if parent >= 0:
                self._ancestors[node, :depth] = self._ancestors[parent, :depth]
            self._ancestors[node, depth] = node
        self._order[:count] = preorder(parents)
        self._begin(tokens, committed + depths, committed, is_tree=True)

    def set_path(self, path: Integers) -> None:
        self._control[PATH_LEN] = len(path)
        self._path[: len(path)] = path
        self._upload()

    def set_rows(self, rows: Integers) -> None:
        self._control[NUM_ROWS] = len(rows)
        self._rows[: len(rows)] = rows
        self._upload()

    def set_sinks(self, count: int) -> None:
        """So many positions at the beginning are seen from now on, whatever the window."""
        self._control[SINKS] = count

    def set_idle(self, committed: int = 0) -> None:
        """No rows: programs run through without effect."""
        self._control[:FIRST] = 0
        self._control[COMMITTED] = committed
        self._upload()

    def set_first(self, position: int) -> None:
        """Attention does not look before it, in this pass and those after."""
        self._control[FIRST] = position
        self._upload()

    def _begin(
        self, tokens: Integers, positions: np.ndarray, committed: int, *, is_tree: bool
    ) -> None:
        count = len(tokens)
        self._tokens[:count], self._positions[:count] = tokens, positions
        control = self._control
        control[NUM_TOKENS], control[COMMITTED], control[IS_TREE] = count, committed, is_tree
        self._upload()

    def _upload(self) -> None:
        """Returns when the words are there: the host's copy may be changed at once."""
        self._device.copy_(self._host)


def preorder(parents: Integers) -> np.ndarray:
    """The nodes depth first, each before its children: a tree's nodes point at earlier ones."""
    children: list[list[int]] = [[] for _ in parents]
    for node, parent in enumerate(parents):
        if parent >= 0:
            children[parent].append(node)
    order, stack = [], [0]
    while stack:
        node = stack.pop()
        order.append(node)
        stack.extend(reversed(children[node]))
    return np.asarray(order, dtype=np.int32)
