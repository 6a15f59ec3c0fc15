"""`python -m tests.serve.load`: many streams at a time, slow readers and clients that leave.

Starts a server of its own, either with an engine whose replies can be told from each other and take
the time of a real one's, or with --model, where replies are compared with those of a quiet server.
One client asks for more than it may have, and in the middle there is a crowd that the queue cannot
hold. Prints the figures as JSON, and writes them with --results; ends with 1 when a reply is lost
or mixed up, memory grows, or a client starves.
"""

import argparse
import asyncio
import json
import random
import re
import socket
import sys
import time
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median, quantiles

from draftree.bench.disturbance import look
from tests.serve.paced import QueueSize, Server, reply_to, run_server
from tests.serve.result import write_result

APIS = ("/v1/chat/completions", "/v1/messages", "/v1/responses")
SHARE_LEAVING, SHARE_SLOW = 0.3, 0.3
NUM_LIGHT = 8  # streams of each client, but for a greedy one that has a fifth of all, and more
NUM_CROWD = 10  # clients that come in the middle, all at once
PATIENCE_S = 600
NUM_PROMPTS, NUM_TOKENS = 24, 12  # of a real model
ENDS = ("[DONE]", "event: message_stop", "event: response.completed", "event: response.incomplete")


def size_queue(num_streams):
    """So that the greedy client asks for too much, and the crowd as well."""
    return QueueSize(num_streams * 5 // 4, max(num_streams // 5, NUM_LIGHT + 4))


@dataclass
class Tally:
    """What all streams saw."""

    outcomes: Counter = field(default_factory=Counter)
    faults: list = field(default_factory=list)
    waits: dict = field(default_factory=dict)  # seconds to the first word, by client
    refusals: Counter = field(default_factory=Counter)  # by status, all with Retry-After
    retry_s: list = field(default_factory=list)

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


class Refused(Exception):
    """The server is full, and says when to come back."""

    def __init__(self, status, retry_s):
        super().__init__(status)
        self.status, self.retry_s = status, retry_s


@dataclass
class Stream:
    """One of a client's streams: asks again and again until the time is over."""

    server: Server
    client: int
    number: int
    prompts: dict  # with their replies; empty for the paced engine
    tally: Tally

    def __post_init__(self):
        self.chance, self.num_asked = random.Random(self.number), 0

    async def run(self, end_s):
        while time.monotonic() < end_s:
            pause_s = await self.ask()
            await asyncio.sleep(max(min(pause_s, end_s - time.monotonic()), 0.0))

    async def ask(self):
        """Once; how long to wait before the next time."""
        self.num_asked += 1
        if self.prompts:
            prompt = self.chance.choice(list(self.prompts))
            expected, limit = self.prompts[prompt], NUM_TOKENS
        else:
            limit = self.chance.randint(8, 80)
            prompt = f"Say s{self.number}r{self.num_asked} {limit}"
            expected = reply_to(prompt)
        request = request_of(self.chance.choice(APIS), self.server.model, prompt, limit)
        try:
            await self.follow(request, expected)
        except Refused as refused:
            self.tally.refusals[refused.status] += 1
            self.tally.retry_s.append(refused.retry_s)
            return refused.retry_s
        return 0.0

    async def follow(self, request, expected):
        chance, start_s = self.chance, time.monotonic()
        is_slow = chance.random() < SHARE_SLOW
        leaves_at = chance.randint(0, len(expected)) if chance.random() < SHARE_LEAVING else None
        leaves_s = chance.uniform(0.0, 3.0) if leaves_at is not None and leaves_at % 2 else None
        reader, writer = await self.connect()
        try:
            writer.write(request)
            reading = self.read(reader, start_s, is_slow, leaves_at, expected)
            text = await asyncio.wait_for(reading, leaves_s or PATIENCE_S)
        except TimeoutError:
            if leaves_s is None:
                self.tally.faults.append(f"no end within {PATIENCE_S} s: {expected[:30]}")
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
            retry = re.search(rb"^retry-after: (\d+)", head, flags=re.MULTILINE | re.IGNORECASE)
            if retry and head.startswith((b"HTTP/1.1 429", b"HTTP/1.1 503")):
                raise Refused(int(head.split()[1]), int(retry[1]))
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
    num_greedy = size_queue(num_streams).max_per_client
    num_over = num_streams * 8 // 100  # that the greedy client may not have

    def new_stream(client, number):
        return Stream(server, client, number, prompts, tally)

    lasting = [new_stream(0, number) for number in range(num_greedy + num_over)]
    for number in range(num_streams - num_greedy):
        lasting.append(new_stream(1 + number // NUM_LIGHT, len(lasting)))
    first = lasting[-1].client + 1
    crowd = [new_stream(first + n % NUM_CROWD, 1000 + n) for n in range(num_streams // 2)]

    async def come_once():
        await asyncio.sleep(seconds / 2)
        await asyncio.gather(*(stream.ask() for stream in crowd))

    end_s = time.monotonic() + seconds
    running = asyncio.gather(come_once(), *(stream.run(end_s) for stream in lasting))
    while not running.done():
        rss_mb.append(server.rss_mb)
        with suppress(TimeoutError):
            await asyncio.wait_for(asyncio.shield(running), 1.0)
    await running
    return tally, rss_mb


def summarize(tally, rss_mb, num_streams):
    num_light = num_streams - size_queue(num_streams).max_per_client
    light = {c: tally.waits.get(c, []) for c in range(1, 1 + -(-num_light // NUM_LIGHT))}
    counts = [len(waits) for waits in light.values()]
    waits = sorted(wait for client in light.values() for wait in client)
    warm = len(rss_mb) // 4
    start_mb, end_mb = median(rss_mb[warm : warm + 5]), median(rss_mb[-5:])
    middle_s = median(waits)
    return {
        "num_streams": num_streams,
        "num_clients": len(tally.waits),
        "num_asked": tally.outcomes.total() + tally.refusals.total(),
        "outcomes": dict(tally.outcomes),
        "refusals": {str(status): count for status, count in sorted(tally.refusals.items())},
        "retry_after_s": [min(tally.retry_s), max(tally.retry_s)] if tally.retry_s else [],
        "num_faults": len(tally.faults),
        "faults": tally.faults[:5],
        "rss_mb": {
            "warm": round(start_mb, 1),
            "end": round(end_mb, 1),
            "growth": round(end_mb - start_mb, 1),
            "by_second": [round(value, 1) for value in rss_mb],
        },
        "wait_s": {
            "median": round(middle_s, 2),
            "ninth_decile": round(quantiles(waits, n=10)[-1], 2),
            "longest": round(waits[-1], 2),
            "longest_of_median": round(waits[-1] / middle_s, 2),
            "median_by_client": [
                round(median(each), 2) if each else None for each in light.values()
            ],
            "median_of_greedy": round(median(tally.waits.get(0, [0.0])), 2),
        },
        "served": {
            "by_client": counts,
            "most_of_least": round(max(counts) / max(min(counts), 1), 2),
            "greedy": len(tally.waits.get(0, ())),
        },
    }


async def learn_replies(server, count):
    """What the real model says to a few prompts when nobody else asks."""
    prompts = {f"Count from {7 * number} to {7 * number + 9}.": "" for number in range(count)}
    for prompt in prompts:
        stream = Stream(server, 0, 0, {}, Tally())
        reader, writer = await stream.connect()
        writer.write(request_of(APIS[0], server.model, prompt, NUM_TOKENS))
        content = await reader.read()
        lines = re.findall(rb"^data: (\{.*)$", content, flags=re.MULTILINE)
        prompts[prompt] = "".join(text_of(json.loads(line)) for line in lines)
        writer.close()
    assert len(set(prompts.values())) > count // 2
    return prompts


def measure(num_streams, seconds, model=None):
    async def run(server):
        prompts = await learn_replies(server, NUM_PROMPTS) if model else {}
        return await run_load(server, num_streams, seconds, prompts)

    with run_server(model, size_queue(num_streams)) as server:
        start_s = time.monotonic()
        figures = summarize(*asyncio.run(run(server)), num_streams)
        figures["seconds"] = round(time.monotonic() - start_s, 1)
        deadline_s = time.monotonic() + 120  # in which it notices the last who left
        while f"{server.count('queue_length') + server.count('running'):g}" != "0":
            assert time.monotonic() < deadline_s, "something is still in the queue"
        names = ("completion_tokens_total", "cancelled_total", "engine_failures_total")
        figures["server"] = {name: int(server.count(name)) for name in names}
        figures["server"]["acceptance_length"] = round(server.count("acceptance_length"), 2)
    return figures


def find_faults(figures, max_growth_mb=8.0):
    """What must not be."""
    faults = list(figures["faults"])
    if figures["rss_mb"]["growth"] > max_growth_mb:
        faults.append(f"memory grew by {figures['rss_mb']['growth']} MB")
    if figures["wait_s"]["longest_of_median"] > 3:
        faults.append(f"a client waited {figures['wait_s']}")
    if figures["served"]["most_of_least"] > 2:
        faults.append(f"clients were served unequally: {figures['served']}")
    if figures["server"]["engine_failures_total"]:
        faults.append("the engine failed")
    return faults


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--streams", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=120)
    parser.add_argument("--model")
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    before = look()
    figures = measure(options.streams, options.seconds, options.model)
    print(json.dumps(figures, ensure_ascii=False, indent=1))
    settings = {"streams": options.streams, "seconds": options.seconds, "model": options.model}
    if options.results:
        write_result(options.results, "load", settings, figures, before)
    max_growth_mb = 32.0 if options.model else 8.0
    sys.exit("\n".join(find_faults(figures, max_growth_mb)) or 0)


if __name__ == "__main__":
    main()
