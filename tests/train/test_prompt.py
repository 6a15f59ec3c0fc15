"""Prompts from files, templates and sources."""

import json
import random

import pytest

from draftree.errors import DraftreeError, ModelError
from draftree.text.tokenizer import Tokenizer
from draftree.train.prompt import (
    Prompt,
    encode_prompts,
    expand_templates,
    read_prompts,
    source_prompts,
    spare_token,
    template_prompts,
)
from draftree.weights.file import open_checkpoint
from tests.tiny import tiny_path


def _tokenizer():
    return Tokenizer.from_metadata(open_checkpoint(tiny_path("llama")).metadata)


def test_json_lines_are_read(tmp_path):
    path = tmp_path / "p.jsonl"
    lines = [{"prompt": "a b"}, {"prompt": "c", "chat": True}]
    path.write_text("\n\n".join(map(json.dumps, lines)))
    assert read_prompts(path) == [Prompt("a b", False), Prompt("c", True)]


def test_text_is_cut_at_empty_lines(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("\none\n  two\n\n \n\nthree\n")
    assert [prompt.text for prompt in read_prompts(path)] == ["one\n  two", "three"]


@pytest.mark.parametrize(
    "line", ["{", "[1]", '{"chat": true}', '{"prompt": ""}', '{"prompt": "a", "chat": 1}']
)
def test_bad_lines_are_named(tmp_path, line):
    path = tmp_path / "p.jsonl"
    path.write_text(f'{{"prompt": "a"}}\n{line}\n')
    with pytest.raises(ModelError, match="line 2"):
        read_prompts(path)


def test_empty_and_binary_files_are_refused(tmp_path):
    path = tmp_path / "p.txt"
    path.write_text("\n \n")
    with pytest.raises(ModelError, match="no prompts"):
        read_prompts(path)
    path.write_bytes(b"\xff\xfe\xff")
    with pytest.raises(ModelError, match="UTF-8"):
        read_prompts(path)


def test_slots_are_filled():
    templates = {
        "slots": {"who": ["Ann", "Bob"], "what": ["{int:3:3} eggs"]},
        "chat": [["{who:a} and {who:b} eat {what}, says {who:a}."]],
        "text": [["⟨{int:1:2}⟩"]],
    }
    prompts = expand_templates(templates, 100, seed=1)
    assert {prompt.text for prompt in prompts} == {
        "Ann and Bob eat 3 eggs, says Ann.",
        "Bob and Ann eat 3 eggs, says Bob.",
        "{1}",
        "{2}",
    }
    assert all(prompt.is_chat == ("eat" in prompt.text) for prompt in prompts)


def test_own_templates_make_many_prompts():
    prompts = template_prompts(3000, seed=0)
    assert len(set(prompts)) == 3000 and prompts == template_prompts(3000, seed=0)
    assert prompts != template_prompts(3000, seed=1)
    assert not any(mark in p.text for p in prompts for mark in ("{int", "{name", "⟨", "{topic"))
    assert 0.5 < sum(prompt.is_chat for prompt in prompts) / 3000 < 0.9


def test_sources_become_beginnings(tmp_path):
    text = "".join(f"line number {i} of the file\n" for i in range(300))
    (tmp_path / "a.py").write_text(text)
    (tmp_path / "b.txt").write_text(text)
    prompts = list(source_prompts(tmp_path, random.Random(0), (".py",)))
    assert 1 <= len(prompts) <= 4
    assert all(prompt.text in text and not prompt.is_chat for prompt in prompts)


def test_long_texts_keep_their_end_and_long_messages_are_left_out():
    tokenizer = _tokenizer()
    text = "abcdefgh " * 20
    encoded = encode_prompts(
        [Prompt(text, False), Prompt("short", False), Prompt(text, True)], tokenizer, 16
    )
    assert [len(ids) <= 16 for ids in encoded] == [True, True]
    assert encoded[0].tolist() == tokenizer.encode(text)[-16:]
    with pytest.raises(DraftreeError, match="no two prompts"):
        encode_prompts([Prompt("short", False)], tokenizer, 16)


def test_the_spare_token_means_nothing_else():
    tokenizer = _tokenizer()
    token = spare_token(tokenizer)
    assert tokenizer.is_special(token)
    assert token not in {tokenizer.bos_id, tokenizer.eos_id, *tokenizer.stop_ids}
    assert tokenizer.token_bytes(token).decode() not in (tokenizer.chat_template or "")
