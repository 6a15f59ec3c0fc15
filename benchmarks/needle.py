"""Real text with sentences in it that are asked for later. In: windows of token ids. Out: longer
ones, where the sentences stand, and what is to follow each question.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

NEEDLE_STEP: Final = 1024  # tokens of text from needle to needle
ASKED_AFTER: Final = (2048, 4096, 8192, 16384, 32768)  # tokens of text
_PLACES: Final = (
    *("Lisbon", "Oslo", "Cairo", "Lima", "Kyoto", "Quebec", "Nairobi", "Vienna"),
    *("Dublin", "Havana", "Tunis", "Prague", "Manila", "Bergen", "Porto", "Zagreb"),
    *("Riga", "Accra", "Dakar", "Turin", "Malmo", "Basel", "Delhi", "Perth"),
    *("Boston", "Tokyo", "Seoul", "Izmir", "Minsk", "Sofia", "Quito", "Leeds"),
)
Encode = Callable[[str], list[int]]


@dataclass(frozen=True, slots=True)
class Needle:
    """position: of its first token in the window. Asked by question; answer is to follow."""

    position: int
    question: list[int]
    answer: list[int]


@dataclass(frozen=True, slots=True)
class Haystack:
    ids: list[int]
    is_text: list[bool]  # False: of a needle
    needles: list[Needle]
    stops: list[int]  # where all needles before are asked for

    def asked_at(self, stop: int) -> list[Needle]:
        return [needle for needle in self.needles if needle.position < stop]


def hide_needles(text: Sequence[int], encode: Encode, seed: int) -> Haystack:
    """A text as long as that one, with a needle at the beginning of every 1024 tokens. All needles
    so far are asked for after every power of two, from 2048 on, and at the end.
    """
    rng = np.random.default_rng(seed)
    places = rng.permutation(_PLACES)
    ids: list[int] = []
    is_text: list[bool] = []
    needles = []
    for index, start in enumerate(range(0, len(text), NEEDLE_STEP)):
        question = f"\nThe code of the {places[index % len(places)]} office is"
        answer = f" {rng.integers(1000, 9999)}"
        asked, whole = encode(question), encode(f"{question}{answer}.\n")
        told = encode(f"{question}{answer}")[len(asked) :]
        needles.append(Needle(start, asked, told))
        piece = text[start : min(start + NEEDLE_STEP, len(text)) - len(whole)]
        ids += [*whole, *piece]
        is_text += [False] * len(whole) + [True] * len(piece)
    stops = [stop for stop in ASKED_AFTER if stop < len(ids)]
    return Haystack(ids, is_text, needles, [*stops, len(ids)])
