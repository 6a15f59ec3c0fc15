"""`draftree cluster`: what was typed becomes an application of Ray Serve."""

import socket
import sys
from dataclasses import asdict
from types import ModuleType, SimpleNamespace

import pytest
import yaml

from draftree.cli import cluster
from tests.needs import needs_package


@pytest.fixture
def deployed(monkeypatch):
    """What would be deployed, on a Ray that has 8 cores; nothing of Ray is imported."""
    found = SimpleNamespace(address="none", is_stopped=False, error=None)
    module = ModuleType("draftree.cluster.deploy")

    def connect(address, num_cpus):
        found.address, found.num_cpus = address, num_cpus
        return {"CPU": 8.0}

    def start(options, scale, host, port, *, is_local):
        if found.error is not None:
            raise found.error
        found.options, found.scale, found.listen = options, scale, (host, port)
        found.is_local = is_local

    module.ClusterOptions = lambda model, engine, server: SimpleNamespace(
        model=model, engine=engine, server=server
    )
    module.connect, module.start = connect, start
    module.stop = lambda: setattr(found, "is_stopped", True)
    monkeypatch.setitem(sys.modules, "draftree.cluster.deploy", module)
    monkeypatch.setattr("draftree.cluster.deploy", module, raising=False)
    monkeypatch.setattr(cluster, "require_packages", lambda *_: None)
    monkeypatch.setattr(cluster, "_wait", lambda: None)
    return found


def test_without_ray_the_command_is_named(draftree, monkeypatch):
    monkeypatch.setattr("draftree.errors.find_spec", lambda name: None)
    result = draftree("cluster", "smollm2-135m")
    sentence = "error: draftree cluster needs ray; run `pip install 'draftree[cluster]'`."
    assert (result.exit_code, result.stderr.strip()) == (1, sentence)


def test_options(draftree, deployed):
    result = draftree(
        *("cluster", "models/some.gguf", "--replicas", "2", "--port", "9000", "--api-key", "a"),
        *("--alias", "x", "--temperature", "0.5", "--trust-proxy", "10.0.0.1", "--cors", "*"),
        *("--draft", "none", "--max-ctx", "77", "--parallel", "3"),
        *("--queue", "9", "--queue-per-client", "5"),
    )
    assert result.exit_code == 0, result.stderr
    options = deployed.options
    engine = {"draft": "none", "max_ctx": 77, "parallel": 3, "threads": 4}
    assert (options.model, options.engine) == ("models/some.gguf", engine)
    server = options.server
    assert (server["model_id"], server["aliases"], server["api_keys"]) == ("some", ("x",), ("a",))
    assert (server["temperature"], server["trusted_proxies"]) == (0.5, ("10.0.0.1",))
    assert (server["max_queue"], server["max_per_client"]) == (9, 5)
    assert (deployed.scale.num_min, deployed.scale.num_max) == (2, 2)
    assert deployed.listen == ("127.0.0.1", 9000) and deployed.address is None
    assert deployed.is_local
    assert "some is ready at http://127.0.0.1:9000\n" in result.stderr
    assert deployed.is_stopped


def test_https_is_for_one_machine(draftree, deployed, monkeypatch, tmp_path):
    monkeypatch.setattr("draftree.serve.server.check_tls", lambda cert, key: None)
    monkeypatch.chdir(tmp_path)
    result = draftree("cluster", "--tls-cert", "a.pem", "--tls-key", "b.pem")
    assert result.exit_code == 0 and "ready at https://127.0.0.1:8000\n" in result.stderr
    server = deployed.options.server
    files = str(tmp_path / "a.pem"), str(tmp_path / "b.pem")
    assert (server["tls_cert"], server["tls_key"]) == files
    result = draftree("cluster", "--address", "auto", "--tls-cert", "a.pem")
    assert result.exit_code == 2 and "put a proxy before a Ray cluster" in result.stderr


@pytest.mark.parametrize(
    "host, url", [("0.0.0.0", "127.0.0.1"), ("::", "127.0.0.1"), ("::1", "[::1]")]
)
def test_where_it_is_found(draftree, deployed, host, url):
    result = draftree("cluster", "--address", "auto", "--host", host)
    assert f"ready at http://{url}:8000\n" in result.stderr


def test_on_a_cluster_it_goes_on_without_us(draftree, deployed):
    result = draftree("cluster", "--address", "auto", "--host", "0.0.0.0")
    assert result.exit_code == 0, result.stderr
    assert deployed.address == "auto" and not (deployed.is_stopped or deployed.is_local)
    assert (deployed.scale.num_min, deployed.scale.num_max) == (1, 2)
    assert "http://127.0.0.1:8000" in result.stderr


def test_a_file_is_found_from_everywhere(draftree, deployed, tmp_path, monkeypatch):
    (tmp_path / "model.gguf").touch()
    monkeypatch.chdir(tmp_path)
    assert draftree("cluster", "model.gguf").exit_code == 0
    assert deployed.options.model == str(tmp_path / "model.gguf")


def test_what_ray_cannot_start_is_one_sentence(draftree, deployed):
    deployed.error = RuntimeError("Deploying application draftree failed: no GPU.")
    result = draftree("cluster", "--replicas", "2")
    assert result.exit_code == 1 and deployed.is_stopped
    assert "could not start the replicas" in result.stderr and "no GPU" in result.stderr
    assert "Traceback" not in result.stderr


def test_a_wrong_number_is_refused_before_ray_starts(draftree, deployed):
    result = draftree("cluster", "--replicas", "many")
    assert result.exit_code == 1 and "--replicas" in result.stderr
    assert deployed.address == "none"


def test_a_taken_port_is_refused_before_ray_starts(draftree, deployed):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        result = draftree("cluster", "--port", port)
        assert result.exit_code == 1 and "choose another --port" in result.stderr
        assert deployed.address == "none"
        assert draftree("cluster", "--port", port, "--address", "auto").exit_code == 0


@needs_package("ray")
def test_the_printed_file_is_what_ray_takes(draftree):
    from ray.serve.schema import ServeDeploySchema

    from draftree.cluster import deploy

    result = draftree(
        *("cluster", "some", "--replicas", "3", "--threads", "2", "--gpus", "0", "--print-config")
    )
    assert result.exit_code == 0, result.stderr
    config = yaml.safe_load(result.stdout)
    schema = ServeDeploySchema(**config)
    (application,) = schema.applications
    assert application.args["model"] == "some" and application.args["engine"] == {"threads": 2}
    (replica,) = application.deployments
    assert (replica.name, replica.num_replicas) == ("replica", 3)
    assert deploy.build(application.args) is not None
    again = deploy.ClusterOptions(**application.args)
    assert asdict(again) == config["applications"][0]["args"]
