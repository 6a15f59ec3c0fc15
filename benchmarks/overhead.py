"""What serving costs: replies of `draftree serve` beside those of an engine in this process.

The same chat prompts go to both in turns, greedily, with the same settings; each counts from the
message to the last piece of text. The server is a process of its own, as it is for its users. Both
sides only take what comes: the stream's bytes are noted with their times and read afterwards, since
a client that reads JSON on the engine's cores is nothing that the server costs.
"""

import http.client
import io
import json
import random
import re
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from statistics import median
from typing import Any, Final
from urllib.parse import urlsplit

from draftree.bench.http import Endpoint, chat_body, read_events
from draftree.bench.median import Ratio, Report, Samples, pairs_of, summarize
from draftree.chat import Engine
from draftree.errors import BenchError

_START_S: Final = 900.0
_POLL_S: Final = 0.1
_STOP_S: Final = 20.0
_REST_S: Final = 0.05  # in which a server copies its last conversation away
_REPLY_S: Final = 300.0
_LAST_CHARACTERS: Final = 300
_TEXT: Final = re.compile(rb'"(?:content|reasoning_content)":"[^"].*\n\n')  # an event, to its end
LLAMA_SLOTS: Final = 8
_SLOT_CTX: Final = 4096
_KEY: Final = "bench"  # whatever the user's own servers ask for


@dataclass(frozen=True, slots=True)
class OverheadOptions:
    threads: int
    rounds: int
    num_tokens: int


@dataclass(frozen=True, slots=True)
class Reply:
    text: str
    num_tokens: int
    first_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class OverheadMeasures:
    """Rates over all prompts of a round, from message to end. ratio: server over direct;
    decode_ratio: the same from the first token on.
    """

    server: Samples
    direct: Samples
    ratio: Ratio
    decode_ratio: Ratio
    server_ttft_ms: Samples  # of each reply
    direct_ttft_ms: Samples
    num_replies: int
    num_equal: int

    def headline(self) -> dict[str, Any]:
        ratios = {"ratio": self.ratio.value, "decode_ratio": self.decode_ratio.value}
        return ratios | {"num_equal": self.num_equal, "num_replies": self.num_replies}


@contextmanager
def run_server(path: Path, threads: int, *options: str, kind: str = "serve") -> Iterator[Endpoint]:
    """`draftree serve`, or another kind, on a free port, ready, and stopped afterwards."""
    command = [sys.executable, "-m", "draftree", kind, str(path.resolve())]
    with run_command(command, threads, *options, name=f"draftree {kind}") as endpoint:
        yield endpoint


@contextmanager
def run_llama_server(
    program: Path, path: Path, threads: int, slots: int = LLAMA_SLOTS, slot_ctx: int = _SLOT_CTX
) -> Iterator[Endpoint]:
    """llama.cpp's server, which computes so many sequences in one pass as it has slots."""
    command = [str(program.resolve()), "--host", "127.0.0.1", "--model", str(path.resolve())]
    command += "--alias", path.name  # else it is known by its path
    size = "--parallel", str(slots), "--ctx-size", str(slots * slot_ctx)
    with run_command(command, threads, *size, name=program.name) as endpoint:
        yield endpoint


def _find_port() -> int:
    """One that nobody has. Not of those that the kernel hands out, from 32768 on: another process
    of the server may be given it before the server listens.
    """
    for port in random.sample(range(20_000, 30_000), 100):
        with suppress(OSError), socket.create_server(("127.0.0.1", port)):
            return port
    raise BenchError("There is no free port between 20000 and 30000.")


@contextmanager
def run_command(
    command: Sequence[str], threads: int, *options: str, name: str
) -> Iterator[Endpoint]:
    """A server of anybody's, once /health says that it is ready."""
    port = _find_port()
    own = "--port", str(port), "--threads", str(threads), "--api-key", _KEY
    command = [*command, *own, *options]
    with tempfile.TemporaryFile() as errors:
        try:
            process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        except OSError as error:
            raise BenchError(f"`{name}` cannot be run: {error}.") from error
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + _START_S
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    errors.seek(0)
                    words = errors.read().decode("utf-8", "replace").splitlines()[-1:]
                    raise BenchError(f"`{name}` did not start: {''.join(words)}")
                time.sleep(_POLL_S)
            yield Endpoint(url, api_key=_KEY)
        finally:
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()


