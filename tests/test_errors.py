"""A package of an extra that is missing is one sentence with the command to install it."""

import builtins
import importlib.util
import tomllib
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftree import errors
from draftree.cli.app import app

PROJECT = tomllib.loads((Path(__file__).parents[1] / "pyproject.toml").read_text())["project"]


@pytest.fixture
def plain_install(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if no extra were installed."""
    extra = {"torch", "gguf", "safetensors", "matplotlib", "cuda"}
    find, load = importlib.util.find_spec, builtins.__import__

    def import_module(name, *args, **options):
        if name.split(".")[0] in extra:
            raise ModuleNotFoundError(name)
        return load(name, *args, **options)

    monkeypatch.setattr(errors, "find_spec", lambda name: None if name in extra else find(name))
    monkeypatch.setattr(builtins, "__import__", import_module)


@pytest.mark.parametrize(
    ("command", "extra"),
    [
        (["train", "smollm2-135m", "--out", "draft"], "train"),
        (["bench", "gpu", "files", "--shape", "tiny"], "gpu"),
    ],
)
def test_a_command_names_its_extra(plain_install, command, extra, tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    result = CliRunner().invoke(app, command)
    assert result.exit_code != 0
    words = str(result.exception) if result.exception else result.output
    assert f"run `pip install 'draftree[{extra}]'`" in result.output + words
    assert extra in PROJECT["optional-dependencies"]


def test_all_that_is_missing_is_named(plain_install) -> None:
    with pytest.raises(errors.MissingPackageError) as raised:
        errors.require_packages("Training", "train", "torch", "numpy", "gguf")
    words = "Training needs torch, gguf; run `pip install 'draftree[train]'`."
    assert str(raised.value) == words
    errors.require_packages("Running", "none", "numpy")


def test_a_plain_install_brings_no_framework() -> None:
    names = " ".join(PROJECT["dependencies"])
    assert not [name for name in ("torch", "matplotlib", "cuda", "gguf") if name in names.split()]
