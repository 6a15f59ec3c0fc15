"""Prompts for training: files of the user's, and those that can be made of the package's templates
and of Python's own sources.

In: JSON lines, text, templates. Out: `Prompt`s, and with a tokenizer their token ids. Test sets
that results are measured on must not come in here.
"""

import json
import random
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from importlib.resources import files
from pathlib import Path
from typing import Any

import numpy as np

from draftree.errors import DraftreeError, ModelError
from draftree.text.template import ChatTemplate
from draftree.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Prompt:
    """is_chat: a message to answer; otherwise text to continue."""

    text: str
    is_chat: bool


def read_prompts(path: Path) -> list[Prompt]:
    """A .jsonl file: on each line an object with "prompt", and "chat" if it is a message. Any other
    file: text, a prompt per paragraph (lines between empty ones).
    """
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError:
        raise ModelError(f"{path} is not UTF-8 text.") from None
    if path.suffix == ".jsonl":
        lines = enumerate(text.splitlines(), start=1)
        prompts = [_read_line(line, f"{path}, line {i}") for i, line in lines if line.strip()]
    else:
        pieces = re.split(r"\n\s*\n", text)
        prompts = [Prompt(piece.strip("\n"), is_chat=False) for piece in pieces if piece.strip()]
    if not prompts:
        raise ModelError(f"{path} holds no prompts.")
    return prompts


def _read_line(line: str, where: str) -> Prompt:
    try:
        item = json.loads(line)
    except ValueError as error:
        raise ModelError(f"{where} is not JSON: {error}.") from None
    fields = item if isinstance(item, dict) else {}
    text, is_chat = fields.get("prompt"), fields.get("chat", False)
    if not isinstance(text, str) or not text or not isinstance(is_chat, bool):
        raise ModelError(f'{where} is not an object with a text "prompt".')
    return Prompt(text, is_chat)


def template_prompts(count: int, seed: int) -> list[Prompt]:
    """Distinct prompts of the package's own templates, their slots filled at random."""
    text = (files("draftree.train") / "templates.json").read_text(encoding="utf-8")
    return expand_templates(json.loads(text), count, seed)


def expand_templates(templates: dict[str, Any], count: int, seed: int) -> list[Prompt]:
    """templates: "slots" (name -> texts), "chat" and "text" (lists of groups of templates, each
    group drawn equally often). {int:a:b} is a whole number; slots may hold slots.
    """
    rng = random.Random(seed)
    groups = [(group, True) for group in templates["chat"]]
    groups += [(group, False) for group in templates["text"]]
    found: dict[Prompt, None] = {}
    for _ in range(20 * count):
        if len(found) >= count:
            break
        group, is_chat = rng.choice(groups)
        found[Prompt(expand_template(rng.choice(group), templates["slots"], rng), is_chat)] = None
    return list(found)


def expand_template(template: str, slots: dict[str, list[str]], rng: random.Random) -> str:
    """The template with every {slot} filled at random."""
    kept: dict[str, str] = {}  # {name:1} stands for the same choice wherever it appears

    def fill(match: re.Match[str]) -> str:
        name, _, detail = match[1].partition(":")
        if name == "int":
            low, high = detail.split(":")
            return str(rng.randint(int(low), int(high)))
        if detail and match[1] in kept:
            return kept[match[1]]
        left = [text for text in slots[name] if text not in kept.values()] or slots[name]
        text = rng.choice(left)
        if detail:
            kept[match[1]] = text
        return text

    pattern = re.compile(r"\{(\w+(?::-?\w+)*)\}")
    while pattern.search(template):
        template = pattern.sub(fill, template)
    return template.replace("⟨", "{").replace("⟩", "}")


def source_prompts(folder: Path, rng: random.Random, suffixes: Sequence[str]) -> Iterator[Prompt]:
    """Beginnings to continue, cut out of source files: one to six per file, by its size."""
    for path in sorted(p for p in folder.rglob("*") if p.suffix in suffixes and p.is_file()):
        try:
            lines = path.read_text(encoding="utf-8").splitlines(keepends=True)
        except (UnicodeDecodeError, OSError):
            continue
        for _ in range(min(6, 1 + len(lines) // 100)):
            start = rng.randrange(max(1, len(lines) - 5))
            piece = "".join(lines[start : start + rng.choice((3, 6, 10, 16, 24))])
            if 40 <= len(piece) <= 4000:
                yield Prompt(piece.rstrip("\n"), is_chat=False)


def encode_prompts(
    prompts: Sequence[Prompt], tokenizer: Tokenizer, max_len: int
) -> list[np.ndarray]:
    """Token ids, int32 [prompt_len]. What is too long keeps its end, or is dropped if a message."""
    template = ChatTemplate.for_tokenizer(tokenizer)
    encoded = []
    for prompt in prompts:
        if prompt.is_chat:
            message = {"role": "user", "content": prompt.text}
            ids = tokenizer.encode_chat(template.render([message]))
        else:
            ids = tokenizer.encode(prompt.text)[-max_len:]
        if 1 <= len(ids) <= max_len:
            encoded.append(np.array(ids, dtype=np.int32))
    if len(encoded) < 2:
        raise DraftreeError(f"There are no two prompts of at most {max_len} tokens to learn from.")
    return encoded


def spare_token(tokenizer: Tokenizer) -> int:
    """A token that no text holds, to stand for what the draft is to fill in."""
    if tokenizer.mask_id is not None:
        return tokenizer.mask_id
    known = {tokenizer.bos_id, tokenizer.eos_id, *tokenizer.stop_ids}
    template = tokenizer.chat_template or ""
    for token in reversed(range(tokenizer.vocab_size)):
        if tokenizer.is_special(token) and token not in known:
            text = tokenizer.token_bytes(token).decode("utf-8", "replace")
            if text not in template:
                return token
    raise ModelError("The vocabulary has no reserved token to spare; name one with --mask-token.")
