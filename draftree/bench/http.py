"""Any server that speaks OpenAI's protocol, seen by its clients: time to the first token, gaps
between pieces, tokens per second, for 1 to many clients at a time, and for one behind another.

Streaming chat completions over the standard library alone. Every request begins with a number of
its own, so that no server knows its prompt already. Prompts and replies are not stored.
"""

import http.client
import json
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import asdict, dataclass, field
from statistics import median, quantiles
from typing import Any, Final
from urllib.parse import urlsplit

from draftree.bench.median import Report, Samples, summarize
from draftree.errors import BenchError

_TIMEOUT_S: Final = 300.0
_LAST_CHARACTERS: Final = 300
_DONE: Final = "[DONE]"
_LEAD_S: Final = 1.0  # that a long request is ahead of a short one
_LONG_TOKENS, _SHORT_TOKENS = 1200, 16
_LONG_PROMPT: Final = (
    "Write a long story of a ship and its crew, and tell every day of the journey."
)
_SHORT_PROMPT: Final = "Hi!"
_NUM_FIRST, _FIRST_TOKENS = 10, 8
_MOST_BEHIND: Final = 5  # times that it is tried


@dataclass(frozen=True, slots=True)
class Endpoint:
    """url: what clients are given as their base URL, with or without /v1."""

    url: str
    model: str = ""  # "": the first that the server lists
    api_key: str = field(default="", repr=False)

    def request(self, method: str, path: str, body: Any = None) -> http.client.HTTPResponse:
        """An answer with status 200, its body still to be read."""
        parts = urlsplit(self.url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise BenchError(f"{self.url} is not a URL of a server, as http://127.0.0.1:8000 is.")
        is_safe = parts.scheme == "https"
        kind = http.client.HTTPSConnection if is_safe else http.client.HTTPConnection
        connection = kind(parts.hostname, parts.port, timeout=_TIMEOUT_S)
        headers = {"Content-Type": "application/json"}
        if self.api_key:
            headers["Authorization"] = f"Bearer {self.api_key}"
        base = parts.path.rstrip("/").removesuffix("/v1")
        data = None if body is None else json.dumps(body).encode()
        try:
            connection.request(method, f"{base}/v1/{path}", data, headers)
            response = connection.getresponse()
        except (OSError, http.client.HTTPException) as error:
            raise BenchError(f"{self.url} does not answer: {error}.") from error
        if response.status != 200:
            words = response.read().decode("utf-8", "replace")[:_LAST_CHARACTERS]
            raise BenchError(f"{self.url} answered {response.status} to {path}: {words}")
        return response

    def find_model(self) -> str:
        if self.model:
            return self.model
        try:
            return str(json.loads(self.request("GET", "models").read())["data"][0]["id"])
        except (ValueError, LookupError, TypeError) as error:
            raise BenchError(f"{self.url} lists no model; name one with --model.") from error


@dataclass(frozen=True, slots=True)
class StreamedReply:
    """Seconds since the request was sent, of each piece of text and of the end."""

    text: str
    num_tokens: int
    is_counted: bool  # by the server; otherwise every piece counts as one token
    piece_s: list[float]
    end_s: float

    @property
    def gaps_ms(self) -> list[float]:
        pairs = zip(self.piece_s, self.piece_s[1:], strict=False)
        return [1000 * (after - before) for before, after in pairs]


def chat_body(model: str, prompt: str, num_tokens: int, system: str = "") -> dict[str, Any]:
    """One message, to be answered greedily as a stream that says how many tokens it had."""
    before = [{"role": "system", "content": system}] if system else []
    return {
        "model": model,
        "messages": [*before, {"role": "user", "content": prompt}],
        "max_tokens": num_tokens,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def ask(
    endpoint: Endpoint, model: str, prompt: str, num_tokens: int, system: str = ""
) -> StreamedReply:
    """Send one message and read the reply as it comes, greedily."""
    body = chat_body(model, prompt, num_tokens, system)
    pieces, times, num_told = [], [], 0
    start = time.perf_counter()
    with closing(endpoint.request("POST", "chat/completions", body)) as response:
        for event in read_events(response):
            if "error" in event:
                words = str(event["error"])[:_LAST_CHARACTERS]
                raise BenchError(f"{endpoint.url} broke off: {words}")
            text = "".join(_texts(event))
            if text:
                pieces.append(text)
                times.append(time.perf_counter() - start)
            num_told = (event.get("usage") or {}).get("completion_tokens", num_told)
    end_s = time.perf_counter() - start
    if not times:
        raise BenchError(f"{endpoint.url} sent a reply without text.")
    num_tokens = num_told or len(pieces)
    return StreamedReply("".join(pieces), num_tokens, num_told > 0, times, end_s)


def read_events(lines: Iterator[bytes] | http.client.HTTPResponse) -> Iterator[dict[str, Any]]:
    """The JSON objects of a stream of server-sent events."""
    for line in lines:
        name, _, value = line.decode("utf-8", "replace").strip().partition(":")
        if name != "data" or not value.strip():
            continue
        if value.strip() == _DONE:
            return
        try:
            event = json.loads(value)
        except ValueError as error:
            raise BenchError(f"The server sent an event that is not JSON ({error}).") from None
        if isinstance(event, dict):
            yield event


def _texts(event: dict[str, Any]) -> Iterator[str]:
    """What a client shows: text, and reasoning by either of its names."""
    for choice in event.get("choices") or ():
        delta = choice.get("delta") or {}
        for name in ("reasoning_content", "reasoning", "content"):
            if isinstance(delta.get(name), str):
                yield delta[name]


@dataclass(frozen=True, slots=True)
class HttpOptions:
    clients: tuple[int, ...]
    requests: int  # of each client
    num_tokens: int

    def settings(self, *, is_own: bool) -> dict[str, Any]:
        """is_own: the server is one that we started."""
        return asdict(self) | {"is_own": is_own}


@dataclass(frozen=True, slots=True)
class Spread:
    """Of many values: the middle and the slow end."""

    median: float
    p95: float
    count: int


@dataclass(frozen=True, slots=True)
class LevelMeasures:
    """With so many clients at a time. A piece may hold several tokens."""

    throughput: float  # tok/s of all clients together
    rate: Samples  # tok/s of each reply, from request to end
    ttft_ms: Samples  # of each reply
    ttft: Spread
    gap_ms: Spread  # between pieces
    token_ms: Spread  # of each reply: from first piece to end, over its tokens
    num_tokens: int


@dataclass(frozen=True, slots=True)
class BehindMeasures:
    """A short request that is sent while the reply to a long one is written: its first token."""

    ttft_ms: Samples
    alone_ms: Samples  # the same request with nobody ahead
    num_ahead: int  # tokens of the long replies, on average

    def headline(self) -> dict[str, Any]:
        return {"behind_ms": self.ttft_ms.median, "alone_ms": self.alone_ms.median}


@dataclass(frozen=True, slots=True)
class FirstMeasures:
    """The first requests that were sent, one after the other, alike but for a number that they
    begin with. Says how ready a server is that has just been started.
    """

    ttft_ms: tuple[float, ...]

    def headline(self) -> dict[str, Any]:
        return {"first_over_tenth": round(self.ttft_ms[0] / self.ttft_ms[-1], 2)}


@dataclass(frozen=True, slots=True)
class HttpMeasures:
    model: str
    is_counted: bool  # tokens were counted by the server
    levels: dict[str, LevelMeasures]  # by number of clients
    behind: BehindMeasures
    first: FirstMeasures

    def headline(self) -> dict[str, Any]:
        names = ("ttft", "gap_ms", "token_ms")
        levels = {
            clients: {"throughput": level.throughput}
            | {name: asdict(getattr(level, name)) for name in names}
            for clients, level in self.levels.items()
        }
        return self.first.headline() | self.behind.headline() | levels


def measure_http(
    endpoint: Endpoint, prompts: Sequence[str], options: HttpOptions, report: Report
) -> HttpMeasures:
    if not prompts:
        raise BenchError("There are no prompts to measure.")
    model = endpoint.find_model()
    first = measure_first(endpoint, model, prompts[0], report)
    levels, number, is_counted = {}, 0, True
    for num_clients in options.clients:
        report(f"clients at a time: {num_clients} of {max(options.clients)}")
        count = num_clients * options.requests
        asked = [f"{number + i}. {prompts[i % len(prompts)]}" for i in range(count)]
        number += count
        start = time.perf_counter()
        with ThreadPoolExecutor(num_clients) as pool:
            replies = list(
                pool.map(lambda text: ask(endpoint, model, text, options.num_tokens), asked)
            )
        levels[str(num_clients)] = summarize_level(replies, time.perf_counter() - start)
        is_counted &= all(reply.is_counted for reply in replies)
    behind = measure_behind(endpoint, model, min(options.requests, _MOST_BEHIND), report)
    return HttpMeasures(model, is_counted, levels, behind, first)


def measure_first(endpoint: Endpoint, model: str, prompt: str, report: Report) -> FirstMeasures:
    report(f"the first {_NUM_FIRST} requests")
    systems = (f"{number} is your number." for number in range(_NUM_FIRST))
    replies = [ask(endpoint, model, prompt, _FIRST_TOKENS, system) for system in systems]
    return FirstMeasures(tuple(round(1000 * reply.piece_s[0], 3) for reply in replies))


def measure_behind(endpoint: Endpoint, model: str, count: int, report: Report) -> BehindMeasures:
    alone, behind, num_ahead = [], [], 0
    with ThreadPoolExecutor(1) as pool:
        for number in range(count):
            report(f"a short request behind a long one: {number + 1} of {count}")
            short = f"{number}. {_SHORT_PROMPT}"
            alone.append(ask(endpoint, model, f"alone {short}", _SHORT_TOKENS))
            prompt = f"{number}. {_LONG_PROMPT}"
            long = pool.submit(ask, endpoint, model, prompt, _LONG_TOKENS)
            time.sleep(_LEAD_S)
            behind.append(ask(endpoint, model, f"behind {short}", _SHORT_TOKENS))
            num_ahead += long.result().num_tokens
    return BehindMeasures(_first_ms(behind), _first_ms(alone), round(num_ahead / count))


def _first_ms(replies: Sequence[StreamedReply]) -> Samples:
    return summarize([1000 * reply.piece_s[0] for reply in replies], "ms")


def summarize_level(replies: Sequence[StreamedReply], wall_s: float) -> LevelMeasures:
    firsts = [1000 * reply.piece_s[0] for reply in replies]
    num_tokens = sum(reply.num_tokens for reply in replies)
    token_ms = [
        1000 * (reply.end_s - reply.piece_s[0]) / (reply.num_tokens - 1)
        for reply in replies
        if reply.num_tokens > 1
    ]
    return LevelMeasures(
        throughput=round(num_tokens / wall_s, 2),
        rate=summarize([reply.num_tokens / reply.end_s for reply in replies], "tok/s"),
        ttft_ms=summarize(firsts, "ms"),
        ttft=spread_of(firsts),
        gap_ms=spread_of([gap for reply in replies for gap in reply.gaps_ms]),
        token_ms=spread_of(token_ms),
        num_tokens=num_tokens,
    )


def spread_of(values: Sequence[float]) -> Spread:
    if len(values) < 2:
        only = round(values[0], 3) if values else 0.0
        return Spread(only, only, len(values))
    p95 = quantiles(values, n=20, method="inclusive")[-1]
    return Spread(round(median(values), 3), round(p95, 3), len(values))
