"""`draftree serve`: what was typed becomes options, an engine and a socket."""

import pytest


@pytest.fixture
def served(monkeypatch):
    """What the server was started with; the model is opened, and then it is ready."""
    from draftree.serve import server

    found = {}

    def serve(open_engine, options, listener, on_ready):
        found.update(engine=open_engine(), options=options, address=listener.getsockname())
        on_ready()
        listener.close()

    monkeypatch.setattr(server, "serve", serve)
    return found


def test_options(draftree, engine, served, monkeypatch):
    result = draftree(
        *("serve", "models/some.gguf", "--port", "0", "--host", "localhost", "--api-key", "a"),
        *(
            "--api-key",
            "b",
            "--alias",
            "x",
            "--temperature",
            "0.5",
            "--cors",
            "*",
            "--allowed-host",
            "a.example",
        ),
        *("--queue", "7", "--queue-per-client", "3", "--max-body", "2", "--grace", "1.5"),
        *("--log-prompts", "--draft", "none", "--budget", "5", "--max-ctx", "77"),
        *("--parallel", "3"),
    )
    assert result.exit_code == 0, result.stderr
    options = served["options"]
    assert (options.model_id, options.aliases) == ("some", ("x",))
    assert (options.api_keys, options.cors_origins) == (("a", "b"), ("*",))
    assert options.allowed_hosts == ("localhost", "a.example")
    assert (options.temperature, options.grace_s, options.log_prompts) == (0.5, 1.5, True)
    assert (options.max_queue, options.max_per_client, options.max_body_bytes) == (7, 3, 2 * 2**20)
    ((model, config),) = engine.opened
    assert model == "models/some.gguf"
    assert (config.draft, config.budget, config.max_ctx) == ("none", 5, 77)
    assert config.parallel == 3 and config.warm_up


def test_other_models_and_tls(draftree, engine, served, tmp_path, monkeypatch):
    from draftree.serve import server

    draftree("serve", "smollm2-135m", "--port", "0")
    assert served["options"].any_model is True
    draftree("serve", "smollm2-135m", "--port", "0", "--no-any-model")
    assert served["options"].any_model is False
    result = draftree("serve", "smollm2-135m", "--port", "0", "--tls-key", "x")
    assert "--tls-key needs --tls-cert" in result.stderr
    result = draftree("serve", "smollm2-135m", "--port", "0", "--tls-cert", str(tmp_path / "x"))
    assert "no such file" in result.stderr
    monkeypatch.setattr(server, "check_tls", lambda cert, key: None)
    result = draftree("serve", "smollm2-135m", "--port", "0", "--tls-cert", "a", "--tls-key", "b")
    assert (served["options"].tls_cert, served["options"].tls_key) == ("a", "b")
    assert "https://127.0.0.1:" in result.stderr


def test_says_where_and_how_to_connect(draftree, engine, served):
    result = draftree("serve", "-m", "smollm2-135m", "--port", "0")
    port = served["address"][1]
    assert result.stdout == ""
    assert f"smollm2-135m is ready at http://127.0.0.1:{port}\n" in result.stderr
    assert f"base URL http://127.0.0.1:{port}/v1" in result.stderr
    assert "curl " in result.stderr
    assert served["options"].model_id == "smollm2-135m"


def test_key_from_the_environment(draftree, engine, served, monkeypatch):
    monkeypatch.setenv("DRAFTREE_API_KEY", "secret")
    result = draftree("serve", "--port", "0")
    assert served["options"].api_keys == ("secret",)
    assert "Bearer KEY" in result.stderr
    assert "secret" not in result.stderr


@pytest.mark.parametrize("keys", [[""], [" "], ["good", ""]])
def test_an_empty_key_is_refused(draftree, engine, served, keys):
    """A variable that is not set would else open the server to everyone."""
    result = draftree(
        "serve", "--port", "0", *(word for key in keys for word in ("--api-key", key))
    )
    assert result.exit_code == 2
    assert "the API key is empty; leave --api-key out" in result.stderr
    assert served == {}


def test_an_empty_key_of_the_environment_is_none(draftree, engine, served, monkeypatch):
    monkeypatch.setenv("DRAFTREE_API_KEY", " ")
    assert draftree("serve", "--port", "0").exit_code == 2
    monkeypatch.setenv("DRAFTREE_API_KEY", "")
    result = draftree("serve", "--port", "0", "--host", "0.0.0.0")
    assert served["options"].api_keys == ()
    assert "anyone who can reach" in result.stderr and "key anything" in result.stderr


def test_an_open_server_is_pointed_out(draftree, engine, served):
    warning = "anyone who can reach 0.0.0.0 may use this server"
    assert warning in draftree("serve", "--host", "0.0.0.0", "--port", "0").stderr
    with_key = draftree("serve", "--host", "0.0.0.0", "--port", "0", "--api-key", "k")
    assert warning not in with_key.stderr
    assert "at http://127.0.0.1:" in with_key.stderr


def test_port_in_use(draftree, engine):
    import socket

    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        result = draftree("serve", "--port", str(port))
    assert result.exit_code == 1
    assert result.stderr == (
        f"error: 127.0.0.1:{port} cannot be listened on: address already in use; "
        "choose another --port or --host.\n"
    )
    assert engine.opened == []


@pytest.mark.parametrize(
    "options", [["--budget", "x"], ["--port", "70000"], ["--temperature", "3"], ["--queue", "0"]]
)
def test_wrong_options(draftree, engine, options):
    assert draftree("serve", *options).exit_code == 2
    assert engine.opened == []


def test_sampling_options_belong_to_requests(draftree, engine):
    assert draftree("serve", "--top-k", "5").exit_code == 2
