"""Typed reading of a checkpoint's metadata, with one clear sentence when a value is missing or
odd.
"""

from typing import Any

from draftree.errors import CheckpointError
from draftree.weights.checkpoint import Checkpoint


class Metadata:
    """Keys are given without the architecture prefix."""

    def __init__(self, checkpoint: Checkpoint) -> None:
        self._checkpoint = checkpoint

    def count(self, key: str, default: int | None = None) -> int:
        """A positive whole number; a per-layer list counts if all its entries are equal."""
        value = self._value(key, default)
        if isinstance(value, list) and value and all(v == value[0] for v in value):
            value = value[0]
        if isinstance(value, bool) or not isinstance(value, int) or not 0 < value < 2**31:
            self._refuse(key, value, "a positive whole number")
        return int(value)

    def number(self, key: str, default: float | None = None) -> float:
        value = self._value(key, default)
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < 1e30:
            self._refuse(key, value, "a positive number")
        return float(value)

    def optional(self, key: str) -> Any:
        return self._checkpoint.metadata.get(f"{self._checkpoint.architecture}.{key}")

    def _value(self, key: str, default: Any) -> Any:
        value = self.optional(key)
        if value is None and default is None:
            name = f"{self._checkpoint.architecture}.{key}"
            raise CheckpointError(f"{self._checkpoint.path} has no metadata '{name}'.")
        return default if value is None else value

    def _refuse(self, key: str, value: object, wanted: str) -> None:
        shown = str(value)[:60]
        raise CheckpointError(
            f"{self._checkpoint.path}: metadata '{self._checkpoint.architecture}.{key}' "
            f"should be {wanted}, not {shown}."
        )
