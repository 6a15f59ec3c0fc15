"""`python -m tests.serve.fuzz`: requests made up from the OpenAPI schema, right and wrong ones, and
right ones in which parts were replaced.

Against a server of its own in a process of its own, with a real, tiny engine. Prints how often
which status came back, and writes it with --results. The first reply that is not as it should be
ends it, with the request in its shortest form.
"""

import argparse
import contextlib
import json
import random
import re
import subprocess
import sys
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from copy import deepcopy
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import requests
import schemathesis
from hypothesis import HealthCheck, Phase, given, seed, settings
from hypothesis.errors import Unsatisfiable
from schemathesis.core.errors import InvalidSchema

from draftree.bench.disturbance import look
from tests.serve.conftest import run_brief_server
from tests.serve.result import write_result

RIGHT, WRONG = schemathesis.GenerationMode.POSITIVE, schemathesis.GenerationMode.NEGATIVE
PATIENCE_S = 100
BATCH = 25
AT_A_TIME = 8
HI = [{"role": "user", "content": "hi"}]
TOOL = {"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}
TALK = [*HI, {"role": "assistant", "content": "Hello"}, *HI]
BODIES = {
    "/v1/chat/completions": {
        "messages": TALK,
        "tools": [TOOL],
        "response_format": {"type": "json_object"},
        "grammar": None,
        "stop": ["x"],
        "stream": False,
        "logit_bias": {"5": 1.0},
        "timings_per_token": True,
        "return_progress": True,
        "reasoning": {"effort": "low"},
    },
    "/v1/chat/completions/input_tokens": {"messages": TALK, "tools": [TOOL]},
    "/v1/responses/input_tokens": {"input": TALK, "instructions": "Be brief."},
    "/v1/completions": {"prompt": "hi", "grammar": 'root ::= "a" [0-9]+', "logprobs": 2},
    "/v1/responses": {
        "input": TALK,
        "instructions": "Be brief.",
        "stream": True,
        "max_tokens": 2,
        "timings_per_token": True,
        "return_progress": True,
    },
    "/v1/messages": {"messages": TALK, "max_tokens": 2, "system": "x", "stop_sequences": ["y"]},
    "/v1/messages/count_tokens": {"messages": TALK},
    "/v1/embeddings": {"input": ["a", "b"], "encoding_format": "base64"},
    "/api/chat": {"messages": TALK, "tools": [TOOL], "options": {"seed": 1}, "format": "json"},
    "/api/generate": {"prompt": "hi", "options": {"num_predict": 2, "stop": ["x"]}, "raw": True},
    "/api/embed": {"input": ["a"], "truncate": True},
    "/api/embeddings": {"prompt": "a"},
    "/api/show": {"model": "fake"},
    "/tokenize": {"content": "hello", "with_pieces": True},
    "/detokenize": {"tokens": [1, 2, 3]},
    "/apply-template": {"messages": TALK},
}
ODD = (
    *(None, True, False, 0, -1, 1, 2**31, 2**63, -(2**63), 2**70, 0.5, -0.0, 1e308, "", " ", "x"),
    *("\x00", "\ud800", "🌳" * 50, "a" * 3000, [], {}, [[]], [{}], {"": ""}, [None], ["", 1, []]),
    *("<think>", "</think>", "<|im_end|>", "<tool_call>", "%", "{", "root ::= root", "data: x\n\n"),
)


@dataclass
class Found:
    """What came back, and how soon."""

    statuses: Counter = field(default_factory=Counter)  # by path and status
    times_s: list = field(default_factory=list)

    @property
    def figures(self):
        by_status = Counter()
        for (_, status), count in self.statuses.items():
            by_status[str(status)] += count
        by_path = {}
        for (path, status), count in sorted(self.statuses.items()):
            by_path.setdefault(path, {})[str(status)] = count
        return {
            "num_cases": self.statuses.total(),
            "statuses": dict(sorted(by_status.items())),
            "paths": by_path,
            "num_failed": sum(n for (_, status), n in self.statuses.items() if status >= 500),
            "num_hung": sum(time_s > PATIENCE_S for time_s in self.times_s),
            "slowest_s": round(max(self.times_s), 2),
        }


def operations(server, mode):
    """Every endpoint. Right requests name the right model; wrong ones have bodies to get wrong."""
    document = deepcopy(requests.get(f"{server.url}/openapi.json", timeout=120).json())
    for schema in document["components"]["schemas"].values():
        if mode is RIGHT and "model" in schema.get("properties", {}):
            schema["properties"]["model"] = {"enum": ["fake"]}
    loaded = schemathesis.openapi.from_dict(document)
    loaded.config.update(base_url=server.url)
    found = [result.ok() for result in loaded.get_all_operations()]
    return [each for each in found if mode is RIGHT or each.method == "post"]


def fuzz(server, mode, num_each, number, found):
    """Send so many generated requests to each endpoint, and check every reply."""
    with requests.Session() as session:

        def send(case):
            start_s = time.monotonic()
            response = case.call(session=session, timeout=6 * PATIENCE_S)
            found.times_s.append(time.monotonic() - start_s)
            found.statuses[case.operation.path, response.status_code] += 1
            check(response)

        for operation in operations(server, mode):
            strategy = operation.as_strategy(generation_mode=mode)
            for start in range(0, num_each, BATCH):
                send_batch(send, strategy, min(BATCH, num_each - start), number + start)
    check_health(server)


def send_batch(send, strategy, count, number):
    limits = settings(
        max_examples=count,
        database=None,
        deadline=None,
        phases=[Phase.generate, Phase.shrink],
        suppress_health_check=list(HealthCheck),
    )
    # There may be nothing to choose, or a schema that was made wrong may allow nothing at all.
    with contextlib.suppress(Unsatisfiable, InvalidSchema):
        seed(number)(limits(given(case=strategy)(send)))()


def replace_parts(value, rng):
    """The same, with some parts replaced, left out or repeated."""
    if rng.random() < 0.12:
        return rng.choice(ODD)
    if isinstance(value, dict):
        pairs = [(name, replace_parts(each, rng)) for name, each in value.items()]
        pairs = [pair for pair in pairs if rng.random() > 0.05]
        return dict(pairs) | (
            {rng.choice(("x", "n", "seed")): rng.choice(ODD)} if rng.random() < 0.1 else {}
        )
    if isinstance(value, list):
        return [replace_parts(each, rng) for each in value for _ in range(rng.choice((1, 1, 1, 2)))]
    return value


def damage(raw, rng):
    """Bytes of a request, now and then cut or with others in their place."""
    if rng.random() < 0.85:
        return raw
    at = rng.randrange(len(raw))
    return raw[:at] if rng.random() < 0.5 else raw[:at] + rng.randbytes(3) + raw[at + 1 :]


def fuzz_bodies(server, num_each, number, found):
    """Send right requests with parts replaced to each endpoint, several at a time, and check every
    reply.
    """
    rng = random.Random(number)
    bodies = [
        (path, damage(json.dumps(replace_parts(body, rng)).encode(), rng))
        for path, body in BODIES.items()
        for _ in range(num_each)
    ]
    with requests.Session() as session, ThreadPoolExecutor(AT_A_TIME) as pool:
        for path, status, time_s in pool.map(partial(send_body, server, session), bodies):
            found.times_s.append(time_s)
            found.statuses[path, status] += 1
    check_health(server)


def send_body(server, session, request):
    path, raw = request
    start_s = time.monotonic()
    headers = {"content-type": "application/json"}
    response = session.post(server.url + path, data=raw, headers=headers, timeout=6 * PATIENCE_S)
    time_s = time.monotonic() - start_s
    try:
        check(response)
    except Exception as error:
        raise AssertionError(f"{path} {raw!r}: {response.text[:500]}") from error
    return path, response.status_code, time_s


def check_health(server):
    """Nothing is left of all that was sent, and the engine never failed."""
    health = requests.get(f"{server.url}/health", timeout=120).json()
    assert health == {"status": "ok", "model": "fake", "queue": 0, "running": 0}
    metrics = requests.get(f"{server.url}/metrics", timeout=120).text
    assert re.search(r"^draftree_engine_failures_total 0(\.0)?$", metrics, re.MULTILINE), metrics


def check(response):
    assert response.status_code < 500, response.text
    assert response.headers["x-request-id"]
    if response.status_code >= 400:
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]  # as Ollama writes it
        assert len(message) > 10 and message.endswith(".")
        assert isinstance(error, str) or "type" in error
    elif "text/event-stream" in str(response.headers["content-type"]):
        assert "engine_failure" not in response.text
        assert response.text.endswith("\n\n")
    elif "application/x-ndjson" in str(response.headers["content-type"]):
        assert json.loads(response.text.splitlines()[-1])["done"] is True


