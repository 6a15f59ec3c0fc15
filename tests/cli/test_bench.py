"""The bench commands on a tiny model: files, one last line of JSON, sentences."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from draftree.cli.app import app
from tests.golden import golden
from tests.made import make_draft


@pytest.fixture(scope="module")
def tiny_path():
    return golden("dense/tiny-llama-A-F16.gguf")


def bench(*arguments):
    return CliRunner().invoke(app, ["bench", *map(str, arguments)])


def test_suite_writes_a_file_and_one_line(tiny_path, tmp_path):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "one two one two"}\n')
    options = ("--prompts", prompts, "-n", 6, "--device", "cpu", "--results", tmp_path / "results")
    result = bench("suite", tiny_path, *options)
    assert result.exit_code == 0, result.stderr
    line = json.loads(result.stdout)
    assert line["mine.jsonl"]["num_equal"] == line["mine.jsonl"]["num_prompts"] == 1
    (path,) = (tmp_path / "results").iterdir()
    assert str(path) == line["file"] and "one two" not in path.read_text()
    sampled = bench("suite", tiny_path, *options, "--temperature", 0.8)
    line = json.loads(sampled.stdout)
    assert line["kind"] == "suite-sampled" and line["mine.jsonl"]["num_equal"] == 1
    record = json.loads(Path(line["file"]).read_text())
    assert record["settings"]["temperature"] == 0.8 and path.exists()


def test_draft_writes_a_file_and_one_line(tiny_path, tmp_path):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "one two one two"}\n')
    draft = make_draft(feature_layers=(0, 1, 2), relative="dflash2")
    options = ("--prompts", prompts, "-n", 4, "--device", "cpu", "--draft", draft)
    result = bench("draft", tiny_path, *options, "--results", tmp_path / "results")
    assert result.exit_code == 0, result.stderr
    line = json.loads(result.stdout)
    assert line["kind"] == "DFlash2" and line["all_equal"]
    assert len(line["acceptance_length"]) == 10


def test_a_server_that_is_not_there_is_a_sentence(tmp_path):
    result = bench("http", "http://127.0.0.1:9", "--results", tmp_path)
    assert result.exit_code == 1
    assert "http://127.0.0.1:9 does not answer" in result.stderr
    assert list(tmp_path.iterdir()) == []


def test_a_shape_that_is_not_known_is_refused(tmp_path):
    result = bench("gpu", tmp_path, "--shape", "huge")
    assert (
        result.exit_code == 2
        and "must be one of 27b, 27b-8, 0.8b, 0.8b-bf16, tiny" in result.stderr
    )
    assert list(tmp_path.iterdir()) == []


def test_only_what_users_measure_is_in_the_package():
    assert sorted(command.name or command.callback.__name__ for command in bench_commands()) == [
        *("agent", "decode", "draft", "gpu", "http", "peers", "prefill", "suite"),
    ]


def bench_commands():
    from draftree.cli.bench import app as bench_app

    return bench_app.registered_commands
