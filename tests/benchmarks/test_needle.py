"""Needles lie where they are said to lie, and the text keeps its length."""

from benchmarks.needle import NEEDLE_STEP, hide_needles


def encode(text: str) -> list[int]:
    return [ord(character) for character in text]


def test_a_needle_every_1024_tokens() -> None:
    text = [1] * 5000
    hay = hide_needles(text, encode, seed=3)
    assert len(hay.ids) == len(hay.is_text) == len(text)
    assert hay.stops == [2048, 4096, 5000]
    assert [needle.position for needle in hay.needles] == list(range(0, 5000, NEEDLE_STEP))
    assert [len(hay.asked_at(stop)) for stop in hay.stops] == [2, 4, 5]
    for needle in hay.needles:
        told = [*needle.question, *needle.answer]
        at = needle.position
        assert hay.ids[at : at + len(told)] == told and not any(hay.is_text[at : at + len(told)])
    assert all(token == 1 for token, is_text in zip(hay.ids, hay.is_text, strict=True) if is_text)


def test_questions_and_answers_differ() -> None:
    hays = [hide_needles([1] * 4096, encode, seed) for seed in (0, 0, 1)]
    assert hays[0] == hays[1] != hays[2]
    assert len({tuple(needle.question) for needle in hays[0].needles}) == 4
    assert len({tuple(needle.answer) for needle in hays[0].needles}) == 4
