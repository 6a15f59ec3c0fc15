"""Which tokens count while clients come and go, by arrival times that are known."""

import threading

import pytest

from benchmarks.cluster_clients import Exchange, rate_clients, run_clients
from draftree.errors import BenchError

HEAD = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"


def chunk(*events):
    data = b"".join(b"data: " + event.encode() + b"\n\n" for event in events)
    return b"%x\r\n%b\r\n" % (len(data), data)


def reply(begin_s, *text_s, num_tokens=None, name="content"):
    """A request at begin_s, an event with text at each of text_s; the last one brings the end."""
    text = f'{{"choices":[{{"delta":{{"{name}":"a"}}}}]}}'
    usage = f'{{"choices":[],"usage":{{"completion_tokens":{num_tokens or len(text_s)}}}}}'
    pieces = [(0.01, HEAD + chunk('{"choices":[{"delta":{"content":""}}]}'))]
    pieces += [(when - begin_s, chunk(text)) for when in text_s]
    last_s, last = pieces.pop()
    return Exchange(begin_s, [*pieces, (last_s, last + chunk(usage, "[DONE]") + b"0\r\n\r\n")])


def test_tokens_count_while_every_client_has_a_request():
    first = [reply(0.0, 1.0, 2.0, 3.0), reply(3.0, 5.0, 6.0)]  # finds none left at 6
    second = [reply(0.0, 4.0, 4.5), reply(4.5, 5.5, 7.0, 8.0, 9.0)]
    measured = rate_clients([first, second])
    # From 4, where text has come to both, to 6: 5 and 6 of the first, 4.5 and 5.5 of the second.
    assert measured.window_s == pytest.approx(2.0)
    assert measured.rate == pytest.approx(4 / 2.0)
    assert measured.whole_rate == pytest.approx(11 / 9.0)


def test_the_end_of_a_run_does_not_count():
    """One client alone for as long as one likes."""
    first = [reply(0.0, 1.0, 2.0, 3.0, 4.0)]
    short = rate_clients([first, [reply(0.0, 1.0, 2.0, 3.0, 5.0)]])
    long = rate_clients([first, [reply(0.0, 1.0, 2.0, 3.0, 50.0)]])
    assert short.rate == pytest.approx(long.rate)
    assert short.rate == pytest.approx(5 / 3.0) and long.whole_rate < short.whole_rate


def test_a_reply_that_is_partly_inside_counts_with_its_part():
    """Events need not be tokens."""
    first = [reply(0.0, 2.0, 4.0, num_tokens=10), reply(4.0, 6.0, num_tokens=3)]
    second = [reply(0.0, 1.0, 3.0, 5.0, 7.0, num_tokens=8, name="reasoning_content")]
    measured = rate_clients([first, second])
    assert measured.window_s == pytest.approx(4.0)
    assert measured.rate == pytest.approx((5 + 3 + 4) / 4.0)


def test_an_event_comes_when_its_last_byte_does():
    whole = reply(0.0, 2.0, 6.0)
    (head, text, end) = whole.pieces
    cut = [head, (1.5, text[1][:-4]), (2.0, text[1][-4:]), end]
    assert Exchange(0.0, cut).text_s() == whole.text_s() == [2.0, 6.0]


def test_what_says_nothing_is_refused():
    with pytest.raises(BenchError, match="fewer requests than clients"):
        rate_clients([[reply(0.0, 1.0)], []])
    with pytest.raises(BenchError, match="no time in which all"):
        rate_clients([[reply(0.0, 1.0, 2.0)], [reply(0.0, 3.0, 4.0)]])
    refused = Exchange(0.0, [(0.1, b"HTTP/1.1 503 No\r\nContent-Length: 4\r\n\r\nfull")])
    with pytest.raises(BenchError, match="full"):
        rate_clients([[refused]])


def test_a_client_asks_on_as_soon_as_it_is_answered():
    """The slow one holds nobody up, and nobody begins before all are warm."""
    lock, is_last_sent, sent = threading.Lock(), threading.Event(), []

    def send(body):
        with lock:
            sent.append(body)
        if body == 8:
            is_last_sent.set()
        if body == 0:
            assert is_last_sent.wait(60)
        return [(0.0, b"")]

    found = run_clients(send, ["warm"] * 3, range(9))
    assert sent[:3] == ["warm"] * 3 and sorted(sent[3:]) == list(range(9))
    assert min(map(len, found)) <= 1 and sum(map(len, found)) == 9
