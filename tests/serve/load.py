"""`python -m tests.serve.load`: many streams at a time, slow readers and clients that leave.

Starts a server of its own, either with an engine whose replies can be told from each other and take
the time of a real one's, or with --model, where replies are compared with those of a quiet server.
Prints the figures as JSON; ends with 1 when a reply is lost or mixed up, memory grows, or a client
starves.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import subprocess
import sys
import time
from collections import Counter
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median

from draftree.core import FinishReason
from draftree.serve.server import bind, serve
from draftree.serve.service import ServeOptions
from tests.serve import fake

ROOT = Path(__file__).parents[2]
APIS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
SHARE_LEAVING, SHARE_SLOW = 0.3, 0.3
NUM_LIGHT = 10  # streams of each client, but for a greedy one that has a fifth of all
ENDS = ("[DONE]", "event: message_stop", "event: response.completed", "event: response.incomplete")


class PacedGeneration(fake.Generation):
    """Rounds of several tokens, which take as long as on a GPU."""

    def __iter__(self):
        pace = random.Random(self._pieces[0])
        rest = list(self._pieces)
        while rest and not self._is_cancelled.is_set():
            time.sleep(pace.uniform(0.004, 0.012))
            num_tokens = pace.randint(1, 6)
            self.usage.rounds.num_rounds += 1
            for piece in rest[:num_tokens]:
                self.usage.completion_tokens += 1
                yield fake.Delta(piece)
            del rest[:num_tokens]
            self._on_round()
        self.finish_reason = FinishReason.CANCELLED if rest else FinishReason.STOP

    def close(self):
        """Is not written down, as the fake's are: the server's memory is what counts."""
        self.finish_reason = self.finish_reason or FinishReason.CANCELLED


class PacedEngine(fake.Engine):
    def __init__(self):
        super().__init__(max_ctx=10_000)

    def _start(self, length, options, prompt):
        pieces = reply_to(prompt[0]["content"]).split(" ")
        return PacedGeneration(self, None, [f"{piece} " for piece in pieces[:-1]], 0.0)


def reply_to(prompt):
    """What the paced engine says: its name for the prompt, counted."""
    name, count = prompt.split()[-2:]
    return "".join(f"{name}·{number} " for number in range(int(count)))


def run_paced_server():
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    options = ServeOptions(model_id="paced")
    serve(PacedEngine, options, listener, lambda: print(f"is ready at :{port}", file=sys.stderr))


@dataclass
class Server:
    process: subprocess.Popen
    port: int
    model: str

    @property
    def rss_mb(self):
        text = Path(f"/proc/{self.process.pid}/status").read_text()
        return int(re.search(r"VmRSS:\s+(\d+)", text)[1]) / 1024


@contextmanager
def run_server(model):
    """In a process of its own, whose memory is nobody else's."""
    command = [sys.executable, "-m", "tests.serve.load", "--serve"]
    if model:
        command = [sys.executable, "-m", "draftree", "serve", model, "--port", "0"]
        command += ["--max-ctx", "512"]
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        found = next(found for line in lines if (found := re.search(r"ready at .*:(\d+)", line)))
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield Server(process, int(found[1]), model or "paced")
        process.terminate()
        assert process.wait(30) == 0
        drain.wait(10)
    finally:
        process.kill()
        process.wait()


@dataclass
class Tally:
    """What all streams saw."""

    outcomes: Counter = field(default_factory=Counter)
    faults: list = field(default_factory=list)
    waits: dict = field(default_factory=dict)  # seconds to the first word, by client

    def served(self, client, wait_s):
        self.waits.setdefault(client, []).append(wait_s)


def request_of(api, model, prompt, max_tokens):
    body = {"model": model, "stream": True, "temperature": 0}
    limit = "max_output_tokens" if api == "/v1/responses" else "max_tokens"
    messages = [{"role": "user", "content": prompt}]
    body |= {limit: max_tokens, "input" if api == "/v1/responses" else "messages": messages}
    content = json.dumps(body).encode()
    head = f"POST {api} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n"
    return f"{head}Connection: close\r\nContent-Length: {len(content)}\r\n\r\n".encode() + content


