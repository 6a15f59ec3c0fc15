"""Many streams over replicas that are killed one after another: is any reply lost, or mixed up?

In: a cluster's endpoint, and requests with the texts that a single engine writes. Out: what the
clients saw. Some leave in the middle, all others must get their text to the letter.
"""

import json
import os
import random
import signal
import threading
import time
import urllib.request
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import dataclass
from http.client import HTTPException
from typing import Any, Final

from draftree.bench.http import Endpoint, read_events
from draftree.bench.median import Report
from draftree.chat import Engine
from draftree.core import SamplingParams
from draftree.errors import BenchError

_SHARE_LEAVING: Final = 0.3
_REFUSALS: Final = (429, 503)
_REST_S: Final = 1.0  # after a refusal
_SHOWN: Final = 12


@dataclass(frozen=True, slots=True)
class Question:
    """What is asked, and what a single engine answers."""

    body: dict[str, Any]
    text: str


@dataclass(frozen=True, slots=True)
class ChaosMeasures:
    num_streams: int
    num_replicas: int
    seconds: float
    num_whole: int
    num_left: int
    num_kills: int
    num_repeats: int
    num_refused: int  # asked for more than all replicas take, before anything was written
    num_faults: int  # replies that were lost or another text
    faults: list[str]


def prepare_questions(
    engine: Engine, model: str, prompts: Sequence[str], num_tokens: int
) -> list[Question]:
    """Every second one is sampled."""
    questions = []
    for number, prompt in enumerate(prompts):
        messages = [{"role": "user", "content": prompt}]
        sampling = SamplingParams(temperature=0.8 * (number % 2), seed=number)
        reply = engine.chat(messages, max_tokens=num_tokens, sampling=sampling)
        body = {"model": model, "messages": messages, "max_tokens": num_tokens, "stream": True}
        body |= {"temperature": sampling.temperature, "seed": number}
        text = "".join(delta.text for delta in reply)
        # Halves of characters that are no text come over the wire as this.
        questions.append(Question(body, text.encode("utf-8", "replace").decode()))
    return questions


class Chaos:
    """What the streams of one run share."""

    def __init__(self, endpoint: Endpoint, questions: Sequence[Question], seconds: float) -> None:
        self._endpoint, self._questions = endpoint, questions
        self._end_s = time.monotonic() + seconds
        self._lock = threading.Lock()
        self.counts: Counter[str] = Counter()
        self.faults: list[str] = []

    def end(self) -> None:
        """Let no stream ask again."""
        self._end_s = 0.0

    def run_stream(self, number: int) -> None:
        chance = random.Random(number)
        while time.monotonic() < self._end_s:
            question = chance.choice(self._questions)
            is_leaving = chance.random() < _SHARE_LEAVING
            limit = chance.randint(0, 10) if is_leaving else None
            try:
                self._note(self._ask(question, limit))
            except BenchError as error:  # the status is not 200
                is_refused = any(f"answered {status} " in str(error) for status in _REFUSALS)
                self._note("refused" if is_refused else "fault", "" if is_refused else str(error))
                time.sleep(_REST_S)
            except (OSError, HTTPException, ValueError) as error:
                self._note("fault", f"{type(error).__name__}: {error}")

    def _ask(self, question: Question, limit: int | None) -> str:
        """limit: pieces after which the client leaves."""
        text, num_pieces, reason = "", 0, None
        answer = self._endpoint.request("POST", "chat/completions", question.body)
        with closing(answer) as response:
            for event in read_events(response):
                if "error" in event:
                    raise ValueError(str(event["error"]))
                for choice in event["choices"]:
                    text += choice["delta"].get("content") or ""
                    reason = choice["finish_reason"] or reason
                num_pieces += 1
                if limit is not None and num_pieces > limit:
                    break
        is_right = text == question.text if reason else question.text.startswith(text)
        if not is_right or (reason is None and limit is None):
            raise ValueError(f"{text!r} instead of {question.text!r} ({reason})")
        return "left" if limit is not None else "whole"

    def _note(self, outcome: str, fault: str = "") -> None:
        with self._lock:
            self.counts[outcome] += 1
            self.faults += [fault] if fault else []

    def kill_replicas(self, every_s: float, report: Report) -> None:
        chance = random.Random(0)
        while time.monotonic() + every_s < self._end_s:
            time.sleep(every_s)
            replicas = read_health(self._endpoint)["replicas"]
            if len(replicas) > 1:
                victim = chance.choice(replicas)
                os.kill(victim["pid"], signal.SIGKILL)
                self._note("kill")
                report(f"killed {victim['name']} of {len(replicas)} replicas")


def run_chaos(
    endpoint: Endpoint,
    questions: Sequence[Question],
    num_streams: int,
    num_replicas: int,
    seconds: float,
    every_s: float,
    report: Report,
) -> ChaosMeasures:
    chaos = Chaos(endpoint, questions, seconds)
    with ThreadPoolExecutor(num_streams + 1) as pool:
        killer = pool.submit(chaos.kill_replicas, every_s, report)
        list(pool.map(chaos.run_stream, range(num_streams)))
        killer.result()
    return ChaosMeasures(
        num_streams,
        num_replicas,
        seconds,
        num_whole=chaos.counts["whole"],
        num_left=chaos.counts["left"],
        num_kills=chaos.counts["kill"],
        num_repeats=int(read_metrics(endpoint)["draftree_repeats_total"]),
        num_refused=chaos.counts["refused"],
        num_faults=len(chaos.faults),
        faults=list(dict.fromkeys(chaos.faults))[:_SHOWN],
    )


def read_health(endpoint: Endpoint) -> dict[str, Any]:
    health: dict[str, Any] = json.loads(_get(endpoint, "/health"))
    return health


def read_metrics(endpoint: Endpoint) -> dict[str, float]:
    """Values by name and labels."""
    lines = _get(endpoint, "/metrics").splitlines()
    pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
    return {name: float(value) for name, value in pairs}


def _get(endpoint: Endpoint, path: str) -> str:
    headers = {"Authorization": f"Bearer {endpoint.api_key}"}
    request = urllib.request.Request(endpoint.url + path, headers=headers)
    with urllib.request.urlopen(request, timeout=60) as answer:
        return str(answer.read().decode())
