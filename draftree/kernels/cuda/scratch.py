"""Device memory for activations, handed out while operations are recorded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TypeVar

import torch

from draftree.kernels.cuda import layout
from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.prepare import RowSource
from draftree.kernels.cuda.program import MOST_ROWS
from draftree.kernels.ops import MatmulInput

_Block = TypeVar("_Block")


@dataclass(frozen=True)
class CudaMatmulInput(MatmulInput):
    """The same rows in the forms that short and long passes read, and what they are made from."""

    tiles: layout.Activations
    halves: layout.HalfRows
    source: Callable[[int], RowSource]  # the first so many rows


class Scratch:
    """Stacks of device memory for activations: scopes give back what was taken inside them."""

    def __init__(self, max_tokens: int, gpu: Gpu) -> None:
        self._max_tokens, self._gpu = max_tokens, gpu
        self._rows: list[torch.Tensor] = []
        self._inputs: list[tuple[layout.Activations, layout.HalfRows]] = []
        self._num_rows = self._num_inputs = 0  # that are taken

    def rows(self, width: int, num_rows: int = 0) -> torch.Tensor:
        """float32 [num_rows or max_tokens, width], rows at multiples of 16 bytes."""
        shape = (num_rows or self._max_tokens, -(-width // 4) * 4)
        size = shape[0] * shape[1]
        self._num_rows += 1
        block = _take(
            self._rows,
            self._num_rows - 1,
            lambda block: block.numel() >= size,
            lambda: torch.empty(size, device=self._gpu.place),
        )
        return block[:size].view(shape)[:, :width]

    def matmul_input(self, num_cols: int, source: Callable[[int], RowSource]) -> CudaMatmulInput:
        self._num_inputs += 1
        tiles, halves = _take(
            self._inputs,
            self._num_inputs - 1,
            lambda forms: forms[0].num_cols == num_cols,
            lambda: (
                layout.new_activations(MOST_ROWS, num_cols, self._gpu),
                layout.new_half_rows(self._max_tokens, num_cols, self._gpu),
            ),
        )
        return CudaMatmulInput(tiles, halves, source)

    @contextmanager
    def scope(self) -> Iterator[None]:
        before = self._num_rows, self._num_inputs
        try:
            yield
        finally:
            self._num_rows, self._num_inputs = before


def _take(
    blocks: list[_Block], used: int, fits: Callable[[_Block], bool], make: Callable[[], _Block]
) -> _Block:
    """The first block behind the used ones that fits, or a new one; it is the next in the list."""
    for i in range(used, len(blocks)):
        if fits(blocks[i]):
            blocks[used], blocks[i] = blocks[i], blocks[used]
            break
    else:
        blocks.insert(used, make())
    return blocks[used]
