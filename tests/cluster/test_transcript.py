"""Streams that begin again: the client gets every event once, wherever the first run broke off."""

import pytest

from draftree.cluster.transcript import ReplyChanged, Transcript

EVENTS = [f'data: {{"text":"{word}"}}\n\n'.encode() for word in ("once", "upon", "a", "time")]
USAGE = b'data: {"usage":{"ms":%d}}\n\n'
COMMENT = b": waiting\n\n"
ROUNDS = b'data: {"object":"draftree.rounds","choices":[]}\n\n'
WHOLE = b"".join(EVENTS)


@pytest.mark.parametrize("cut", range(len(WHOLE) + 1))
def test_every_event_comes_once_wherever_it_is_cut(cut):
    transcript = Transcript()
    got = transcript.pass_on(WHOLE[:cut])
    transcript.restart()
    got += transcript.pass_on(WHOLE)
    assert got == WHOLE


@pytest.mark.parametrize("step", [1, 7, 30])
def test_runs_may_be_cut_into_other_pieces_and_break_again(step):
    transcript, got = Transcript(), b""
    for end in (30, 10, 55, len(WHOLE)):
        transcript.restart()
        for start in range(0, end, step):
            got += transcript.pass_on(WHOLE[start : min(start + step, end)])
    assert got == WHOLE


def test_tokens_are_kept_and_not_passed_on():
    transcript = Transcript()
    told = EVENTS[0] + b": tokens 0 0 5 6\n\n" + EVENTS[1] + b": tokens 1 0 9\n\n: tokens 0 2 7\n\n"
    assert transcript.pass_on(told) == EVENTS[0] + EVENTS[1]
    assert transcript.tokens == ((5, 6, 7), (9,))
    transcript.restart()
    assert transcript.pass_on(b": tokens 0 0 5\n\n") == b""
    assert transcript.tokens == ((5, 6, 7), (9,))
    transcript.pass_on(b": tokens 0 1 6 7 8\n\n")
    assert transcript.tokens == ((5, 6, 7, 8), (9,))


def test_comments_and_rounds_are_not_counted():
    transcript = Transcript()
    first = EVENTS[0] + COMMENT + ROUNDS + EVENTS[1]
    assert transcript.pass_on(COMMENT + first) == COMMENT + first
    transcript.restart()
    again = ROUNDS + COMMENT + EVENTS[0] + EVENTS[1] + COMMENT + EVENTS[2]
    assert transcript.pass_on(again) == COMMENT + EVENTS[2]


def test_counts_may_differ_and_text_may_not():
    transcript = Transcript()
    transcript.pass_on(EVENTS[0] + USAGE % 5)
    transcript.restart()
    assert transcript.pass_on(EVENTS[0] + USAGE % 66 + EVENTS[1]) == EVENTS[1]
    transcript.restart()
    with pytest.raises(ReplyChanged):
        transcript.pass_on(EVENTS[0] + USAGE % 5 + EVENTS[2])


def test_text_that_talks_of_usage_is_compared():
    said = [rb'data: {"text":"\"usage\":{%d"}' % number + b"\n\n" for number in (1, 2)]
    transcript = Transcript()
    transcript.pass_on(said[0])
    transcript.restart()
    with pytest.raises(ReplyChanged):
        transcript.pass_on(said[1])


def test_timings_and_progress_may_differ_and_text_beside_them_may_not():
    def write(word, number):
        progress = b'data: {"choices":[],"prompt_progress":{"cache":%d}}\n\n' % number
        return progress + b'data: {"text":"%s","timings":{"ms":%d}}\n\n' % (word, number)

    transcript = Transcript()
    transcript.pass_on(write(b"once", 5))
    transcript.restart()
    assert transcript.pass_on(write(b"once", 66) + EVENTS[1]) == EVENTS[1]
    transcript.restart()
    with pytest.raises(ReplyChanged):
        transcript.pass_on(write(b"twice", 5) + EVENTS[1])
