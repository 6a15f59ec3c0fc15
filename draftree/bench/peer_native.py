"""llama.cpp as its user built it, for instance for this very CPU: its own `llama-bench`.

In: the program's path. Out: milliseconds of the same tasks, and what the build says of itself. The
program makes up its token ids; it warms up before it counts.
"""

import json
import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from draftree.errors import BenchError

_LAST_CHARACTERS: Final = 300


class NativeBuild:
    """description is what the last run said: commit, build number, backends."""

    def __init__(self, program: Path, model: Path, threads: int) -> None:
        self._command = [str(program.expanduser()), "-m", str(model.resolve()), "-o", "json"]
        self._command += ["-t", str(threads), "-r", "1", "-ngl", "0"]
        self.description: dict[str, str] = {}

    def decode(self, ids: Sequence[int], num_tokens: int) -> float:
        """Milliseconds of num_tokens decoded tokens after a prompt of as many as ids."""
        return self._measure("-p", "0", "-n", str(num_tokens), "-d", str(len(ids)))

    def prefill(self, ids: Sequence[int]) -> float:
        return self._measure("-p", str(len(ids)), "-n", "0")

    def _measure(self, *options: str) -> float:
        program = self._command[0]
        try:
            result = subprocess.run([*self._command, *options], capture_output=True, text=True)
        except OSError as error:
            raise BenchError(f"{program} could not be started: {error.strerror}.") from error
        if result.returncode != 0:
            words = (result.stderr.strip().splitlines() or ["it said nothing"])[-1]
            raise BenchError(
                f"{program} ended with status {result.returncode}: {words[-_LAST_CHARACTERS:]}"
            )
        milliseconds, self.description = read_output(result.stdout, program)
        return milliseconds


def read_output(text: str, program: str) -> tuple[float, dict[str, str]]:
    """The milliseconds of the only run in what `llama-bench -o json` printed, and its build."""
    try:
        (run,) = json.loads(text)
        (nanoseconds,) = run["samples_ns"]
        names = ("build_commit", "build_number", "backends", "cpu_info")
        return nanoseconds / 1e6, {name: str(run[name]) for name in names}
    except (ValueError, KeyError, TypeError) as error:
        raise BenchError(
            f"{program} did not print the JSON of one run; is it `llama-bench`?"
        ) from error
