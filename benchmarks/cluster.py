"""`draftree cluster` on this machine: two replicas against one, where conversations go, what is
lost when replicas are killed, and how long a start takes.

Replicas have one thread each, so that two of them take two cores. In: a model. Out: figures.
"""

import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final

from benchmarks.chaos import (
    ChaosMeasures,
    prepare_questions,
    read_health,
    read_metrics,
    run_chaos,
)
from benchmarks.cluster_clients import COUNTED, ClientRate, rate_clients, run_clients
from benchmarks.engines_alone import open_engines
from benchmarks.overhead import exchange, run_server
from draftree.bench.dataset import chat_prompts
from draftree.bench.http import Endpoint, ask, chat_body, read_events
from draftree.bench.median import Ratio, Report, Samples, divide, summarize
from draftree.bench.record import Json
from draftree.chat import Engine
from draftree.errors import BenchError

_START_S: Final = 900.0
_POLL_S: Final = 0.2
_CHAOS_PROMPTS, _CHAOS_TOKENS = 24, 24


@dataclass(frozen=True, slots=True)
class ClusterOptions:
    rounds: int = 3
    num_clients: int = 8
    num_requests: int = 8  # in a round, for each client
    num_tokens: int = 64
    alone_s: float = 12.0  # in a round, for one engine without a cluster and for two at once
    num_conversations: int = 50
    num_turns: int = 5
    num_streams: int = 200
    chaos_s: float = 180.0
    kill_s: float = 20.0
    num_replicas: int = 4  # of which one is killed at a time

    def settings(self) -> Json:
        return asdict(self) | {"counted": COUNTED}


@dataclass(frozen=True, slots=True)
class RoutingMeasures:
    num_conversations: int
    num_turns: int
    num_known: int
    hit_rate: float
    cached_share: float  # of the tokens of all prompts


@dataclass(frozen=True, slots=True)
class ClusterMeasures:
    first_token_s: Samples  # from the start of the process, kernels compiled
    one_replica: Samples  # in the windows of rate_clients
    two_replicas: Samples
    two_over_one: Ratio
    routing: RoutingMeasures
    chaos: ChaosMeasures
    whole_runs: Ratio | None = None  # two over one with the beginning and the end of each run
    windows_s: dict[str, Samples] | None = None  # by number of replicas
    alone_over_one: Ratio | None = None  # two engines at once over one, without a cluster
    turns: dict[str, Samples] | None = None  # rates by number of replicas, where no pass is shared
    turns_over_one: Ratio | None = None

    def headline(self) -> dict[str, Any]:
        return {
            "first_token_s": self.first_token_s.median,
            "two_over_one": self.two_over_one.value,
            "hit_rate": self.routing.hit_rate,
            "num_faults": self.chaos.num_faults,
        }


@contextmanager
def run_cluster(path: Path, num_replicas: int, *options: str) -> Iterator[Endpoint]:
    """All replicas ready, one thread each; stopped afterwards."""
    more = ("--replicas", str(num_replicas), "--allowed-host", "*", *options)
    with run_server(path, 1, *more, kind="cluster") as endpoint:
        deadline = time.monotonic() + _START_S
        while len(read_health(endpoint)["replicas"]) < num_replicas:
            if time.monotonic() > deadline:
                raise BenchError(f"{num_replicas} replicas were not ready in {_START_S:.0f} s.")
            time.sleep(_POLL_S)
        yield endpoint


