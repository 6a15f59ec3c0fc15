"""What may be shortened, where texts are cut, and what is never left out."""

import re
from itertools import pairwise
from typing import Any

import pytest

from draftree.text.compress import (
    LongText,
    choose_chunks,
    cut_text,
    find_long_texts,
    replace_content,
    token_places,
)
from draftree.text.tokenizer import Tokenizer
from tests.text.metadata import byte_metadata

LONG = "\n".join(f"Line {number} says nothing of note." for number in range(60))


def count_words(text: str) -> int:
    return len(text.split())


def count_between(start: int, end: int) -> int:
    return end - start


def message(role: str, content: Any, **more: Any) -> dict[str, Any]:
    return {"role": role, "content": content, **more}


def find(messages: list[Any], **options: Any) -> list[LongText]:
    given: dict[str, Any] = {"is_eager": False, "is_own": True} | options
    return find_long_texts(messages, 1000, **given)


def places_of(text: str, length: int = 40) -> list[int]:
    return [*range(0, len(text), length), len(text)]


def test_system_last_turn_and_last_tool_results_stay() -> None:
    call = {"type": "function", "function": {"name": "read", "arguments": "{}"}}
    messages = [
        message("system", LONG),
        message("user", "Read it."),
        message("assistant", None, tool_calls=[call]),
        message("tool", LONG),
        message("assistant", LONG),
        message("user", "What is in line 7?"),
        message("assistant", "", tool_calls=[call]),
        message("tool", LONG),
    ]
    found = find(messages)
    assert [(each.message, each.question) for each in found] == [
        (3, "What is in line 7?"),
        (4, "What is in line 7?"),
    ]
    shorter = replace_content(messages, {3: "short"})
    assert shorter[3] == {**messages[3], "content": "short"}
    assert shorter[:3] + shorter[4:] == messages[:3] + messages[4:]


def test_a_document_is_cut_by_the_question_beside_it() -> None:
    for text in (f"{LONG}\n\nWhat is in line 7?", f"What is in line 7?\n\n{LONG}"):
        (found,) = find([message("user", text)])
        start, end = found.kept
        assert text[start:end].strip() == found.question.strip() == "What is in line 7?"
    assert find([message("user", f"{LONG}\n\nWhat is in line 7?")], is_own=False) == []
    parts = [{"type": "text", "text": LONG}, {"type": "text", "text": "And what is line 3?"}]
    assert find([message("user", parts)])[0].question == "And what is line 3?"


def test_auto_leaves_questions_about_the_whole_and_texts_without_any() -> None:
    whole = message("user", f"{LONG}\n\nCan you summarise this?")
    assert find([whole]) == []
    assert find([message("user", LONG)]) == []
    assert len(find([whole], is_eager=True)) == len(find([message("user", LONG)], is_eager=True))
    aged = [message("user", LONG), message("assistant", "Fine.")]
    assert find([*aged, message("user", "Translate all of it.")]) == []
    assert find([*aged, message("user", "What is in line 9?")])[0].message == 0


def test_what_was_found_stays_as_it_was_when_turns_follow() -> None:
    messages: list[dict[str, Any]] = []
    before: list[LongText] = []
    for turn in range(4):
        messages.append(message("user", f"{LONG}\n\nWhat is in line {turn}?"))
        found = find(messages)
        assert found[: len(before)] == before and len(found) > len(before)
        before = found
        messages.append(message("assistant", LONG))


def test_marks_say_what_is_missing_and_spans_are_whole_lines() -> None:
    places = places_of(LONG)
    is_kept = [chunk in (0, 10, 11, 30) for chunk in range(len(places) - 1)]
    text, num_spans = cut_text(LONG, places, is_kept, lambda a, b: count_words(LONG[a:b]))
    assert num_spans == 3
    lines = text.split("\n")
    marks = [line for line in lines if line.startswith("[…")]
    assert len(marks) == 3 and all(
        re.fullmatch(r"\[… [\d,]+ tokens left out …\]", m) for m in marks
    )
    kept = [line for line in lines if not line.startswith("[…")]
    order = [LONG.split("\n").index(line) for line in kept]
    assert order == sorted(order), "whole lines, in their order"
    dropped = sum(int(re.sub(r"\D", "", mark)) for mark in marks)
    assert dropped + count_words("\n".join(kept)) == count_words(LONG)


def test_long_lines_are_cut_at_sentences_and_words() -> None:
    words = " ".join(f"word{number}" for number in range(400))
    is_kept = [chunk in (9, 40) for chunk in range(len(places_of(words)) - 1)]
    text, _ = cut_text(words, places_of(words), is_kept, count_between)
    bare = re.sub(r"\[… [\d,]+ tokens left out …\]", " ", text)
    assert set(bare.split()) < set(words.split())
    prose = "One sentence is here. " * 100
    is_kept = [chunk == 20 for chunk in range(len(places_of(prose)) - 1)]
    text, _ = cut_text(prose, places_of(prose), is_kept, count_between)
    (inside,) = re.findall(r"\] (.*?) \[", text)
    assert re.fullmatch(r"(One sentence is here\. ?)+", inside)


def test_nothing_is_dropped_that_is_hardly_longer_than_its_mark() -> None:
    is_kept = [chunk != 5 for chunk in range(len(places_of(LONG)) - 1)]
    assert cut_text(LONG, places_of(LONG), is_kept, count_between) == (LONG, 1)


