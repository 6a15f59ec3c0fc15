"""`python -m tests.serve.fuzz`: requests made up from the OpenAPI schema, right and wrong ones.

Against a server of its own with a real, tiny engine. Prints how often which status came back, and
writes it with --results. The first reply that is not as it should be ends it, with the request in
its shortest form.
"""

import argparse
import contextlib
import json
import time
from collections import Counter
from copy import deepcopy
from dataclasses import dataclass, field
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
PATIENCE_S = 20
BATCH = 25


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
    """Send so many made-up requests to each endpoint, and check every reply."""
    with requests.Session() as session:

        def send(case):
            start_s = time.monotonic()
            response = case.call(session=session, timeout=6 * PATIENCE_S)
            found.times_s.append(time.monotonic() - start_s)
            found.statuses[case.operation.path, response.status_code] += 1
            check(response)
            assert server.service.thread.num_failures == 0, case.body

        for operation in operations(server, mode):
            strategy = operation.as_strategy(generation_mode=mode)
            for start in range(0, num_each, BATCH):
                send_batch(send, strategy, min(BATCH, num_each - start), number + start)
        assert session.get(f"{server.url}/health", timeout=120).json() == {
            "status": "ok",
            "model": "fake",
            "queue": 0,
            "running": 0,
        }
    assert server.service.queue.num_admitted == 0


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


def check(response):
    assert response.status_code < 500, response.text
    assert response.headers["x-request-id"]
    if response.status_code >= 400:
        error = response.json()["error"]
        message = error if isinstance(error, str) else error["message"]  # as Ollama writes it
        assert len(message) > 10 and message.endswith(".")
        assert isinstance(error, str) or "type" in error
    elif response.headers["content-type"][0].startswith("text/event-stream"):
        assert "engine_failure" not in response.text
        assert response.text.endswith("\n\n")


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--each", type=int, default=250, help="of right and of wrong ones")
    parser.add_argument("--seed", type=int, default=3)
    parser.add_argument("--results", type=Path)
    options = parser.parse_args()
    before, found = look(), Found()
    with run_brief_server() as server:
        fuzz(server, RIGHT, options.each, options.seed, found)
        fuzz(server, WRONG, options.each, options.seed + 1, found)
    print(json.dumps(found.figures, indent=1))
    if options.results:
        asked = {"each": options.each, "seed": options.seed}
        write_result(options.results, "fuzz", asked, found.figures, before)


if __name__ == "__main__":
    main()