def measure_cluster(
    path: Path, options: ClusterOptions, report: Report, kept: Json | None = None
) -> ClusterMeasures:
    """One replica and two take turns, each time in a cluster of their own, and with them engines
    without a cluster: a machine may be slower for minutes. kept: measures of another run, from
    which conversations and killed replicas are taken.
    """
    starts: list[float] = []
    runs: dict[int, list[ClientRate]] = {1: [], 2: []}
    alone: dict[int, list[float]] = {1: [], 2: []}
    turns: dict[int, list[float]] = {1: [], 2: []}
    routing = None if kept is None else RoutingMeasures(**kept["routing"])
    for number, num_replicas in product(range(1, options.rounds + 1), runs):
        report(f"cluster: {num_replicas}, round {number} of {options.rounds}")
        with open_engines(path, num_replicas, _questions(options), options.num_tokens) as engines:
            alone[num_replicas].append(engines.rate(options.alone_s))
        begin = time.perf_counter()
        with run_cluster(path, num_replicas) as endpoint:
            model = endpoint.find_model()
            first = ask(endpoint, model, "Hello", 1)
            starts.append(time.perf_counter() - begin - first.end_s + first.piece_s[0])
            runs[num_replicas].append(_measure_rate(endpoint, model, options))
            if routing is None and num_replicas == 2 and number == options.rounds:
                routing = _measure_routing(endpoint, model, options, report)
        with run_cluster(path, num_replicas, "--batching", "off") as endpoint:
            rate = _measure_rate(endpoint, endpoint.find_model(), options)
            turns[num_replicas].append(rate.rate)
    in_turns = {str(count): summarize(found, "tok/s") for count, found in turns.items()}
    assert routing is not None
    one, two = (summarize([run.rate for run in found], "tok/s") for found in runs.values())
    whole = [summarize([run.whole_rate for run in found], "tok/s") for found in runs.values()]
    return ClusterMeasures(
        first_token_s=summarize(starts, "s"),
        one_replica=one,
        two_replicas=two,
        two_over_one=divide(two, one),
        routing=routing,
        chaos=ChaosMeasures(**kept["chaos"]) if kept else measure_chaos(path, options, report),
        whole_runs=divide(whole[1], whole[0]),
        windows_s={
            str(count): summarize([run.window_s for run in found], "s")
            for count, found in runs.items()
        },
        alone_over_one=divide(*(summarize(alone[count], "tok/s") for count in (2, 1))),
        turns=in_turns,
        turns_over_one=divide(in_turns["2"], in_turns["1"]),
    )


def measure_chaos(path: Path, options: ClusterOptions, report: Report) -> ChaosMeasures:
    report("cluster: what a single engine writes")
    prompts = [f"{number}. {text}" for number, text in enumerate(_prompts(_CHAOS_PROMPTS))]
    engine = Engine.open(str(path), threads=1)
    try:
        questions = prepare_questions(engine, path.stem, prompts, _CHAOS_TOKENS)
    finally:
        engine.close()
    # All streams are one client here, which a replica would refuse when others are being started.
    room = ("--queue-per-client", str(options.num_streams), "--queue", str(options.num_streams))
    with run_cluster(path, options.num_replicas, *room) as endpoint:
        return run_chaos(
            endpoint,
            questions,
            options.num_streams,
            options.num_replicas,
            options.chaos_s,
            options.kill_s,
            report,
        )


def _prompts(count: int) -> Sequence[str]:
    own = chat_prompts()
    return [own[number % len(own)] for number in range(count)]


def _questions(options: ClusterOptions) -> list[str]:
    """Of all clients in a round; no two begin alike."""
    prompts = _prompts(options.num_clients * options.num_requests)
    return [f"{number} {prompt}" for number, prompt in enumerate(prompts)]


def _measure_rate(endpoint: Endpoint, model: str, options: ClusterOptions) -> ClientRate:
    bodies = [chat_body(model, text, options.num_tokens) for text in _questions(options)]
    warm = [chat_body(model, text, 8) for text in _prompts(options.num_clients)]
    return rate_clients(run_clients(partial(exchange, endpoint), warm, bodies))


def _measure_routing(
    endpoint: Endpoint, model: str, options: ClusterOptions, report: Report
) -> RoutingMeasures:
    before = read_metrics(endpoint)

    def converse(number: int) -> None:
        messages = []
        for turn in range(options.num_turns):
            content = f"Conversation {number}: question {turn}, please answer briefly."
            messages.append({"role": "user", "content": content})
            body = {"model": model, "messages": messages, "max_tokens": 8, "stream": True}
            pieces = [
                choice["delta"].get("content") or ""
                for event in read_events(endpoint.request("POST", "chat/completions", body))
                for choice in event["choices"]
            ]
            messages.append({"role": "assistant", "content": "".join(pieces)})

    report("cluster: conversations")
    with ThreadPoolExecutor(options.num_clients) as pool:
        list(pool.map(converse, range(options.num_conversations)))
    after = read_metrics(endpoint)

    def count(name: str) -> float:
        return after[f"draftree_{name}_total"] - before[f"draftree_{name}_total"]

    # Every turn but a conversation's first has a beginning that was read.
    num_later = options.num_conversations * (options.num_turns - 1)
    return RoutingMeasures(
        options.num_conversations,
        options.num_turns,
        num_known=round(count("known")),
        hit_rate=round(count("hits") / num_later, 4),
        cached_share=round(count("cached_tokens") / count("prompt_tokens"), 4),
    )
