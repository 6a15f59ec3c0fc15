"""What engines of one thread each write without a server: one by itself, and several at once, which
is the most that as many replicas could write on this machine.

In: a model and prompts. Out: tokens per second. Each engine is a process of its own.
"""

import multiprocessing
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from itertools import cycle
from multiprocessing.connection import Connection
from pathlib import Path

from draftree.errors import BenchError


class EnginesAlone:
    def __init__(self, connections: Sequence[Connection]) -> None:
        self._connections = connections

    def rate(self, seconds: float) -> float:
        """Tokens per second of all together, all of them writing at once for so long."""
        for connection in self._connections:
            connection.send(seconds)
        return sum(_receive(connection) for connection in self._connections)


def _receive(connection: Connection) -> float:
    try:
        return float(connection.recv())
    except EOFError:
        raise BenchError("An engine's process ended; what it said is above.") from None


@contextmanager
def open_engines(
    path: Path, num_engines: int, prompts: Sequence[str], num_tokens: int
) -> Iterator[EnginesAlone]:
    """Loaded and warm; replies have at most num_tokens."""
    context = multiprocessing.get_context("spawn")
    pairs = [context.Pipe() for _ in range(num_engines)]
    processes = [
        context.Process(target=_run, args=(theirs, str(path), list(prompts), num_tokens))
        for _, theirs in pairs
    ]
    try:
        for process, (own, theirs) in zip(processes, pairs, strict=True):
            process.start()
            theirs.close()  # so that an engine that ends is noticed
            _receive(own)
        yield EnginesAlone([own for own, _ in pairs])
    finally:
        for process in processes:
            if process.pid is not None:
                process.terminate()
                process.join()


def _run(connection: Connection, path: str, prompts: Sequence[str], num_tokens: int) -> None:
    from draftree.chat import Engine

    engine = Engine.open(path, threads=1)
    asked = cycle(prompts)

    def write(seconds: float) -> float:
        """Tokens per second, for so long; what is being written then is cut off."""
        begin, count = time.perf_counter(), 0
        while True:
            reply = engine.chat([{"role": "user", "content": next(asked)}], max_tokens=num_tokens)
            for _ in reply:
                passed = time.perf_counter() - begin
                if passed >= seconds:
                    reply.close()
                    return (count + reply.usage.completion_tokens) / passed
            count += reply.usage.completion_tokens

    write(0.0)
    connection.send(0.0)  # ready
    while True:
        connection.send(write(connection.recv()))
