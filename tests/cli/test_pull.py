"""`draftree pull` and `draftree models`, without a network."""

import pytest

from draftree.cli.option import DEFAULT_MODEL
from draftree.errors import FetchError
from draftree.weights import catalogue, hub


@pytest.fixture
def fetched(monkeypatch, tmp_path):
    """Names that were downloaded; nothing is here before."""
    names = []

    def refuse(name):
        raise FetchError(f"{name} is not downloaded.")

    def fetch(name, report=None):
        names.append(name)
        for stage, count in (("download", 0), ("download", 5), ("verify", 10)):
            report(hub.Progress("a.gguf", "somewhere", stage, count, 10))
        return tmp_path / "a.gguf"

    monkeypatch.setattr(hub, "resolve", refuse)
    monkeypatch.setattr(hub, "pull", fetch)
    return names


def test_prints_the_path_and_each_stage_once(draftree, fetched, tmp_path):
    result = draftree("pull", "a-model")
    assert result.exit_code == 0
    assert result.stdout == f"{tmp_path / 'a.gguf'}\n"
    assert result.stderr == "download a.gguf\nverify a.gguf\n"
    assert fetched == ["a-model"]


def test_quiet_leaves_out_the_path(draftree, fetched):
    assert draftree("pull", "a-model", "--quiet").stdout == ""


def test_what_is_here_is_not_fetched(draftree, fetched, monkeypatch, tmp_path):
    monkeypatch.setattr(hub, "resolve", lambda name: tmp_path / "b.gguf")
    assert draftree("pull", "a-model").stdout == f"{tmp_path / 'b.gguf'}\n"
    assert fetched == []


def test_unknown_name_is_one_sentence(draftree):
    result = draftree("pull", "no such model")
    assert result.exit_code == 1
    assert len(result.stderr.splitlines()) == 1
    assert DEFAULT_MODEL in result.stderr


def test_default_model_is_the_catalogues():
    assert DEFAULT_MODEL == catalogue.DEFAULT_MODEL


def test_a_targets_usual_draft_comes_with_it(draftree, fetched):
    assert draftree("pull", "qwen3.6-27b").exit_code == 0
    assert fetched == ["qwen3.6-27b", "qwen3.6-27b-dflash-q8_0"]
    fetched.clear()
    assert draftree("pull", "qwen3.6-27b", "--no-draft").exit_code == 0
    assert fetched == ["qwen3.6-27b"]


def test_a_target_has_one_usual_draft_at_most():
    usual = [entry.target for entry in hub.CATALOGUE if entry.is_usual]
    assert usual and len(set(usual)) == len(usual)
    assert set(usual) <= {entry.name for entry in hub.CATALOGUE}
