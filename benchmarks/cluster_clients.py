"""Clients that ask again as soon as they are answered, and the tokens per second that all of them
get while every one has a request.

In: how a request is sent, and requests. Out: a rate. Replies are read after the last one has come:
clients run on the engines' cores.
"""

import re
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, Final

from benchmarks.overhead import read_reply
from draftree.errors import BenchError

Pieces = list[tuple[float, bytes]]  # seconds since the request was sent, and what came
Send = Callable[[dict[str, Any]], Pieces]

# How the rate of a record was counted; older records do not say it, and count whole runs.
COUNTED: Final = "while every client has a request"
_TEXT: Final = re.compile(rb'"(?:content|reasoning_content)":"[^"].*\n\n')  # an event, to its end


@dataclass(frozen=True, slots=True)
class Exchange:
    """One request of a client: when it was sent, and what came."""

    begin_s: float
    pieces: Pieces

    @property
    def end_s(self) -> float:
        return self.begin_s + self.pieces[-1][0]

    def text_s(self) -> list[float]:
        """When each event with text had come whole."""
        data = b"".join(piece for _, piece in self.pieces)
        ends = list(accumulate(len(piece) for _, piece in self.pieces))
        found = (bisect_left(ends, event.end()) for event in _TEXT.finditer(data))
        return [self.begin_s + self.pieces[index][0] for index in found]


@dataclass(frozen=True, slots=True)
class ClientRate:
    rate: float  # tokens per second in the window
    window_s: float
    whole_rate: float  # from the first request to the end of the last reply


def run_clients(
    send: Send, warm: Sequence[dict[str, Any]], bodies: Sequence[dict[str, Any]]
) -> list[list[Exchange]]:
    """A client for each body of `warm`, with which it begins; when all have been answered, each
    sends the next of `bodies` until none is left. What each client got, warm-up left out.
    """
    waiting = iter(list(bodies))  # of a list: threads may share it

    def ask_on(_: int) -> list[Exchange]:
        return list(_ask_all(send, waiting))

    with ThreadPoolExecutor(len(warm)) as pool:
        list(pool.map(send, warm))
        return list(pool.map(ask_on, range(len(warm))))


def _ask_all(send: Send, bodies: Iterator[dict[str, Any]]) -> Iterator[Exchange]:
    for body in bodies:
        begin_s = time.perf_counter()
        yield Exchange(begin_s, send(body))


def rate_clients(clients: Sequence[Sequence[Exchange]]) -> ClientRate:
    """The window begins when text has come to every client, and ends with the first client that
    finds no request left. A reply that is only partly inside counts with its part: its tokens are
    as many as its events of text inside are of all of these.
    """
    if not all(clients):
        raise BenchError("There are fewer requests than clients, so never are all of them busy.")
    # Of a refusal, read_reply says what the server wrote.
    counts = [[read_reply(each.pieces).num_tokens for each in own] for own in clients]
    times = [[each.text_s() for each in own] for own in clients]
    begin_s = max(own[0][0] for own in times)
    end_s = min(own[-1].end_s for own in clients)
    if end_s <= begin_s:
        raise BenchError("There was no time in which all clients had a request; take more of them.")
    num_inside = num_tokens = 0.0
    for own_times, own_counts in zip(times, counts, strict=True):
        for text_s, count in zip(own_times, own_counts, strict=True):
            inside = sum(begin_s < when <= end_s for when in text_s)
            num_inside += count * inside / len(text_s)
            num_tokens += count
    first_s = min(own[0].begin_s for own in clients)
    last_s = max(own[-1].end_s for own in clients)
    window_s = end_s - begin_s
    return ClientRate(num_inside / window_s, window_s, num_tokens / (last_s - first_s))
