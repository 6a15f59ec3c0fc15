"""A checkpoint: named raw tensors and metadata, whatever kind of file they come from.

Names and metadata keys are those that GGUF files use. It does not know what the tensors mean, and
decodes none of them; file.py opens one.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any

import numpy as np

from draftree.errors import CheckpointError
from draftree.kernels.quant.formats import QuantType
from draftree.weights.mapping import forget_file


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """What a checkpoint says about one tensor. shape is row-major: (rows, cols)."""

    name: str
    shape: tuple[int, ...]
    qtype: QuantType
    nbytes: int


class Checkpoint:
    """Tensors and metadata of one model: views into memory-mapped files."""

    def __init__(
        self,
        path: Path,
        metadata: Mapping[str, Any],
        tensors: Mapping[str, TensorInfo],
        views: Mapping[str, np.ndarray],
    ) -> None:
        """metadata names the architecture, its values are str, int, float, bool or sequences of
        them; views holds uint8 [rows, row_bytes] per tensor.
        """
        self.path = path
        self.architecture: str = metadata["general.architecture"]
        self.metadata: Mapping[str, Any] = MappingProxyType(dict(metadata))
        self.tensors: Mapping[str, TensorInfo] = MappingProxyType(dict(tensors))
        self._views = dict(views)

    def raw(self, name: str) -> np.ndarray:
        """The tensor's bytes, a read-only view of the file: uint8 [rows, row_bytes].

        Leading dimensions are folded into rows; a vector is one row. The view outlives this object.
        """
        if name not in self._views:
            raise CheckpointError(f"{self.path} has no tensor {name!r}.")
        return self._views[name]

    def release(self) -> None:
        """Give the memory of what was read so far back; views stay valid."""
        for view in self._views.values():
            forget_file(view)
