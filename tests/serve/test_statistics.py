"""What replies cost, as the APIs show it."""

from types import SimpleNamespace

from draftree.core import Compression, Usage
from draftree.serve.statistics import statistics


def test_compression_is_summed_over_the_replies_of_a_request():
    def job(compression):
        usage = Usage(compression=compression)
        return SimpleNamespace(usage=usage, first_s=None, started_s=None, arrived_s=0.0)

    first = Compression(1, 0, 4, 5000, 1200, 250.0, 100.0, 120.0, 30.0)
    jobs = [job(first), job(Compression(1, 1, 4, 5000, 1200))]
    assert statistics([job(None)])["compression"] is None
    assert statistics(jobs)["compression"] == {
        "texts": 2,
        "cached_texts": 1,
        "spans": 8,
        "tokens_before": 10000,
        "tokens_kept": 2400,
        "tokens_dropped": 7600,
        "score_ms": 250.0,
        "load_ms": 100.0,
        "read_ms": 120.0,
        "select_ms": 30.0,
    }
