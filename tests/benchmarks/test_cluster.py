"""What is measured of a cluster, on a server that stands for one."""

from contextlib import contextmanager
from dataclasses import asdict, replace

import pytest

from benchmarks import cluster
from benchmarks.cluster import ClusterOptions, measure_cluster
from benchmarks.cluster_command import keep_settings, read_kept
from benchmarks.section_cluster import cluster as describe
from draftree.bench.http import Endpoint
from draftree.bench.record import ModelId, identify_model, make_record, write_record
from draftree.chat import Engine
from draftree.errors import BenchError
from tests.benchmarks import example
from tests.cluster.local import LocalPool, new_ingress
from tests.serve.conftest import wait_for
from tests.tiny import tiny_path


@contextmanager
def run_local(path, num_replicas, *options):
    """Replicas and their ingress in this process, behind a socket."""
    import threading

    import uvicorn

    def open_engine():
        return Engine.open(str(path), threads=1, device="cpu")

    pool = LocalPool(*[open_engine] * num_replicas, model_id=path.stem)
    config = uvicorn.Config(new_ingress(pool), port=0, log_config=None, lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run)
    thread.start()
    wait_for(lambda: server.started)
    try:
        port = server.servers[0].sockets[0].getsockname()[1]
        yield Endpoint(f"http://127.0.0.1:{port}")
    finally:
        server.should_exit = True
        thread.join(60)
        pool.close()


OPTIONS = ClusterOptions(
    rounds=1,
    num_clients=2,
    num_requests=6,
    num_tokens=8,
    alone_s=0.2,
    num_conversations=3,
    num_turns=2,
    num_streams=4,
    chaos_s=0.5,
    kill_s=60.0,
)


def test_all_figures(monkeypatch):
    monkeypatch.setattr(cluster, "run_cluster", run_local)
    said = []
    measures = measure_cluster(tiny_path("llama"), OPTIONS, said.append)
    assert measures.one_replica.median > 0 and measures.two_replicas.median > 0
    assert measures.windows_s["1"].low > 0 and measures.whole_runs.value > 0
    assert (measures.routing.num_known, measures.routing.hit_rate) == (3, 1.0)
    assert 0 < measures.routing.cached_share < 1
    assert measures.alone_over_one.value > 0 and measures.turns_over_one.value > 0
    assert measures.chaos.num_faults == 0, measures.chaos.faults
    assert measures.chaos.num_whole > 0 and measures.chaos.num_kills == 0
    assert measures.headline()["hit_rate"] == 1.0 and len(said) > 3
    assert said[:2] == ["cluster: 1, round 1 of 1", "cluster: 2, round 1 of 1"]
    assert len(measures.first_token_s.samples) == 2


def test_other_figures_can_be_kept(monkeypatch, tmp_path):
    """The record says of when they are, also when they are kept again."""
    monkeypatch.setattr(cluster, "run_cluster", run_local)
    path = tiny_path("llama")
    model, said = identify_model(path), []
    with pytest.raises(BenchError, match="which is not there"):
        read_kept(tmp_path, model)
    old = make_record("cluster", model, ClusterOptions().settings(), example.cluster(), 0.0)
    old["timestamp"] = "2026-11-18T22:09:43+00:00"
    write_record(tmp_path, old)
    kept = read_kept(tmp_path, model)
    measures = measure_cluster(path, OPTIONS, said.append, kept["measures"])
    assert asdict(measures.routing) == kept["measures"]["routing"]
    assert asdict(measures.chaos) == kept["measures"]["chaos"]
    assert measures.one_replica.samples != example.cluster().one_replica.samples
    assert len(said) == 2
    settings = OPTIONS.settings() | keep_settings(kept)
    assert (settings["num_tokens"], settings["chaos_s"], settings["num_turns"]) == (8, 180.0, 5)
    assert settings["kept"]["timestamp"] == old["timestamp"]
    again = make_record("cluster", model, settings, measures, 0.0)
    assert keep_settings(again)["kept"] == settings["kept"]
    assert "of an earlier run, of 2026-11-18." in describe(again)[-1]


def test_nothing_is_kept_of_another_model_or_machine(tmp_path):
    model = ModelId("tiny", "tiny.gguf", 1, "abc")
    record = make_record("cluster", model, ClusterOptions().settings(), example.cluster(), 0.0)
    write_record(tmp_path, record)
    with pytest.raises(BenchError, match="of another model"):
        read_kept(tmp_path, replace(model, sha256="def"))
    write_record(tmp_path, record | {"machine": record["machine"] | {"cpu": "another"}})
    with pytest.raises(BenchError, match="different machines"):
        read_kept(tmp_path, model)


def test_the_page_says_what_is_counted():
    new = example.record("cluster")
    note = describe(new)[-1]
    assert "(20 s with one replica, 12 s with two)" in note and "end give 1.90." in note
    assert "earlier run" not in note
    assert "have 1.95 times the rate of one (1.95 to 1.95), so replicas reach 97 %" in note
    assert "(`--batching off`), two have 1.90 times the rate of one (19" in note
    older = {**new, "settings": {k: v for k, v in new["settings"].items() if k != "counted"}}
    assert "Rates are of whole runs" in describe(older)[-1]
