"""`python -m tests.serve.growth`: whether memory grows under generated requests, and what of it is
the prefix cache.

The same requests to a server that keeps no conversations and to one with the default bound. Writes
results/serve/checks/growth.json: memory, and what the cache holds of it, after every batch.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

from draftree.bench.disturbance import look
from tests.serve.conftest import run_brief_server
from tests.serve.fuzz import BODIES, Child, Found, fuzz_bodies
from tests.serve.result import write_result

ROOT = Path(__file__).parents[2]
NAME = "growth"
BOUNDS = {"no cache": {"prefix_bytes": 0}, "default": {}}


class TellingChild(Child):
    """Says how much its prefix cache holds, too."""

    def __init__(self, bound):
        command = [sys.executable, "-m", "tests.serve.growth", "--serve", bound]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.url = self._read()

    def _read(self):
        return self._process.stdout.readline().decode().strip()

    @property
    def kept_mb(self):
        self._process.stdin.write(b"\n")
        self._process.stdin.flush()
        return round(int(self._read()) / 2**20, 1)


def serve(bound):
    with run_brief_server(**BOUNDS[bound]) as server:
        print(server.url, flush=True)
        for _ in sys.stdin:
            print(server.service.check_ready().tokens.kept_bytes, flush=True)


def measure(bound, num_batches, num_each):
    found, child, samples = Found(), TellingChild(bound), []
    try:
        for number in range(num_batches):
            fuzz_bodies(child, num_each, number, found)
            num_requests = found.statuses.total()
            sample = {"requests": num_requests, "rss_mb": child.rss_mb, "kept_mb": child.kept_mb}
            samples.append(sample)
            print(bound, json.dumps(sample), flush=True)
    finally:
        child.stop()
    return {"num_failed": found.figures["num_failed"], "samples": samples}


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--batches", type=int, default=24)
    parser.add_argument("--each", type=int, default=60, help="requests to an endpoint in a batch")
    parser.add_argument("--results", type=Path, default=ROOT / "results")
    parser.add_argument("--serve", choices=BOUNDS, help="only the server, until stdin ends")
    options = parser.parse_args()
    if options.serve:
        serve(options.serve)
        return
    before = look()
    measures = {bound: measure(bound, options.batches, options.each) for bound in BOUNDS}
    asked = {"batches": options.batches, "each": options.each, "endpoints": len(BODIES)}
    write_result(options.results, NAME, asked, measures, before)


if __name__ == "__main__":
    main()
