"""Stop strings end a reply wherever it is cut, and are named; thinking is counted."""

from itertools import combinations

import pytest

from draftree.core import FinishReason
from draftree.serve.observed import Observed, ObservedCall
from draftree.text.reply import DeltaKind
from tests.serve import fake
from tests.serve.fake import Call, Delta


def observe(pieces, stop=()):
    engine = fake.Engine(pieces=pieces)
    observed = Observed(engine.chat([]), stop)
    deltas = list(observed)
    observed.close()
    return observed, deltas


def text_of(deltas):
    return "".join(delta.text for delta in deltas)


def cuts(text):
    """The text in one, two or three pieces, cut everywhere."""
    for count in range(3):
        for places in combinations(range(1, len(text)), count):
            ends = (*places, len(text))
            yield [text[start:end] for start, end in zip((0, *places), ends, strict=True)]


def test_pauses_pass_and_leave_what_is_held_back():
    observed = Observed(fake.Engine(pieces=["one E", "N", "D two"]).chat([]), ["END"])
    observed.pause_when(lambda: True)
    deltas = list(observed)
    assert text_of(deltas) == "one " and observed.stop_text == "END"
    assert [delta.kind is DeltaKind.PAUSE for delta in deltas] == [False, True, True]


@pytest.mark.parametrize(
    ("text", "stop", "shown", "found"),
    [
        ("one END two", ["END"], "one ", "END"),
        ("one END two", ["two", "END"], "one ", "END"),
        ("abcd", ["abc", "bc"], "", "abc"),
        ("abcd", ["ab", "abc"], "", "ab"),
        ("abcd", ["cde", "d"], "abc", "d"),
        ("aab", ["ab"], "a", "ab"),
        ("abcd", ["bd"], "abcd", None),
        ("abcd", ["cde"], "abcd", None),
        ("abcd", [], "abcd", None),
    ],
)
def test_the_same_end_however_the_text_is_cut(text, stop, shown, found):
    for pieces in cuts(text):
        observed, deltas = observe(pieces, stop)
        assert (text_of(deltas), observed.stop_text) == (shown, found)
        assert all(delta.text for delta in deltas)
        assert observed.finish_reason is FinishReason.STOP


def test_nothing_is_computed_after_a_stop_string():
    def fail():
        raise AssertionError("it went on")

    observed, deltas = observe(["a", "STOP", fail, "b"], ["STOP"])
    assert text_of(deltas) == "a"
    assert observed.usage.completion_tokens == 2


def test_only_text_is_searched_and_order_is_kept():
    pieces = [
        Delta("a stop", DeltaKind.REASONING),
        Delta("so s"),
        Delta(kind=DeltaKind.TOOL_CALL, tool_call=Call(0, "c", "f", '"stop"')),
        Delta("top"),
    ]
    observed, deltas = observe(pieces, ["stop"])
    kinds = [DeltaKind.REASONING, DeltaKind.TEXT, DeltaKind.TEXT, DeltaKind.TOOL_CALL]
    assert [delta.kind for delta in deltas] == [*kinds, DeltaKind.TEXT]
    assert [delta.text for delta in deltas] == ["a stop", "so ", "s", "", "top"]
    assert observed.stop_text is None


def test_thinking_is_counted():
    call = ObservedCall(lambda engine: engine.chat([]))
    assert (call.num_reasoning, call.usage.completion_tokens, call.stop_text) == (0, 0, None)
    pieces = [Delta("a", DeltaKind.REASONING), Delta("b", DeltaKind.REASONING), "c", "d"]
    list(call(fake.Engine(pieces=pieces)))
    assert (call.num_reasoning, call.usage.completion_tokens) == (2, 4)


def test_cancelling_reaches_the_generation():
    observed = Observed(fake.Engine(pieces=["a", "b"]).chat([]), ["x"])
    observed.cancel()
    assert list(observed) == []
    assert observed.finish_reason is FinishReason.CANCELLED
