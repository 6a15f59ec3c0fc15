"""Starting and ending."""

import asyncio
import http.client
import json
import shutil
import signal
import socket
import ssl
import subprocess
import threading

import httpx2
import pytest

from draftree.errors import ModelError, ServeError
from draftree.serve import server
from draftree.serve.service import ServeOptions
from tests.needs import needs
from tests.serve import fake
from tests.serve.conftest import wait_for
from tests.serve.test_openai import HELLO
from tests.serve.test_reply import open_stream

NEEDS_OPENSSL = needs("the command openssl", shutil.which("openssl") is not None)


def read_all(connection):
    received = b""
    connection.settimeout(120)
    while piece := connection.recv(100_000):
        received += piece
    return received.decode()


def test_what_runs_may_finish_and_what_waits_is_told(start, engine):
    running, gate = start(grace_s=120.0), threading.Event()
    engine.pieces = [lambda: gate.wait(120), *["word "] * 10]
    first = open_stream(running)
    wait_for(lambda: engine.started)
    second = open_stream(running)
    wait_for(lambda: running.service.queue.num_waiting == 1)
    running.server.should_exit = True
    refused = read_all(second)
    gate.set()
    finished = read_all(first)
    assert refused.startswith("HTTP/1.1 503")
    assert "retry-after" in refused.lower()
    assert '"finish_reason":"stop"' in finished
    assert "data: [DONE]" in finished
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(f"{running.url}/health")


def test_after_the_grace_a_stream_ends_with_an_event(start, engine):
    running = start(grace_s=0.2)
    engine.round_s = 0.05
    engine.pieces = ["word "] * 1000
    connection = open_stream(running)
    wait_for(lambda: engine.started)
    running.server.should_exit = True
    text = read_all(connection)
    assert "word " in text
    assert '"message":"The server is shutting down."' in text
    assert "data: [DONE]" in text
    assert text.endswith("0\r\n\r\n")


def test_port_in_use_is_a_sentence():
    taken = socket.create_server(("127.0.0.1", 0))
    with pytest.raises(ServeError, match=r"cannot be listened on: address already in use"):
        server.bind("127.0.0.1", taken.getsockname()[1])
    taken.close()


def test_unknown_host_is_a_sentence():
    with pytest.raises(ServeError, match="no-such-host"):
        server.bind("no-such-host.invalid", 0)


@pytest.fixture
def certificate(tmp_path):
    """For localhost, with its key."""
    cert, key = str(tmp_path / "cert.pem"), str(tmp_path / "key.pem")
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:P-256"]
    command += ["-nodes", "-days", "2", "-subj", "/CN=localhost", "-keyout", key, "-out", cert]
    command += ["-addext", "subjectAltName=DNS:localhost"]
    subprocess.run(command, check=True, capture_output=True)
    return cert, key


@NEEDS_OPENSSL
def test_tls(start, engine, certificate):
    """A reply in one piece and a stream, whose pieces take a shorter way."""
    cert, key = certificate
    engine.pieces, engine.round_s = ["word "] * 8, 0.05
    running = start(tls_cert=cert, tls_key=key)
    context = ssl.create_default_context(cafile=cert)
    for is_stream in (False, True):
        connection = http.client.HTTPSConnection("localhost", running.port, context=context)
        body = json.dumps({**HELLO, "stream": is_stream})
        headers = {"content-type": "application/json"}
        connection.request("POST", "/v1/chat/completions", body, headers)
        response = connection.getresponse()
        text = response.read().decode()
        assert (response.status, text.count("word ")) == (200, 8)
        connection.close()
    with socket.create_connection(("127.0.0.1", running.port)) as plain:
        plain.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\n\r\n")
        assert b"200" not in plain.recv(1000)


@NEEDS_OPENSSL
def test_certificates_that_cannot_be_used(certificate, tmp_path):
    cert, key = certificate
    server.check_tls(cert, key)
    other = tmp_path / "text.pem"
    other.write_text("hello")
    for wrong in ((cert, None), (str(other), key), (str(tmp_path / "nothing"), key)):
        with pytest.raises(ServeError, match=r"^--tls-cert and --tls-key cannot be used: \S"):
            server.check_tls(*wrong)


def serve_in_thread(engine, on_ready=lambda: None, **options):
    """server.serve, without signals; returns what it raised."""
    result = []
    listener = server.bind("127.0.0.1", 0)

    def run():
        try:
            server.serve(engine.open, ServeOptions(model_id="fake", **options), listener, on_ready)
        except BaseException as error:
            result.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    return thread, result, f"http://127.0.0.1:{listener.getsockname()[1]}"


@pytest.fixture
def quiet(monkeypatch):
    monkeypatch.setattr(server, "set_up_logs", lambda: None)


def test_missing_model_ends_the_server_with_its_reason(quiet):
    engine = fake.Engine(opening_error=ModelError("There is no such model."))
    thread, result, _ = serve_in_thread(engine)
    thread.join(120)
    assert [str(error) for error in result] == ["There is no such model."]


@pytest.mark.parametrize(
    ("signals", "is_forced"),
    [
        ([signal.SIGINT], False),
        ([signal.SIGTERM, signal.SIGTERM], False),
        ([signal.SIGINT, signal.SIGINT], True),
    ],
)
def test_signals(signals, is_forced):
    class Stoppable:
        def begin_stop(self):
            pass

    import uvicorn

    instance = server.Server(uvicorn.Config(lambda: None, log_config=None), Stoppable())
    for number in signals:
        instance.handle_exit(number, None)
    assert instance.should_exit
    assert instance.force_exit is is_forced
    assert instance.signal == signals[0]


def test_statistics_of_nothing_are_zero():
    from draftree.serve.queue import Job
    from draftree.serve.statistics import statistics

    async def run():
        return statistics([Job("a", lambda engine: None, asyncio.get_running_loop())])

    found = asyncio.run(run())
    assert (found["rounds"], found["tokens_per_second"], found["ttft_ms"]) == (0, 0.0, None)
