"""`draftree serve` with the default model, in a process of its own."""

import os
import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

import httpx2

from tests.serve.conftest import wait_for

ROOT = Path(__file__).parents[2]
MODEL = "smollm2-135m"


class Process:
    """`draftree serve` in a process of its own; what it says is kept."""

    def __init__(self, *options):
        command = [sys.executable, "-m", "draftree", "serve", MODEL, "--port", "0", *options]
        self.process = subprocess.Popen(
            [*command, "--max-ctx", "2048"], cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        self.lines = []
        self._reader = threading.Thread(target=lambda: self.lines.extend(self.process.stderr))
        self._reader.start()
        wait_for(lambda: self._find() or self.process.poll() is not None, 600)
        assert self.process.poll() is None, "".join(self.lines)
        self.url = self._find()

    def _find(self):
        found = re.search(r"is ready at (\S+)", "".join(self.lines))
        return found and found[1]

    def stop(self):
        if self.process.poll() is None:
            os.kill(self.process.pid, signal.SIGTERM)
        status = self.process.wait(120)
        self._reader.join(120)
        return status


def read_metric(server, name):
    headers = {"Authorization": "Bearer one"}
    text = httpx2.get(f"{server.url}/metrics", headers=headers).text
    return float(re.search(rf"^{re.escape(name)} (\S+)$", text, flags=re.MULTILINE)[1])
