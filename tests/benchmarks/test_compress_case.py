"""Cases: the needed places stand in the text once, and away from its ends."""

import pytest

from benchmarks.compress_case import KINDS, make_case


@pytest.mark.parametrize("kind", KINDS)
def test_needed_places_are_inside(kind: str) -> None:
    for seed in range(4):
        case = make_case(kind, 9000, seed)
        assert case.kind == kind and 5000 < len(case.text) < 12000
        assert case == make_case(kind, 9000, seed)
        for piece in case.needed:
            assert piece in case.text
        assert case.question not in case.text and case.answers
    assert make_case(kind, 9000, 0) != make_case(kind, 9000, 1)