class Child:
    """A server in a process of its own, whose memory can be told."""

    def __init__(self):
        command = [sys.executable, "-m", "tests.serve.fuzz", "--serve"]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.url = self._process.stdout.readline().decode().strip()

    @property
    def rss_mb(self):
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return round(int(re.search(r"VmRSS:\s+(\d+)", status)[1]) / 1024, 1)

    def stop(self):
        self._process.communicate(timeout=120)


def serve():
    """Conversations that are kept take memory as they are meant to; here they soon take all they
    may, so that what grows is a leak.
    """
    with run_brief_server(prefix_bytes=2**22) as server:
        print(server.url, flush=True)
        sys.stdin.read()


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=250, help="of right and of wrong ones")
    parser.add_argument("--replaced", type=int, default=500, help="right ones with replaced parts")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--results", type=Path)
    parser.add_argument("--serve", action="store_true", help="only the server, until stdin ends")
    options = parser.parse_args()
    if options.serve:
        serve()
        return
    before, found, server = look(), Found(), Child()
    try:
        fuzz_bodies(server, options.replaced // 4, options.seed, found)
        warm_mb = server.rss_mb
        fuzz_bodies(server, options.replaced - options.replaced // 4, options.seed + 2, found)
        fuzz(server, RIGHT, options.each, options.seed, found)
        fuzz(server, WRONG, options.each, options.seed + 1, found)
        figures = {**found.figures, "rss_mb": {"warm": warm_mb, "end": server.rss_mb}}
    finally:
        server.stop()
    print(json.dumps(figures, indent=1))
    if options.results:
        asked = {"each": options.each, "replaced": options.replaced, "seed": options.seed}
        write_result(options.results, "fuzz", asked, figures, before)


if __name__ == "__main__":
    main()
