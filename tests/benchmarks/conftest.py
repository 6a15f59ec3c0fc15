"""The same as for the measurements of the package."""

from tests.bench.conftest import say, tiny_path

__all__ = ["say", "tiny_path"]