def _is_ready(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def measure_overhead(
    path: Path, prompts: Sequence[str], options: OverheadOptions, report: Report
) -> OverheadMeasures:
    report("loading both")
    with run_server(path, options.threads) as endpoint:
        model = endpoint.find_model()
        engine = Engine.open(str(path), threads=options.threads)
        try:
            served: list[list[Reply]] = []
            direct: list[list[Reply]] = []
            for number in range(options.rounds + 1):  # the first one warms up
                words = f"round {number} of {options.rounds}" if number else "warm-up"
                report(f"server and engine in turns: {words}")
                served.append([])
                direct.append([])
                for prompt in prompts:
                    # A number of its own, so that neither side has read it already.
                    text = f"{number}. {prompt}"
                    served[-1].append(_ask_server(endpoint, model, text, options.num_tokens))
                    time.sleep(_REST_S)
                    direct[-1].append(_ask_engine(engine, text, options.num_tokens))
                    engine.offload()  # as the server did
                    time.sleep(_REST_S)
        finally:
            engine.close()
    return summarize_replies(served[1:], direct[1:])


def _ask_server(endpoint: Endpoint, model: str, prompt: str, num_tokens: int) -> Reply:
    return read_reply(exchange(endpoint, chat_body(model, prompt, num_tokens)))


def exchange(endpoint: Endpoint, content: dict[str, Any]) -> list[tuple[float, bytes]]:
    """What came in answer to a request for a chat completion, and after how many seconds."""
    body, parts = json.dumps(content).encode(), urlsplit(endpoint.url)
    head = (
        f"POST /v1/chat/completions HTTP/1.1\r\nHost: {parts.netloc}\r\nConnection: close\r\n"
        f"Authorization: Bearer {endpoint.api_key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\n\r\n"
    )
    request, pieces = head.encode() + body, []
    address = parts.hostname, parts.port
    start = time.perf_counter()
    with socket.create_connection(address, _REPLY_S) as connection:
        connection.sendall(request)
        while piece := connection.recv(2**16):
            pieces.append((time.perf_counter() - start, piece))
    return pieces


class _Recorded:
    """Bytes that came, for a reader of sockets."""

    def __init__(self, data: bytes) -> None:
        self._data = data

    def makefile(self, mode: str) -> io.BytesIO:
        return io.BytesIO(self._data)


def read_reply(pieces: Sequence[tuple[float, bytes]]) -> Reply:
    data = b"".join(piece for _, piece in pieces)
    response = http.client.HTTPResponse(_Recorded(data))  # type: ignore[arg-type]
    response.begin()
    if response.status != 200:
        raise BenchError(f"The server refused: {response.read()[:_LAST_CHARACTERS]!r}.")
    events = list(read_events(iter(response.read().splitlines())))
    deltas = [choice["delta"] for event in events for choice in event.get("choices", ())]
    names = ("reasoning_content", "content")
    text = "".join(delta.get(name) or "" for delta in deltas for name in names)
    counts = [event["usage"]["completion_tokens"] for event in events if event.get("usage")]
    found = _TEXT.search(data)
    if not counts or found is None:
        raise BenchError(f"The server broke off: {data[-_LAST_CHARACTERS:]!r}.")
    ends = accumulate(len(piece) for _, piece in pieces)
    first_s = next(when for (when, _), end in zip(pieces, ends, strict=True) if end >= found.end())
    return Reply(text, counts[-1], first_s, pieces[-1][0])


def _ask_engine(engine: Engine, prompt: str, num_tokens: int) -> Reply:
    """As `draftree run --chat` does it."""
    start = time.perf_counter()
    first_s = 0.0
    generation = engine.generate(prompt, max_tokens=num_tokens, chat=True)
    for _ in generation:
        first_s = first_s or time.perf_counter() - start
    end_s = time.perf_counter() - start
    return Reply(generation.text, generation.usage.completion_tokens, first_s or end_s, end_s)


def divide_pairs(ours: Samples, theirs: Samples) -> Ratio:
    """The median over pairs, for differences smaller than what a machine's speed drifts by."""
    pairs = pairs_of(ours, theirs)
    return Ratio(round(median(pairs), 4), round(min(pairs), 4), round(max(pairs), 4))


def summarize_replies(
    served: Sequence[Sequence[Reply]], direct: Sequence[Sequence[Reply]]
) -> OverheadMeasures:
    """By round, in the order of the prompts."""

    def rate(replies: Sequence[Reply]) -> float:
        return sum(r.num_tokens for r in replies) / sum(r.end_s for r in replies)

    def decode_rate(replies: Sequence[Reply]) -> float:
        decoded_s = sum(r.end_s - r.first_s for r in replies)
        return sum(r.num_tokens - 1 for r in replies) / max(decoded_s, 1e-9)

    def first_ms(rounds: Sequence[Sequence[Reply]]) -> Samples:
        return summarize([1000 * r.first_s for replies in rounds for r in replies], "ms")

    sides = served, direct
    rates = [summarize([rate(replies) for replies in side], "tok/s") for side in sides]
    decoding = [summarize([decode_rate(replies) for replies in side], "tok/s") for side in sides]
    pairs = [
        (a, b)
        for ours, theirs in zip(served, direct, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return OverheadMeasures(
        server=rates[0],
        direct=rates[1],
        ratio=divide_pairs(*rates),
        decode_ratio=divide_pairs(*decoding),
        server_ttft_ms=first_ms(served),
        direct_ttft_ms=first_ms(direct),
        num_replies=len(pairs),
        num_equal=sum((a.text, a.num_tokens) == (b.text, b.num_tokens) for a, b in pairs),
    )
