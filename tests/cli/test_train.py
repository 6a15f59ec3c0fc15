"""`draftree train` from the command line, on a tiny target."""

import json

import pytest
import torch

from draftree.weights.file import open_checkpoint
from tests.tiny import tiny_path
from tests.train.counting import make_counting

TINY = (
    *("--layers", "1", "--ffn", "64", "--block", "4", "--tokens", "300", "--max-len", "24"),
    *("--batch", "16", "--steps", "3", "--batch-tokens", "128", "--device", "cpu"),
)


@pytest.fixture(autouse=True)
def _one_thread():
    """The tensors are too small to share."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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


def test_a_hybrid_gets_a_draft(draftree, tmp_path, prompts):
    out = tmp_path / "out"
    arguments = ("--prompts", str(prompts), "--out", str(out), "--format", "q8_0")
    result = draftree("train", str(tiny_path("qwen35-mtp")), *arguments, *TINY)
    assert result.exit_code == 0, result.output
    assert open_checkpoint(out / "draft-q8.gguf").metadata["dflash.embedding_length"] == 128


def test_a_draft_learns_for_the_format_it_is_written_in(draftree, tmp_path, prompts):
    arguments = ("--prompts", str(prompts), "--out", str(tmp_path / "out"), "--format", "q4_1")
    result = draftree("train", str(make_counting()), *arguments, *TINY)
    assert result.exit_code == 0, result.output
    assert json.loads((tmp_path / "out/record.json").read_text())["config"]["is_four_bit"] is True
    kinds = {t.qtype.name for t in open_checkpoint(tmp_path / "out/draft-q4.gguf").tensors.values()}
    assert kinds == {"Q4_1", "F32"}


def test_rounds_and_a_selector_are_asked_for(draftree, tmp_path, prompts):
    arguments = ("--prompts", str(prompts), "--out", str(tmp_path / "out"), "--format", "q8_0")
    wanted = ("--round-anchors", "0.5", "--selector", "32", "--selector-minutes", "0.01")
    result = draftree("train", str(make_counting()), *arguments, *wanted, *TINY)
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "out/record.json").read_text())["config"]
    assert config["schedule"]["round_anchor_share"] == 0.5
    assert config["selector"]["rank"] == 32 and config["selector"]["max_minutes"] == 0.01
    rank = open_checkpoint(tmp_path / "out/draft-q8-selector.gguf").metadata["dflash.selector_rank"]
    assert rank == 32
    result = draftree("train", str(make_counting()), *arguments, "--selector", "48", *TINY)
    assert result.exit_code == 1 and "32, 64" in result.stderr


def test_hours_plan_how_long_to_write_and_to_train(draftree, tmp_path, prompts):
    arguments = ("--prompts", str(prompts), "--out", str(tmp_path / "out"), "--hours", "0.0004")
    result = draftree("train", str(make_counting()), *arguments, *TINY, "--loss-tokens", "9")
    assert result.exit_code == 0, result.output
    config = json.loads((tmp_path / "out/record.json").read_text())["config"]
    minutes = config["text"]["max_minutes"], config["schedule"]["max_minutes"]
    assert minutes == pytest.approx((0.006, 0.0156))
    assert config["schedule"]["num_loss_tokens"] == 9


def test_the_target_writes_prompts_and_a_draft_goes_on(draftree, tmp_path):
    model, first, second = str(make_counting(has_chat=True)), tmp_path / "a", tmp_path / "b"
    own = ("--own-prompts", "6", "--max-len", "120", "--tokens", "400", "--format", "q8_0")
    result = draftree("train", model, "--out", str(first), *TINY, *own)
    assert result.exit_code == 0, result.output
    assert "6 that the target wrote itself |" in (first / "README.md").read_text()
    result = draftree("train", model, "--out", str(second), *TINY, *own, "--from", str(first))
    assert result.exit_code == 0, result.output
    assert "| started from | a |" in (second / "README.md").read_text()
    result = draftree("train", str(make_counting()), "--out", str(tmp_path / "c"), *TINY, *own)
    assert result.exit_code == 1 and "no chat template" in result.stderr


def test_mistakes_are_sentences(draftree, tmp_path, prompts):
    model, out = str(make_counting()), str(tmp_path / "out")
    result = draftree("train", model, "--format", "q3_k", "--out", out)
    assert result.exit_code == 2 and "q3_k" in result.stderr
    result = draftree("train", model, "--out", out, "--prompts", str(prompts), "--max-len", "9")
    assert result.exit_code == 1 and "four blocks" in result.stderr
    result = draftree("train", "nothing", "--out", out, "--prompts", str(prompts))
    assert result.exit_code == 1 and "neither a file nor a known model" in result.stderr