def text_of(event):
    """What an event of any API adds to the reply's text."""
    if event.get("choices"):
        return event["choices"][0]["delta"].get("content") or ""
    if event.get("type") == "content_block_delta":
        return event["delta"].get("text", "")
    return event["delta"] if event.get("type") == "response.output_text.delta" else ""


@dataclass
class Stream:
    """One of a client's streams: asks again and again until the time is over."""

    server: Server
    client: int
    number: int
    prompts: dict  # with their replies; empty for the paced engine
    tally: Tally

    async def run(self, end_s):
        self.chance = random.Random(self.number)
        count = 0
        while time.monotonic() < end_s:
            count += 1
            if self.prompts:
                prompt = self.chance.choice(list(self.prompts))
                expected, limit = self.prompts[prompt], 16
            else:
                limit = self.chance.randint(8, 80)
                prompt = f"Say s{self.number}r{count} {limit}"
                expected = reply_to(prompt)
            api = self.chance.choice(APIS)
            await self.ask(request_of(api, self.server.model, prompt, limit), expected)

    async def ask(self, request, expected):
        chance, start_s = self.chance, time.monotonic()
        is_slow = chance.random() < SHARE_SLOW
        leaves_at = chance.randint(0, len(expected)) if chance.random() < SHARE_LEAVING else None
        leaves_s = chance.uniform(0.0, 3.0) if leaves_at is not None and leaves_at % 2 else None
        reader, writer = await self.connect()
        try:
            writer.write(request)
            reading = self.read(reader, start_s, is_slow, leaves_at, expected)
            text = await asyncio.wait_for(reading, leaves_s or 300)
        except TimeoutError:
            if leaves_s is None:
                self.tally.faults.append(f"no end within 300 s: {expected[:30]}")
            self.tally.outcomes["left while waiting"] += 1
            return
        except (OSError, ValueError, LookupError) as error:
            self.tally.faults.append(f"{type(error).__name__}: {error}")
            return
        finally:
            writer.transport.abort()
        if leaves_at is not None:
            self.tally.outcomes["left while reading"] += 1
        else:
            self.tally.outcomes["slow, whole" if is_slow else "whole"] += 1
            if text != expected:
                self.tally.faults.append(f"{text!r} instead of {expected!r}")

    async def connect(self):
        """Each client has an address of its own, and little room for what it has not read."""
        own = socket.socket()
        own.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        own.setblocking(False)
        own.bind((f"127.0.0.{self.client + 2}", 0))
        await asyncio.get_running_loop().sock_connect(own, ("127.0.0.1", self.server.port))
        return await asyncio.open_connection(sock=own, limit=2**16)

    async def read(self, reader, start_s, is_slow, leaves_at, expected):
        """The reply's text, or its beginning for a client that leaves."""
        text, unread, is_ended = "", b"", False
        head = await reader.readuntil(b"\r\n\r\n")
        if not head.startswith(b"HTTP/1.1 200"):
            rest = await reader.read(500)
            raise ValueError(f"{head[:20]!r} {rest[:300]!r}")
        while True:
            data = await reader.read(400 if is_slow else 65_536)
            if not data:
                break
            if is_slow:
                await asyncio.sleep(0.02)
            *events, unread = (unread + data).split(b"\n\n")
            for event in events:
                event = event.decode()
                found = re.search(r"^data: (\{.*)$", event, flags=re.MULTILINE)
                is_ended = is_ended or any(end in event for end in ENDS)
                if found and '"error":{' in found[1]:
                    raise ValueError(found[1][:300])
                piece = text_of(json.loads(found[1])) if found else ""
                if piece and not text:
                    self.tally.served(self.client, time.monotonic() - start_s)
                text += piece
            if not expected.startswith(text):
                raise ValueError(f"{text!r} is not how {expected!r} begins")
            if leaves_at is not None and len(text) >= leaves_at:
                return text
        if not is_ended:
            raise ValueError(f"broken off after {text!r}")
        return text


