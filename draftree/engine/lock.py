"""Who uses an engine now: one reply at a time, none after it was closed. A reply that pauses gives
its turn up.

A thread that opens a second reply while its first one is unfinished would wait for itself; it gets
an error instead. Other threads wait.
"""

import gc
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from draftree.errors import EngineError


class EngineLock:
    def __init__(self) -> None:
        self.is_closed = False
        self.num_uses = 0  # besides passes that requests share: chunks, rounds of one, and others
        self._lock = threading.Lock()
        self._owner = 0  # the thread that last used the engine, while the lock is held

    def check_open(self) -> None:
        if self.is_closed:
            raise EngineError("The engine was closed; open another one.")

    def acquire(self) -> None:
        self.check_open()
        if not self._lock.acquire(blocking=False):
            gc.collect()  # a reply that was dropped half way holds the lock until it is collected
            if not self._lock.acquire(blocking=False):
                if self._owner == threading.get_ident():
                    raise EngineError(
                        "Another reply of this engine is unfinished in this thread; read it to its "
                        "end or close it first."
                    )
                self._lock.acquire()
        if self.is_closed:  # while it waited
            self._lock.release()
        self.enter()

    def enter(self) -> None:
        """Before each pass: a reply may be begun in one thread and read on in another."""
        self.check_open()
        self._owner = threading.get_ident()

    def release(self) -> None:
        self._owner = 0
        self._lock.release()

    @contextmanager
    def hold(self) -> Iterator[None]:
        self.acquire()
        self.num_uses += 1
        try:
            yield
        finally:
            self.release()

    @contextmanager
    def try_hold(self) -> Iterator[bool]:
        """Whether nobody uses it, which then stays so."""
        self.check_open()
        is_free = self._lock.acquire(blocking=False)
        try:
            yield is_free
        finally:
            if is_free:
                self._lock.release()


class Turn:
    """One reply's use of the engine, given up while the reply pauses."""

    def __init__(self, lock: EngineLock) -> None:
        self.is_held = False
        self._lock = lock

    def __enter__(self) -> "Turn":
        self.begin()
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_held:
            self.end()

    def begin(self) -> None:
        self._lock.acquire()
        self.is_held = True

    def end(self) -> None:
        self.is_held = False
        self._lock.release()
