"""The development commands on a tiny model: files, one last line of JSON, sentences."""

import json

from typer.testing import CliRunner

from benchmarks.app import app
from benchmarks.result import KINDS, read_records
from benchmarks.session import Session, all_kinds
from draftree.errors import BenchError

NOT_MODELS = {
    *("gpu", "gpu-depth", "gpu-phases", "gpu-requests", "gpu-shapes"),
    *("kv-quality", "agent", "cluster"),
}


def bench(*arguments):
    return CliRunner().invoke(app, [*map(str, arguments)])


def last_line(result):
    assert result.exit_code == 0, result.stderr
    return json.loads(result.stdout.splitlines()[-1])


def test_context_says_what_it_leaves_out(tiny_path, tmp_path):
    options = ("--depth", 16, "--depth", 99999, "-n", 4, "--rounds", 1, "--device", "cpu")
    result = bench("context", tiny_path, *options, "--results", tmp_path)
    line = last_line(result)
    assert list(line["plain"]) == ["16"] and line["num_equal"] == line["num_texts"] == 3
    assert "skipped: A depth of 99999: tiny-llama-A-F16.gguf was trained for 1024" in result.stderr
    (record,) = read_records(tmp_path).values()
    assert record["kind"] == "context" and record["settings"]["num_tokens"] == 4


def test_budget_names_the_best(tiny_path, tmp_path):
    prompts = tmp_path / "mine.jsonl"
    prompts.write_text('{"prompt": "one two one two"}\n')
    options = ("--prompts", prompts, "--budget", 2, "--passes", 1, "-n", 6, "--device", "cpu")
    result = bench("budget", tiny_path, *options, "--results", tmp_path / "results")
    line = last_line(result)
    assert line["best"] in ("0", "2") and list(line["tokens_per_second"]) == ["0", "2"]
    (record,) = read_records(tmp_path / "results").values()
    assert record["settings"]["sets"] == ["mine.jsonl"]
    assert "one two" not in json.dumps(record)


def test_a_budget_is_a_number(tiny_path):
    result = bench("budget", tiny_path, "--budget", "many")
    assert result.exit_code == 2 and "must be a number or `auto`" in result.stderr


def test_all_takes_every_kind_but_the_gpu(tiny_path, tmp_path):
    session = Session(tiny_path, 2, tmp_path, print, print)
    kinds = all_kinds(session, 5, 20_480, "python", None)
    assert sorted(kinds) == sorted(set(KINDS) - NOT_MODELS)
    for kind, take in kinds.items():
        name = take.func.__name__
        taken = take.args[0] if name in ("alone", "texts") else name
        assert kind.removesuffix("-sampled") == taken


def test_all_says_what_it_could_not_take(tiny_path, tmp_path, monkeypatch):
    def refuse(self, *_, **__):
        raise BenchError("The machine is asleep.")

    monkeypatch.setattr(Session, "record", refuse)
    monkeypatch.setattr(Session, "load_sets", refuse)
    options = ("-m", tiny_path, "--results", tmp_path, "--page", tmp_path / "docs" / "page.md")
    result = bench("all", *options)
    assert result.exit_code == 1 and "Nothing could be measured." in result.stderr
    line = json.loads(result.stdout.splitlines()[-1])
    num_asleep = sum("asleep" in sentence for sentence in line["skipped"])
    assert num_asleep == len(KINDS) - len(NOT_MODELS)
    assert f"start of {tiny_path}: The machine is asleep." in line["skipped"]


def test_lines_are_printed(tmp_path):
    result = bench("lines", "--since", "no-such-commit")
    assert result.exit_code == 1 and "git has no draftree/ at no-such-commit" in result.stderr
    assert bench("lines").stdout.splitlines()[-1].startswith("| all |")
