"""Memory of requests' bodies: bounded over all of them and for each client, and given back.

A body counts from its first byte to the end of its request. Knows bytes and names of clients.
"""

import asyncio
import ctypes
import gc
from collections import Counter
from contextlib import suppress
from typing import Final

from draftree.serve.wire import busy

_RETRY_S: Final = 5
_MIB: Final = 2**20
_MUCH: Final = 8 * _MIB  # of freed memory, which is worth a walk through the allocator's lists
_MOMENT_S: Final = 0.5  # in which more may become free


class BodyMemory:
    """Used by the event loop alone."""

    def __init__(self, max_bytes: int, max_per_client: int) -> None:
        self.max_bytes, self.max_per_client = max_bytes, max_per_client
        self._held: Counter[str] = Counter()
        self._num_free = 0
        self._timer: asyncio.TimerHandle | None = None

    @property
    def num_held(self) -> int:
        return self._held.total()

    def hold(self, client: str, num_bytes: int) -> None:
        """Count bytes that have come, or refuse them."""
        if self._held[client] + num_bytes > self.max_per_client:
            sentence = f"Your requests hold {self.max_per_client / _MIB:.6g} MiB here already."
            raise busy(429, sentence, _RETRY_S)
        if self.num_held + num_bytes > self.max_bytes:
            sentence = f"Requests hold {self.max_bytes / _MIB:.6g} MiB here already."
            raise busy(503, sentence, _RETRY_S)
        self._held[client] += num_bytes

    def release(self, client: str, num_bytes: int) -> None:
        self._held[client] -= num_bytes
        if self._held[client] <= 0:
            del self._held[client]
        self._num_free += num_bytes
        if self._num_free >= _MUCH and self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(_MOMENT_S, self._give_back)

    def _give_back(self) -> None:
        self._num_free, self._timer = 0, None
        asyncio.get_running_loop().run_in_executor(None, trim)


def trim() -> None:
    """Hand what nobody uses, and what the allocator keeps free, back to the system."""
    gc.collect()
    with suppress(AttributeError):  # not every C library has it
        ctypes.CDLL(None).malloc_trim(0)