@pytest.mark.parametrize(
    ("question", "line"),
    [
        ("What does parse_dates return?", "def parse_dates(text): return []"),
        ("Is src/main.rs read?", "opened src/main.rs at noon"),
        ('Who said "never again"?', "he muttered never again and left"),
        ("How old is Ada in it?", "and Ada was nine"),
        ("where did the small red fox go?", "yesterday the small red fox went home"),
        ("What happened in 1848?", "it was 1848 then"),
        ("why does median round wrongly?", "def median(values, share=0.5):"),
        ("where is the queue emptied?", "struct queue {"),
    ],
)
def test_what_the_question_names_is_kept_whatever_its_score(question: str, line: str) -> None:
    lines = LONG.split("\n")
    lines.insert(30, line)
    text = "\n".join(lines)
    places = places_of(text)
    scores = [0.0] * (len(places) - 1)
    for asked, is_there in ((question, True), ("what else is there to see?", False)):
        is_kept = choose_chunks(scores, 0.0, places, text, LongText(0, text, asked))
        assert (line in cut_text(text, places, is_kept, count_between)[0]) is is_there


def test_ends_question_and_the_best_chunks_are_kept() -> None:
    places = list(range(0, 1024 * 10 + 1, 10))
    text = "x" * places[-1]
    scores = [float(chunk % 100 == 50) for chunk in range(1024)]
    asked = LongText(0, text, "?", (5000, 5020))
    is_kept = choose_chunks(scores, 0.005, places, text, asked)
    found = [chunk for chunk, kept in enumerate(is_kept) if kept]
    best = [50, 150, 250, 350, 450, 550]
    assert found == sorted([*range(8), *best, 500, 501, *range(1000, 1024)])


def keep_named(text: str, question: str) -> str:
    """What stays of a text whose scores say nothing."""
    places, asked = places_of(text), LongText(0, text, question)
    is_kept = choose_chunks([0.0] * (len(places) - 1), 0.0, places, text, asked)
    return cut_text(text, places, is_kept, count_between)[0]


def test_names_are_words_of_their_own_and_not_everywhere() -> None:
    lines = [f"{i}: old_rate_x xrate and so on, to fill the line" for i in range(60)]
    lines[20] += " (rate)"
    lines[40] += " rate_2"
    found = keep_named("\n".join(lines), "Where are `rate` and `rate_2` and `line`?")
    assert lines[20] in found and lines[40] in found, "both names"
    assert lines[10] not in found and lines[30] not in found, "parts of words, and a usual word"


def test_names_lead_to_other_names() -> None:
    """What stands in a line with a name is looked for, too, as long as it is rare."""
    lines = [f"{i}: common_name and so on, to fill the line" for i in range(400)]
    chain = {
        90: "limit = max_rows + common_name",
        210: "max_rows = fromEnv(x)",
        300: "# fromEnv is slow",
    }
    for number, line in chain.items():
        lines[number] = line
    text = "\n".join(lines)
    found = keep_named(text, "What does `limit` come from?")
    assert all(line in found for line in chain.values())
    assert lines[150] not in found and lines[250] not in found
    unnamed = keep_named(text, "What does it come from?")
    assert not any(line in unnamed for line in chain.values())


def test_few_names_are_followed() -> None:
    lines = [f"name_{i} = name_{i + 1}  # to fill the line with something" for i in range(400)]
    found = keep_named("\n".join(lines), "What is name_100 made from?")
    assert lines[104] in found and lines[130] not in found and lines[70] not in found


def test_definitions_are_kept_unless_they_are_everywhere() -> None:
    lines = [f"    def run(self): return {i}  # of many, to fill the line" for i in range(40)]
    lines[20] = "def stop(self): return 20  # of the type that is used to fill the line"
    found = keep_named("\n".join(lines), "how do run and stop go with the type that returns?")
    assert lines[20] in found and lines[12] not in found and lines[28] not in found


def test_places_are_characters_also_where_they_have_several_bytes() -> None:
    tokenizer = Tokenizer.from_metadata(byte_metadata())
    text = "naïve €uro: 日本語 " * 20
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    places = [*token_places(tokenizer, text, ids)[:-1:32].tolist(), len(text)]
    assert len(places) == -(-len(ids) // 32) + 1 and places[0] == 0 and places[-1] == len(text)
    for chunk, (start, end) in enumerate(pairwise(places)):
        piece = tokenizer.decode(ids[32 * chunk : 32 * chunk + 32]).strip("\ufffd")
        assert piece in text[start : end + 1]


def test_every_token_has_its_place() -> None:
    tokenizer = Tokenizer.from_metadata(byte_metadata(merges=("a b", "Ã ¯")))
    text = "naïve ab €uro: 日本語 ab" * 3
    ids = tokenizer.encode(text, add_special=False, parse_special=False)
    places, raw = token_places(tokenizer, text, ids), text.encode()
    ends = [sum(len(tokenizer.token_bytes(token)) for token in ids[:i]) for i in range(len(ids))]
    expected = [len(raw[:end].decode("utf-8", "ignore")) for end in ends]
    assert places.tolist() == [*expected, len(text)] and len(ids) < len(raw)
    assert token_places(tokenizer, "plain", tokenizer.encode("plain")).tolist() == list(range(6))
