"""The command line on a fake engine, in this process."""

import sys
from collections.abc import Callable

import pytest
from typer.testing import CliRunner, Result

from tests.cli import fake


@pytest.fixture
def engine(monkeypatch) -> fake.Engine:
    monkeypatch.setitem(sys.modules, "draftree.chat", None)  # so that it is put back afterwards
    engine = fake.Engine()
    fake.install(engine)
    return engine


@pytest.fixture
def draftree(tmp_path, monkeypatch) -> Callable[..., Result]:
    from draftree.cli.app import app

    monkeypatch.setenv("DRAFTREE_CACHE", str(tmp_path))

    def invoke(*arguments: str, stdin: str | bytes | None = None) -> Result:
        return CliRunner().invoke(app, list(arguments), input=stdin, prog_name="draftree")

    return invoke
