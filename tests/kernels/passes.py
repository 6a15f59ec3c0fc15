"""What the kernel tests share: pools, random trees, and token-by-token runs to compare with."""

from dataclasses import dataclass
from functools import cache

import numpy as np
from hypothesis import strategies as st

from draftree.kernels.cpu.kernel import kernel
from draftree.kernels.cpu.pass_args import NUM_TOKENS, PassArgs
from draftree.kernels.cpu.program import Program
from draftree.kernels.cpu.simd import load_f32, load_i64, store_f32
from draftree.kernels.cpu.thread_pool import ThreadPool


@cache
def pool(num_threads: int) -> ThreadPool:
    """One pool per size for the whole test run; its threads sleep when nothing runs."""
    return ThreadPool(num_threads)


def randn(rng: np.random.Generator, *shape: int) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32)


@kernel
def _add_kernel(args, ticket, thread, num_threads):
    for i in range(thread, load_i64(args[0]) * args[1], num_threads):
        store_f32(args[2] + 4 * i, load_f32(args[2] + 4 * i) + load_f32(args[3] + 4 * i))


def record_add(program: Program, step: PassArgs, total: np.ndarray, more: np.ndarray) -> None:
    """total += more, both float32 [max_tokens, cols], in the rows of the pass."""
    words = step.control[NUM_TOKENS:], total.shape[1], total, more
    program.add(_add_kernel, *words, reads=(total, more), writes=(total,))


def poison(*shape: int) -> np.ndarray:
    """Memory that spoils every result it enters."""
    return np.full(shape, np.nan, np.float32)


@dataclass(frozen=True)
class Tree:
    """Nodes in an order in which parents come first, and one accepted path."""

    parents: tuple[int, ...]
    path: tuple[int, ...]

    @property
    def depths(self) -> np.ndarray:
        depths: list[int] = []
        for parent in self.parents:
            depths.append(0 if parent < 0 else depths[parent] + 1)
        return np.array(depths)

    def __len__(self) -> int:
        return len(self.parents)

    def load(self, step: PassArgs, committed: int) -> None:
        tokens = np.zeros(len(self), np.int64)
        step.set_tree(tokens, np.array(self.parents), self.depths, committed)
        step.set_path(np.array(self.path))

    def branch(self, node: int) -> list[int]:
        """From the root to the node."""
        nodes = [node]
        while self.parents[nodes[0]] >= 0:
            nodes.insert(0, self.parents[nodes[0]])
        return nodes


def make_tree(parents: list[int], last: int) -> Tree:
    tree = Tree((-1, *parents), ())
    return Tree(tree.parents, tuple(tree.branch(last % len(tree))))


@st.composite
def trees(draw: st.DrawFn, max_nodes: int = 24) -> Tree:
    """Any tree; half of the choices extend the newest node, so that deep ones are common too."""
    num_nodes = draw(st.integers(1, max_nodes))
    parents = []
    for node in range(1, num_nodes):
        parents.append(draw(st.one_of(st.just(node - 1), st.integers(0, node - 1))))
    return make_tree(parents, draw(st.integers(0, num_nodes - 1)))


def set_rows(step: PassArgs, count: int, committed: int = 0) -> None:
    step.set_chain(np.zeros(count, np.int64), committed)
