"""The target writes prompts of its own: its chat template is cut where the user's text begins, and
it goes on from there. Some starts get a first word or two, and some are text without a template.

In: what writes, and its tokenizer. Out: `Prompt`s, kept batch by batch in files that an interrupted
run reads again. Knows nothing of replies.
"""

import json
import random
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.resources import files
from itertools import takewhile
from pathlib import Path

import numpy as np

from draftree.errors import ModelError, TokenizerError
from draftree.text.template import ChatTemplate
from draftree.text.tokenizer import Tokenizer
from draftree.train.prompt import Prompt, expand_template, read_prompts
from draftree.train.writer import Task, TextWriter

_NO_TEXT = "\N{REPLACEMENT CHARACTER}"
_SENTINEL = "sentinel-of-a-user"
_MIN_TOKENS, _MAX_TOKENS = 4, 200
_SEED_TOKENS = 40  # of a seed, at most
_TEXT_TOKENS = 72  # of a text to continue, at most
_GRAM, _MAX_REPEATS = 8, 2  # a run of so many tokens may come so often
_TEMPERATURES = (0.7, 1.0)  # drawn uniformly
_EMPTY_SYSTEM_SHARE = 0.2
_SEED_SHARE = 0.5
_TEXT_SHARE = 8  # one start in so many is text to continue


@dataclass(frozen=True, slots=True)
class ChatCut:
    """A chat template without its user's text."""

    openings: tuple[str, ...]  # what stands before it: as is, and with an empty system message
    stops: frozenset[int]  # tokens that end it
    closing: str  # what ends it where that is no token of its own


@dataclass(frozen=True, slots=True)
class Start:
    """What the target goes on from: the opening is not part of the prompt, the seed is."""

    opening: str
    seed: str
    temperature: float


def cut_template(tokenizer: Tokenizer) -> ChatCut:
    if not tokenizer.chat_template:
        raise ModelError(
            "The target has no chat template, so it cannot write prompts of its own; "
            "give it some with --prompts."
        )
    template = ChatTemplate.for_tokenizer(tokenizer)
    user = {"role": "user", "content": _SENTINEL}
    cuts = []
    for messages in ([user], [{"role": "system", "content": ""}, user]):
        try:
            text = template.render(messages)
        except TokenizerError:  # many templates take no system message
            continue
        before, sentinel, after = text.partition(_SENTINEL)
        if sentinel:
            cuts.append((before, after.strip()))
    if not cuts:
        raise ModelError("The target's chat template does not show where a user's text begins.")
    tail = tokenizer.encode(cuts[0][1], add_special=False, starts_text=False)
    closing = list(takewhile(lambda token: not tokenizer.is_special(token), tail))
    return ChatCut(
        openings=tuple(dict.fromkeys(before for before, _ in cuts)),
        stops=tokenizer.stop_ids | frozenset([] if closing else tail[:1]),
        closing=tokenizer.decode(closing).strip(),
    )


MakeWriter = Callable[[int, int, Sequence[int]], TextWriter]  # most texts, most tokens, stop ids


def write_own_prompts(
    make_writer: MakeWriter,
    tokenizer: Tokenizer,
    count: int,
    batch_size: int,
    seed: int,
    folder: Path,
    report: Callable[[int], None],
) -> list[Prompt]:
    """Distinct prompts, so many. A batch that is in the folder is not written again. report gets
    how many there are so far.
    """
    author = _Author(make_writer, tokenizer, min(batch_size, 2 * count))
    found: dict[str, Prompt] = {}
    number = 0
    while len(found) < count:
        path = folder / f"own-prompts-{number:04d}.jsonl"
        if not path.is_file():
            _save(author.write(seed, number), path)
        num_before = len(found)
        for prompt in read_prompts(path):
            found.setdefault(" ".join(prompt.text.lower().split()), prompt)
        if len(found) == num_before:
            raise ModelError(
                f"The target writes no new prompts after {num_before} of {count}; ask for fewer."
            )
        number += 1
        report(min(len(found), count))
    return list(found.values())[:count]


def _save(prompts: Sequence[Prompt], path: Path) -> None:
    if not prompts:
        raise ModelError(
            "The target writes no prompts of its own that can be used; give --prompts."
        )
    lines = [json.dumps({"prompt": p.text, "chat": p.is_chat}) for p in prompts]
    partial = path.with_suffix(".partial")
    partial.write_text("\n".join(lines) + "\n", encoding="utf-8")
    partial.replace(path)


