"""`draftree train` from the command line, on a tiny target."""

import json

import pytest

from draftree.weights.checkpoint import open_checkpoint
from tests.train.counting import make_counting

TINY = (
    *("--layers", "1", "--ffn", "64", "--block", "4", "--tokens", "300", "--max-len", "24"),
    *("--batch", "16", "--steps", "3", "--batch-tokens", "128", "--device", "cpu"),
)


@pytest.fixture
def prompts(tmp_path):
    path = tmp_path / "prompts.jsonl"
    lines = [json.dumps({"prompt": f"{a}{b}"}) for a in "ABCDEF" for b in "ABCDEFGH"]
    path.write_text("\n".join(lines))
    return path


def test_a_run_leaves_a_draft(draftree, tmp_path, prompts):
    out = tmp_path / "out"
    arguments = ("--prompts", str(prompts), "--out", str(out), "--format", "q8_0")
    result = draftree("train", str(make_counting()), *arguments, *TINY)
    assert result.exit_code == 0, result.output
    assert result.stdout.strip().splitlines()[-1] == str(out)
    assert "acceptance length" in result.stderr
    for path in (out, out / "draft-q8.gguf"):
        assert open_checkpoint(path).architecture == "dflash"
    assert not (out / "draft-bf16.gguf").exists()
    assert "prompts.jsonl" in (out / "README.md").read_text()


def test_mistakes_are_sentences(draftree, tmp_path, prompts):
    model, out = str(make_counting()), str(tmp_path / "out")
    result = draftree("train", model, "--format", "q3_k", "--out", out)
    assert result.exit_code == 2 and "q3_k" in result.stderr
    result = draftree("train", model, "--out", out, "--prompts", str(prompts), "--max-len", "9")
    assert result.exit_code == 1 and "four blocks" in result.stderr
    result = draftree("train", "nothing", "--out", out, "--prompts", str(prompts))
    assert result.exit_code == 1 and "neither a file nor a known model" in result.stderr
