"""What is measured of a cluster, on a server that stands for one."""

from contextlib import contextmanager

from benchmarks import cluster
from benchmarks.cluster import ClusterOptions, measure_cluster
from draftree.bench.http import Endpoint
from draftree.chat import Engine
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


def test_all_figures(monkeypatch):
    monkeypatch.setattr(cluster, "run_cluster", run_local)
    options = ClusterOptions(
        rounds=1,
        num_clients=2,
        num_requests=1,
        num_tokens=4,
        num_conversations=3,
        num_turns=2,
        num_streams=4,
        chaos_s=0.5,
        kill_s=60.0,
    )
    said = []
    measures = measure_cluster(tiny_path("llama"), options, said.append)
    assert measures.one_replica.median > 0 and measures.two_replicas.median > 0
    assert (measures.routing.num_known, measures.routing.hit_rate) == (3, 1.0)
    assert 0 < measures.routing.cached_share < 1
    assert measures.chaos.num_faults == 0, measures.chaos.faults
    assert measures.chaos.num_whole > 0 and measures.chaos.num_kills == 0
    assert measures.headline()["hit_rate"] == 1.0 and len(said) > 3
    assert said[:2] == ["cluster: 1, round 1 of 1", "cluster: 2, round 1 of 1"]
    assert len(measures.first_token_s.samples) == 2
