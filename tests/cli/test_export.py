"""`draftree export`: which draft and target are taken, what is printed, and what is refused."""

import json
import shlex

import pytest

from draftree.cli.export import describe_use
from draftree.weights import hub
from draftree.weights.file import open_checkpoint
from tests.golden import golden
from tests.tiny import tiny_path

DRAFT = "dflash/tiny-dflash-A-F16.gguf"


@pytest.mark.parametrize("system", ["vllm", "sglang", "speculators", "llama.cpp"])
def test_writes_what_it_names(system, draftree, tmp_path):
    out = tmp_path / "out" / "draft"
    arguments = ("--target", str(tiny_path("qwen35")), "--target-name", "org/tiny")
    result = draftree("export", str(golden(DRAFT)), str(out), "--to", system, *arguments)
    assert (result.exit_code, result.stdout) == (0, f"{out}\n")
    assert str(out) in result.stderr
    assert open_checkpoint(out).architecture == "dflash"
    if system != "llama.cpp":
        assert "org/tiny" in (out / "config.json").read_text()


def test_names_the_file_by_draft_and_system(draftree, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for system, name in (("llama.cpp", "tiny-dflash-A-F16-llama.cpp.gguf"), ("vllm", None)):
        target = str(tiny_path("qwen35"))
        result = draftree("export", str(golden(DRAFT)), "--to", system, "--target", target)
        assert result.stdout.strip() == (name or "tiny-dflash-A-F16-vllm")


def test_a_model_stands_for_its_draft(draftree, tmp_path, monkeypatch):
    monkeypatch.setattr(hub, "draft_for", lambda name: golden(DRAFT))
    out = tmp_path / "out"
    result = draftree("export", str(tiny_path("qwen35")), str(out), "--to", "vllm")
    assert result.exit_code == 0
    assert open_checkpoint(out).metadata["dflash.block_size"] == 16


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((DRAFT,), "--target"),
        ((DRAFT, "--to", "speculators", "--target", "TARGET"), "--target-name"),
        (("TARGET",), "without a draft"),
        ((DRAFT, "--to", "ollama"), "--to"),
    ],
)
def test_says_what_is_missing(arguments, words, draftree):
    paths = {DRAFT: str(golden(DRAFT)), "TARGET": str(tiny_path("qwen35"))}
    result = draftree("export", *(paths.get(word, word) for word in arguments))
    assert result.exit_code != 0
    assert words in result.stderr and result.stderr.startswith("error: ")


def test_the_commands_ask_for_all_but_the_anchor(tmp_path):
    words = shlex.split(describe_use("vllm", tmp_path, "org/tiny", 8))
    assert words[:3] == ["vllm", "serve", "org/tiny"]
    settings = json.loads(words[-1])
    assert settings == {"method": "dflash", "model": str(tmp_path), "num_speculative_tokens": 7}
    assert describe_use("llama.cpp", tmp_path, "tiny.gguf", 8).endswith("--spec-draft-n-max 7")
    assert describe_use("speculators", tmp_path, "org/tiny", 8) == f"vllm serve {tmp_path}"


def test_says_what_to_install(draftree, monkeypatch):
    monkeypatch.setattr("draftree.errors.find_spec", lambda name: None)
    result = draftree("export", "smollm2-135m")
    assert "pip install 'draftree[export]'" in result.stderr
