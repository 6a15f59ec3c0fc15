"""Prompts that the target writes: where its template is cut, what is kept, and going on."""

import json
import random
from functools import partial
from importlib.resources import files

import pytest
import torch

from draftree.errors import ModelError
from draftree.text.tokenizer import Tokenizer
from draftree.train.own_prompt import cut_template, write_own_prompts
from draftree.train.prompt import expand_template
from draftree.train.teacher import load_teacher
from draftree.train.writer import Writer
from draftree.weights.file import open_checkpoint
from tests.train.counting import END, make_counting

CHATTY = open_checkpoint(make_counting(has_chat=True))
CIRCLE = "BCDEFGHIJKLMNOPQRSTUVWXY"


def _tokenizer(template=None):
    metadata = dict(CHATTY.metadata)
    if template is not None:
        metadata["tokenizer.chat_template"] = template
    return Tokenizer.from_metadata(metadata)


def _write(folder, count=30, batch_size=48, seed=0, tokenizer=None):
    teacher = load_teacher(CHATTY, torch.device("cpu"))
    folder.mkdir(exist_ok=True)
    seen: list[int] = []
    tokenizer = tokenizer or _tokenizer()
    writer = partial(Writer, teacher)
    prompts = write_own_prompts(writer, tokenizer, count, batch_size, seed, folder, seen.append)
    return prompts, seen


@pytest.fixture(scope="module")
def written(tmp_path_factory):
    torch.set_num_threads(1)
    folder = tmp_path_factory.mktemp("own")
    return (*_write(folder), folder)


def test_a_template_is_cut_where_the_user_begins():
    cut = cut_template(_tokenizer())
    system = "<|im_start|>system\n<|im_end|>\n"
    assert cut.openings == ("<|im_start|>user\n", f"{system}<|im_start|>user\n")
    assert END in cut.stops and cut.closing == ""


def test_a_template_may_refuse_system_messages_and_close_with_text():
    refusal = "{% if messages[0].role == 'system' %}{{ raise_exception('none') }}{% endif %}"
    cut = cut_template(_tokenizer(refusal + "[INST] {{ messages[0].content }} [/INST]"))
    assert cut.openings == ("[INST] ",) and cut.closing == "[/INST]"


@pytest.mark.parametrize(
    ("template", "message"),
    [("", "no chat template"), ("{{ messages | length }}", "where a user's text begins")],
)
def test_targets_that_cannot_are_told(template, message):
    with pytest.raises(ModelError, match=message):
        cut_template(_tokenizer(template))


def test_prompts_are_distinct_and_what_the_target_would_say(written):
    prompts, seen, _ = written
    assert len(prompts) == 30 == seen[-1] and seen == sorted(seen)
    assert len({" ".join(p.text.lower().split()) for p in prompts}) == 30
    tokenizer = _tokenizer()
    for prompt in prompts:
        ids = tokenizer.encode(prompt.text, add_special=False)
        assert 4 <= len(ids) <= 200 and not any(map(tokenizer.is_special, ids))
        assert "\N{REPLACEMENT CHARACTER}" not in prompt.text
        if prompt.is_chat:  # it ended by itself, and was not cut
            assert prompt.text.endswith("Y")
            assert prompt.text.count(CIRCLE[:8]) <= 2
    chats = [prompt.text for prompt in prompts if prompt.is_chat]
    is_bare = [not set(text) - set(CIRCLE) for text in chats]
    assert 0.2 < sum(is_bare) / len(chats) < 0.9  # the others begin with a seed


def test_the_same_seed_writes_the_same_and_another_another(tmp_path):
    few = {"count": 4, "batch_size": 8}
    prompts, _ = _write(tmp_path / "a", **few)
    assert _write(tmp_path / "b", **few)[0] == prompts
    assert _write(tmp_path / "c", seed=1, **few)[0] != prompts


def test_batches_are_kept_and_a_lost_one_comes_out_the_same(written):
    prompts, _, folder = written
    paths = sorted(folder.glob("own-prompts-*.jsonl"))
    times = {path: path.stat().st_mtime_ns for path in paths[:-1]}
    text = paths[-1].read_text()
    paths[-1].unlink()
    assert _write(folder)[0] == prompts
    assert paths[-1].read_text() == text
    assert times == {path: path.stat().st_mtime_ns for path in paths[:-1]}


def test_a_target_that_only_repeats_itself_is_told(tmp_path):
    line = json.dumps({"prompt": "the same again", "chat": True})
    for number in range(2):
        (tmp_path / f"own-prompts-{number:04d}.jsonl").write_text(line)
    with pytest.raises(ModelError, match="no new prompts after 1 of 30"):
        _write(tmp_path)


def test_messages_end_at_the_templates_closing_text(tmp_path):
    """Without a token for it: here the letters that always come before the end."""
    template = "<|im_start|>user\n{{ messages[-1].content }}WXY<|im_end|>"
    prompts, _ = _write(tmp_path, count=8, batch_size=16, tokenizer=_tokenizer(template))
    assert all(prompt.text.endswith("V") for prompt in prompts if prompt.is_chat)


def test_every_seed_can_be_filled():
    package = files("draftree.train")
    seeds = json.loads((package / "seeds.json").read_text(encoding="utf-8"))
    slots = json.loads((package / "templates.json").read_text(encoding="utf-8"))["slots"]
    texts = [text for groups in seeds.values() for group in groups for text in group]
    assert len(texts) > 200
    for text in texts:
        filled = expand_template(text, slots, random.Random(0))
        assert filled and "{" not in filled and len(filled) < 150
