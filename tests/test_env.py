"""Where files are kept, and what the environment may change."""

from pathlib import Path

import pytest

from draftree import env


def test_cache_folder_by_precedence(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("DRAFTREE_CACHE", raising=False)
    assert env.cache_dir() == tmp_path / "xdg" / "draftree"
    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path / "mine"))
    assert env.cache_dir() == tmp_path / "mine"


def test_empty_values_count_as_unset(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setenv("DRAFTREE_ISA", "")
    assert env.hub_token() is None and env.forced_isa() is None
    monkeypatch.setenv("HF_TOKEN", "secret")
    assert env.hub_token() == "secret"


def test_key_of_a_server(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("DRAFTREE_API_KEY", "")
    assert env.api_keys() == ()
    monkeypatch.setenv("DRAFTREE_API_KEY", "secret")
    assert env.api_keys() == ("secret",)


def test_a_ray_of_ours_is_told_what_its_user_did_not_say(monkeypatch):
    found = {"RAY_SERVE_CONTROL_LOOP_INTERVAL_S": "3"}
    monkeypatch.setattr(env.os, "environ", found)
    env.prepare_ray()
    assert found["RAY_SERVE_CONTROL_LOOP_INTERVAL_S"] == "3"
    assert (found["RAY_USAGE_STATS_ENABLED"], found["RAY_SERVE_USE_GRPC_BY_DEFAULT"]) == ("0", "1")
    assert found["RAY_enable_metrics_collection"] == "0"
