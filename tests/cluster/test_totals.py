"""Metrics of several replicas together."""

from draftree.cluster.message import Report
from draftree.cluster.totals import Totals
from draftree.core import Usage
from draftree.serve.metrics import Metrics


def report(name, *, statuses=(), num_tokens=0, num_rounds=0, num_waiting=0):
    metrics = Metrics()
    for status in statuses:
        metrics.count_request("/v1/messages", status, 0.3)
    usage = Usage(completion_tokens=num_tokens)
    usage.rounds.num_rounds = num_rounds
    metrics.count_reply(usage, is_cancelled=False)
    return Report(name, metrics.render(num_waiting, 1, 0), {})


def values_of(text):
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    pairs = dict(line.rsplit(" ", 1) for line in lines)
    assert len(pairs) == len(lines)  # no name twice
    return {name: float(value) for name, value in pairs.items()}


def test_one_replica_is_its_own_sum():
    one = report("a", statuses=(200, 404), num_tokens=7, num_rounds=2, num_waiting=3)
    text = Totals().render([one])
    assert values_of(text) == values_of(one.metrics)
    heads = [line for line in text.splitlines() if line.startswith("#")]
    assert heads == [line for line in one.metrics.splitlines() if line.startswith("#")]


def test_counts_and_gauges_are_added_and_rates_are_not():
    values = values_of(
        Totals().render(
            [
                report("a", statuses=(200, 200), num_tokens=30, num_rounds=10, num_waiting=2),
                report("b", statuses=(200, 429), num_tokens=10, num_rounds=10, num_waiting=1),
            ]
        )
    )
    assert values['draftree_requests_total{route="/v1/messages",status="200"}'] == 3
    assert values['draftree_requests_total{route="/v1/messages",status="429"}'] == 1
    assert (values["draftree_queue_length"], values["draftree_running"]) == (3, 2)
    assert values["draftree_acceptance_length"] == 2.0
    assert values["draftree_request_seconds_count"] == 4
    assert values['draftree_request_seconds_bucket{le="0.5"}'] == 4


def test_counts_of_replicas_that_are_gone_stay():
    totals = Totals()
    totals.render([report("a", num_tokens=30, num_rounds=10, num_waiting=5), report("b")])
    for _ in range(2):
        values = values_of(totals.render([report("b", num_tokens=2, num_rounds=2)]))
        assert values["draftree_completion_tokens_total"] == 32
        assert values["draftree_queue_length"] == 0
        assert values["draftree_running"] == 1
    assert totals.render([]).count("draftree_completion_tokens_total 32") == 1
