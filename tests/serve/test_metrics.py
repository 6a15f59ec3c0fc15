"""The text that Prometheus reads."""

from draftree.core import RoundStats, Usage
from draftree.serve.metrics import Histogram, Metrics


def values(text):
    lines = [line for line in text.splitlines() if not line.startswith("#")]
    return {name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines)}


def test_histogram_counts_upwards():
    histogram = Histogram((1.0, 2.0))
    for value in (0.5, 1.0, 1.5, 9.0):
        histogram.observe(value)
    assert list(histogram.lines("x")) == [
        'x_bucket{le="1.0"} 2',
        'x_bucket{le="2.0"} 3',
        'x_bucket{le="+Inf"} 4',
        "x_sum 12.000000",
        "x_count 4",
    ]


def test_requests_replies_and_queue_are_counted():
    metrics = Metrics()
    metrics.count_request("/v1/models", 200, 0.5)
    metrics.count_request("/v1/models", 200, 0.5)
    metrics.count_request("/v1/models", 401, 0.5)
    rounds = RoundStats(num_rounds=4, num_drafted=12, num_accepted=6)
    usage = Usage(prompt_tokens=7, cached_tokens=2, completion_tokens=10, rounds=rounds)
    metrics.count_reply(usage, is_cancelled=False)
    metrics.count_reply(Usage(), is_cancelled=True)
    metrics.count_first_token(0.02)
    metrics.count_start(0.01)
    metrics.count_engine_failure()
    found = values(metrics.render(num_waiting=3, num_running=2, num_preempted=1, wait_s=2.5))
    expected = {
        'draftree_requests_total{route="/v1/models",status="200"}': 2,
        'draftree_requests_total{route="/v1/models",status="401"}': 1,
        "draftree_prompt_tokens_total": 7,
        "draftree_cached_tokens_total": 2,
        "draftree_completion_tokens_total": 10,
        "draftree_rounds_total": 4,
        "draftree_drafted_total": 12,
        "draftree_accepted_total": 6,
        "draftree_cancelled_total": 1,
        "draftree_engine_failures_total": 1,
        "draftree_acceptance_length": 2.5,
        "draftree_queue_length": 3,
        "draftree_running": 2,
        "draftree_queue_wait_seconds": 2.5,
        "draftree_preempted": 1,
        "draftree_ttft_seconds_count": 1,
        "draftree_queue_seconds_count": 1,
        "draftree_request_seconds_count": 3,
        "draftree_request_seconds_sum": 1.5,
    }
    assert {name: found[name] for name in expected} == expected


def test_every_value_has_a_type():
    text = Metrics().render(0, 0, 0)
    typed = {line.split()[2] for line in text.splitlines() if line.startswith("# TYPE")}
    for name in values(text):
        base = name.partition("{")[0]
        assert base in typed or base.rsplit("_", 1)[0] in typed
