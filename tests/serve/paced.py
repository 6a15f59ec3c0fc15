"""Servers to put under load: `python -m tests.serve.paced` has an engine whose replies can be told
from each other and take the time of a real one's; `run_server` starts it, or a real one.
"""

import argparse
import random
import re
import subprocess
import sys
import time
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import NamedTuple
from urllib.request import urlopen

from draftree.core import FinishReason
from draftree.serve.server import bind, serve
from draftree.serve.service import ServeOptions
from tests.serve import fake

ROOT = Path(__file__).parents[2]


class QueueSize(NamedTuple):
    """What a server may hold."""

    max_jobs: int
    max_per_client: int

    @property
    def arguments(self):
        sizes = map(str, self)
        return [*chain(*zip(("--queue", "--queue-per-client"), sizes, strict=True))]


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


def run_paced_server(queue):
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]
    options = ServeOptions("paced", max_queue=queue.max_jobs, max_per_client=queue.max_per_client)
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

    def ask(self, path):
        with urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=120) as response:
            return response.read().decode()

    def count(self, name):
        """A figure of /metrics."""
        return float(re.search(rf"^draftree_{name} (\S+)$", self.ask("/metrics"), re.MULTILINE)[1])


@contextmanager
def run_server(model, queue):
    """In a process of its own, whose memory is nobody else's."""
    command = [sys.executable, "-m", "tests.serve.paced"]
    if model:
        command = [sys.executable, "-m", "draftree", "serve", model, "--port", "0"]
        command += ["--max-ctx", "512"]
    command += queue.arguments
    process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, text=True)
    try:
        lines = iter(process.stderr.readline, "")
        found = next(found for line in lines if (found := re.search(r"ready at .*:(\d+)", line)))
        drain = subprocess.Popen(["cat"], stdin=process.stderr, stdout=subprocess.DEVNULL)
        yield Server(process, int(found[1]), model or "paced")
        process.terminate()
        assert process.wait(120) == 0
        drain.wait(120)
    finally:
        process.kill()
        process.wait()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--queue", type=int, required=True)
    parser.add_argument("--queue-per-client", type=int, required=True)
    options = parser.parse_args()
    run_paced_server(QueueSize(options.queue, options.queue_per_client))


if __name__ == "__main__":
    main()
