"""Device memory for activations, handed out while operations are recorded."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.linear import Activations, new_activations
from draftree.kernels.cuda.prepare import HalfRows, new_half_rows
from draftree.kernels.cuda.program import MOST_ROWS


@dataclass(frozen=True)
class MatmulInput:
    """The same rows in the forms that short and long passes read."""

    tiles: Activations
    halves: HalfRows

    def form(self, num_rows: int) -> Activations | HalfRows:
        return self.tiles if num_rows <= MOST_ROWS else self.halves


class Scratch:
    """A stack of device memory for activations: scopes give back what was taken inside them."""

    def __init__(self, max_tokens: int, gpu: Gpu) -> None:
        self._max_tokens, self._gpu = max_tokens, gpu
        self._blocks: list[Any] = []
        self._used = 0

    def rows(self, width: int, num_rows: int = 0) -> torch.Tensor:
        """float32 [num_rows or max_tokens, width], rows at multiples of 16 bytes."""
        shape = (num_rows or self._max_tokens, -(-width // 4) * 4)
        block = self._take(
            lambda b: isinstance(b, torch.Tensor) and b.numel() >= shape[0] * shape[1],
            lambda: torch.empty(shape[0] * shape[1], device=self._gpu.place),
        )
        return block[: shape[0] * shape[1]].view(shape)[:, :width]

    def matmul_input(self, num_cols: int) -> MatmulInput:
        return self._take(
            lambda b: isinstance(b, MatmulInput) and b.tiles.num_cols == num_cols,
            lambda: MatmulInput(
                new_activations(MOST_ROWS, num_cols, self._gpu),
                new_half_rows(self._max_tokens, num_cols, self._gpu),
            ),
        )

    def _take(self, fits: Callable[[Any], bool], make: Callable[[], Any]) -> Any:
        blocks, used = self._blocks, self._used
        for i in range(used, len(blocks)):
            if fits(blocks[i]):
                blocks[used], blocks[i] = blocks[i], blocks[used]
                break
        else:
            blocks.insert(used, make())
        self._used += 1
        return blocks[used]

    @contextmanager
    def scope(self) -> Iterator[None]:
        before = self._used
        try:
            yield
        finally:
            self._used = before