class _Author:
    """Draws starts and lets the target go on from them."""

    def __init__(self, make_writer: MakeWriter, tokenizer: Tokenizer, batch_size: int) -> None:
        package = files("draftree.train")
        self._seeds = json.loads((package / "seeds.json").read_text(encoding="utf-8"))
        templates = json.loads((package / "templates.json").read_text(encoding="utf-8"))
        self._slots = templates["slots"]
        self._tokenizer, self._cut = tokenizer, cut_template(tokenizer)
        self._num_texts = batch_size // _TEXT_SHARE
        self._num_chats = batch_size - self._num_texts
        opening_len = max(len(tokenizer.encode_chat(text)) for text in self._cut.openings)
        chat_len = opening_len + _SEED_TOKENS + _MAX_TOKENS
        self._chats = make_writer(self._num_chats, chat_len, sorted(self._cut.stops))
        text_len = _SEED_TOKENS + _TEXT_TOKENS
        self._texts = make_writer(max(1, self._num_texts), text_len, sorted(tokenizer.stop_ids))

    def write(self, seed: int, number: int) -> list[Prompt]:
        """The usable prompts of one batch."""
        rng = random.Random(f"own prompts {seed} {number}")
        chats = [self._draw_chat(rng) for _ in range(self._num_chats)]
        texts = [self._draw_text(rng) for _ in range(self._num_texts)]
        prompts = [
            Prompt(self._read_chat(start, new), is_chat=True)
            for start, new in self._continue(self._chats, chats, rng)
        ]
        prompts += [
            Prompt(self._read_text(start, new[: rng.randint(12, _TEXT_TOKENS)]), is_chat=False)
            for start, new in self._continue(self._texts, texts, rng)
        ]
        return [prompt for prompt in prompts if self._is_usable(prompt.text)]

    def _draw_chat(self, rng: random.Random) -> Start:
        openings = self._cut.openings
        opening = openings[-1] if rng.random() < _EMPTY_SYSTEM_SHARE else openings[0]
        seed = self._draw_seed("chat", rng) if rng.random() < _SEED_SHARE else ""
        return Start(opening, seed, rng.uniform(*_TEMPERATURES))

    def _draw_text(self, rng: random.Random) -> Start:
        return Start("", self._draw_seed("text", rng), rng.uniform(*_TEMPERATURES))

    def _draw_seed(self, kind: str, rng: random.Random) -> str:
        while True:
            group = rng.choice(self._seeds[kind])
            seed = expand_template(rng.choice(group), self._slots, rng)
            if len(self._tokenizer.encode(seed)) <= _SEED_TOKENS:
                return seed

    def _continue(
        self, writer: TextWriter, starts: Sequence[Start], rng: random.Random
    ) -> list[tuple[Start, list[int]]]:
        """Each start with the tokens that the target wrote after it."""
        if not starts:
            return []
        tokenizer = self._tokenizer
        tasks = []
        for start in starts:
            text = start.opening + start.seed
            ids = tokenizer.encode_chat(text) if start.opening else tokenizer.encode(text)
            tasks.append(Task(np.array(ids, dtype=np.int32), start.temperature))
        written = writer.write(tasks, seed=rng.randrange(2**31))
        ends = [len(task.prompt) for task in tasks]
        new = [ids[end:].tolist() for ids, end in zip(written, ends, strict=True)]
        return list(zip(starts, new, strict=True))

    def _read_chat(self, start: Start, new: list[int]) -> str:
        """The user's text, or nothing where it did not end."""
        is_ended = bool(new) and new[-1] in self._cut.stops
        text = start.seed + self._decode(new[:-1] if is_ended else new)
        if self._cut.closing:
            text, closing, _ = text.partition(self._cut.closing)
            is_ended = is_ended or bool(closing)
        return text.strip() if is_ended else ""

    def _read_text(self, start: Start, new: list[int]) -> str:
        """Up to the end of a docstring, or of the last whole line or word."""
        text = start.seed + self._decode(new)
        quotes = text.split('"""')
        if len(quotes) > 2:
            return '"""'.join(quotes[:2]) + '"""\n'
        end = text.rfind("\n", len(start.seed)) + 1 or max(text.rfind(" "), 0)
        return text[:end]

    def _decode(self, ids: Sequence[int]) -> str:
        """_NO_TEXT where it holds tokens that are no text."""
        if any(self._tokenizer.is_special(token) for token in ids):
            return _NO_TEXT
        return b"".join(map(self._tokenizer.token_bytes, ids)).decode("utf-8", "replace")

    def _is_usable(self, text: str) -> bool:
        if _NO_TEXT in text or not text.strip():
            return False
        ids = self._tokenizer.encode(text, add_special=False, parse_special=False)
        grams = Counter(tuple(ids[i : i + _GRAM]) for i in range(len(ids) - _GRAM + 1))
        is_varied = not grams or max(grams.values()) <= _MAX_REPEATS
        return _MIN_TOKENS <= len(ids) <= _MAX_TOKENS and is_varied
