"""The two ends of a worker process: each request is a line of JSON, and so is each answer.

A subject under test runs in a process of its own, so that neither disturbs the other. The worker's
side imports nothing but the standard library, so that another interpreter can run it.
"""

import contextlib
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Final

from draftree.errors import BenchError

_ROOT: Final = Path(__file__).parents[2]
_LAST_CHARACTERS: Final = 300


def serve(verbs: Mapping[str, Callable[..., Any]]) -> None:
    """Answer requests on stdin until it ends. What libraries print goes to stderr."""
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer = {"answer": verbs[request["verb"]](**request["arguments"])}
        except Exception as error:
            answer = {"error": f"{type(error).__name__}: {error}"}
        answers.write(json.dumps(answer) + "\n")
        answers.flush()


class Child:
    """A worker that runs a module of ours, with this interpreter or another one."""

    def __init__(self, module: str, name: str, python: str = sys.executable) -> None:
        self._name = name
        self._errors = tempfile.TemporaryFile()  # noqa: SIM115  (closed by close)
        try:
            self._process = subprocess.Popen(
                [python, "-m", module],
                cwd=_ROOT,  # where `-m` finds the package, whichever interpreter it is
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=self._errors,
                text=True,
                encoding="utf-8",
            )
        except OSError as error:
            raise BenchError(f"{name} could not be started with {python}: {error}.") from error

    def ask(self, verb: str, **arguments: Any) -> Any:
        """Do one thing and wait for its answer."""
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        try:
            self._process.stdin.write(json.dumps({"verb": verb, "arguments": arguments}) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
        except BrokenPipeError:
            line = ""
        if not line:
            status = self._process.wait()
            raise BenchError(f"{self._name} ended with status {status}: {self._last_words()}.")
        answer = json.loads(line)
        if "error" in answer:
            raise BenchError(f"{self._name} could not {verb}: {answer['error']}.")
        return answer["answer"]

    def close(self) -> None:
        if self._process.stdin is not None and not self._process.stdin.closed:
            with contextlib.suppress(BrokenPipeError):
                self._process.stdin.close()
        try:
            self._process.wait(timeout=5)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
        if self._process.stdout is not None:
            self._process.stdout.close()
        self._errors.close()

    def __enter__(self) -> "Child":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _last_words(self) -> str:
        self._errors.seek(0)
        lines = self._errors.read().decode("utf-8", "replace").strip().splitlines()
        return lines[-1][-_LAST_CHARACTERS:] if lines else "it said nothing"
