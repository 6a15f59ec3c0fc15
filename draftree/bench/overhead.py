"""What serving costs: replies of `draftree serve` beside those of an engine in this process.

The same chat prompts go to both in turns, greedily, with the same settings; each counts from the
message to the last piece of text. The server is a process of its own, as it is for its users.
"""

import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from draftree.bench.fault import BenchError
from draftree.bench.http import Endpoint, ask
from draftree.bench.sample import Ratio, Report, Samples, divide_pairs, summarize
from draftree.chat import Engine

_START_S: Final = 180.0
_POLL_S: Final = 0.1
_STOP_S: Final = 20.0
_REST_S: Final = 0.05  # in which a server copies its last conversation away
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
    """Rates over all prompts of a round, from message to end. ratio: server over direct."""

    server: Samples
    direct: Samples
    ratio: Ratio
    server_ttft_ms: Samples  # of each reply
    direct_ttft_ms: Samples
    num_replies: int
    num_equal: int


@contextmanager
def run_server(path: Path, threads: int) -> Iterator[Endpoint]:
    """`draftree serve` on a free port, ready, and stopped afterwards."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    command = [
        *(sys.executable, "-m", "draftree", "serve", str(path.resolve())),
        *("--port", str(port), "--threads", str(threads), "--api-key", _KEY),
    ]
    with tempfile.TemporaryFile() as errors:
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=errors)
        try:
            url = f"http://127.0.0.1:{port}"
            deadline = time.monotonic() + _START_S
            while not _is_ready(url):
                if process.poll() is not None or time.monotonic() > deadline:
                    errors.seek(0)
                    words = errors.read().decode("utf-8", "replace").splitlines()[-1:]
                    raise BenchError(f"`draftree serve` did not start: {''.join(words)}")
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
        finally:
            engine.close()
    return summarize_replies(served[1:], direct[1:])


def _ask_server(endpoint: Endpoint, model: str, prompt: str, num_tokens: int) -> Reply:
    reply = ask(endpoint, model, prompt, num_tokens)
    if not reply.is_counted:
        raise BenchError("The server did not say how many tokens its reply has.")
    return Reply(reply.text, reply.num_tokens, reply.piece_s[0], reply.end_s)


def _ask_engine(engine: Engine, prompt: str, num_tokens: int) -> Reply:
    """As `draftree run --chat` does it."""
    start = time.perf_counter()
    first_s = 0.0
    generation = engine.generate(prompt, max_tokens=num_tokens, chat=True)
    for _ in generation:
        first_s = first_s or time.perf_counter() - start
    end_s = time.perf_counter() - start
    return Reply(generation.text, generation.usage.completion_tokens, first_s or end_s, end_s)


def summarize_replies(
    served: Sequence[Sequence[Reply]], direct: Sequence[Sequence[Reply]]
) -> OverheadMeasures:
    """By round, in the order of the prompts."""

    def rate(replies: Sequence[Reply]) -> float:
        return sum(r.num_tokens for r in replies) / sum(r.end_s for r in replies)

    def first_ms(rounds: Sequence[Sequence[Reply]]) -> Samples:
        return summarize([1000 * r.first_s for replies in rounds for r in replies], "ms")

    rates = [summarize([rate(replies) for replies in side], "tok/s") for side in (served, direct)]
    pairs = [
        (a, b)
        for ours, theirs in zip(served, direct, strict=True)
        for a, b in zip(ours, theirs, strict=True)
    ]
    return OverheadMeasures(
        server=rates[0],
        direct=rates[1],
        ratio=divide_pairs(*rates),
        server_ttft_ms=first_ms(served),
        direct_ttft_ms=first_ms(direct),
        num_replies=len(pairs),
        num_equal=sum((a.text, a.num_tokens) == (b.text, b.num_tokens) for a, b in pairs),
    )