async def run_load(server, num_streams, seconds, prompts):
    """Streams of many clients until the time is over, then until the last reply has come."""
    tally, rss_mb = Tally(), []
    num_greedy = num_streams // 5
    end_s = time.monotonic() + seconds
    streams = [
        Stream(server, max(0, 1 + (number - num_greedy) // NUM_LIGHT), number, prompts, tally)
        if number >= num_greedy
        else Stream(server, 0, number, prompts, tally)
        for number in range(num_streams)
    ]
    running = asyncio.gather(*(stream.run(end_s) for stream in streams))
    while not running.done():
        rss_mb.append(server.rss_mb)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running), 1.0)
    await running
    return tally, rss_mb


def summarize(tally, rss_mb, num_streams, seconds):
    light = {c: waits for c, waits in tally.waits.items() if c > 0}
    counts = {client: len(waits) for client, waits in light.items()}
    waits = sorted(wait for client in light.values() for wait in client)
    warm = len(rss_mb) // 4
    start_mb, end_mb = median(rss_mb[warm : warm + 5]), median(rss_mb[-5:])
    return {
        "streams": num_streams,
        "seconds": seconds,
        "clients": len(tally.waits),
        "outcomes": dict(tally.outcomes),
        "replies_begun": sum(map(len, tally.waits.values())),
        "faults": tally.faults[:5],
        "num_faults": len(tally.faults),
        "rss_mb": {"warm": round(start_mb, 1), "end": round(end_mb, 1)},
        "rss_series_mb": [round(value, 1) for value in rss_mb[:: max(1, len(rss_mb) // 12)]],
        "rss_growth_mb": round(end_mb - start_mb, 1),
        "wait_s": {
            "median": round(median(waits), 2),
            "longest": round(waits[-1], 2),
            "longest_of_median": round(waits[-1] / median(waits), 2),
        },
        "served": {
            "greedy": len(tally.waits.get(0, ())),
            "least": min(counts.values()),
            "most": max(counts.values()),
            "most_of_least": round(max(counts.values()) / min(counts.values()), 2),
        },
    }


async def learn_replies(server, count):
    """What the real model says to a few prompts when nobody else asks."""
    prompts = {f"Count from {7 * number} to {7 * number + 9}.": "" for number in range(count)}
    for prompt in prompts:
        stream = Stream(server, 0, 0, {}, Tally())
        reader, writer = await stream.connect()
        writer.write(request_of(APIS[0], server.model, prompt, 16))
        content = await reader.read()
        lines = re.findall(rb"^data: (\{.*)$", content, flags=re.MULTILINE)
        prompts[prompt] = "".join(text_of(json.loads(line)) for line in lines)
        writer.close()
    assert len(set(prompts.values())) > count // 2
    return prompts


def measure(num_streams, seconds, model=None):
    async def run(server):
        prompts = await learn_replies(server, 12) if model else {}
        return await run_load(server, num_streams, seconds, prompts)

    with run_server(model) as server:
        tally, rss_mb = asyncio.run(run(server))
    return summarize(tally, rss_mb, num_streams, seconds)


def find_faults(figures, max_growth_mb=8.0):
    """What must not be."""
    faults = list(figures["faults"])
    if figures["rss_growth_mb"] > max_growth_mb:
        faults.append(f"memory grew by {figures['rss_growth_mb']} MB")
    if figures["wait_s"]["longest_of_median"] > 3:
        faults.append(f"a client waited {figures['wait_s']}")
    if figures["served"]["most_of_least"] > 2:
        faults.append(f"clients were served unequally: {figures['served']}")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--serve", action="store_true", help="be the server")
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--model")
    options = parser.parse_args()
    if options.serve:
        run_paced_server()
        return
    figures = measure(options.streams, options.seconds, options.model)
    print(json.dumps(figures, ensure_ascii=False, indent=1))
    sys.exit("\n".join(find_faults(figures)) or 0)


if __name__ == "__main__":
    main()
