"""`draftree selector` from the command line, on a tiny pair."""

import json

import pytest
import torch

from draftree.weights.file import open_checkpoint
from tests.tiny import tiny_path
from tests.train.counting import make_counting

TINY = ("--tokens", "100", "--max-len", "32", "--steps", "2")


@pytest.fixture(autouse=True)
def _one_thread():
    torch.set_num_threads(1)


def test_a_file_with_a_selector(draftree, tmp_path):
    prompts, out = tmp_path / "prompts.jsonl", tmp_path / "out"
    lines = [json.dumps({"prompt": f"{a}{b}"}) for a in "ABCDEF" for b in "ABCDEFGH"]
    prompts.write_text("\n".join(lines))
    shape = ("--layers", "1", "--ffn", "64", "--block", "4", "--max-len", "24", "--tokens", "100")
    train = ("--steps", "1", "--batch", "16", "--batch-tokens", "128", "--device", "cpu")
    target = str(make_counting())
    given = ("--prompts", str(prompts))
    made = draftree("train", target, *given, "--out", str(tmp_path / "draft"), *shape, *train)
    assert made.exit_code == 0, made.output
    draft = str(tmp_path / "draft" / "draft-q8.gguf")
    result = draftree("selector", target, draft, *given, "--out", str(out), *TINY)
    assert result.exit_code == 0, result.output
    path = result.stdout.strip().splitlines()[-1]
    assert "selector_hidden.weight" in open_checkpoint(out / path.split("/")[-1]).tensors
    assert json.loads((out / "record.json").read_text())["text"]["num_blocks"] > 0


def test_a_model_is_no_draft(draftree, tmp_path):
    target = str(tiny_path("llama"))
    result = draftree("selector", target, target, "--out", str(tmp_path / "out"), *TINY)
    assert result.exit_code != 0 and "draft" in result.stderr
