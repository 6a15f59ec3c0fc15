"""`draftree stop`: which server is meant."""

import pytest

from draftree.cli import daemon
from draftree.cli.daemon import Background


@pytest.fixture
def servers(monkeypatch):
    """Two servers that can be stopped."""
    running = [Background(1, port, f"http://x:{port}", "m", "log") for port in (1001, 1002)]
    monkeypatch.setattr(daemon, "find_servers", lambda: list(running))
    monkeypatch.setattr(daemon, "stop_server", running.remove)
    return running


def test_one_is_stopped_without_being_named(draftree, servers):
    del servers[1]
    result = draftree("stop")
    assert (result.exit_code, servers) == (0, [])
    assert result.stderr == "stopped http://x:1001 (m)\n"


def test_of_several_one_must_be_named(draftree, servers):
    result = draftree("stop")
    assert result.exit_code == 1
    assert "1001, 1002" in result.stderr
    assert draftree("stop", "--port", "1002").exit_code == 0
    assert [server.port for server in servers] == [1001]


def test_all(draftree, servers):
    assert draftree("stop", "--all").exit_code == 0
    assert servers == []


def test_none(draftree, servers):
    servers.clear()
    assert draftree("stop").stderr == "error: No server runs in the background.\n"
    assert "on port 5" in draftree("stop", "--port", "5").stderr


def test_server_that_does_not_end(monkeypatch):
    from draftree.errors import ServeError

    stubborn = Background(2**30, 1, "u", "m", "log")
    monkeypatch.setattr(daemon.os, "kill", lambda *_: None)
    monkeypatch.setattr(daemon, "find_servers", lambda: [stubborn])
    monkeypatch.setattr(daemon, "_STOP_S", 0.1)
    with pytest.raises(ServeError, match="did not end"):
        daemon.stop_server(stubborn)
