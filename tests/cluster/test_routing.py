"""Keys of conversations, where they are kept, and the order of replicas."""

import json
from itertools import pairwise

import pytest

from draftree.cluster.routing import Places, find_keys, rank_replicas

SYSTEM = {"role": "system", "content": "Be brief."}


def turn(number):
    return {"role": "user", "content": f"question {number}"}


REPLY = {"role": "assistant", "content": "So it is."}


def keys_of(**body):
    return find_keys(json.dumps(body).encode())


@pytest.mark.parametrize(
    "grow",
    [
        lambda turns: {"messages": [SYSTEM, *turns]},
        lambda turns: {"messages": turns, "system": "Be brief."},
        lambda turns: {"input": turns, "instructions": "Be brief."},
    ],
)
def test_a_longer_conversation_has_the_keys_of_the_shorter_one(grow):
    turns = [turn(1), REPLY, turn(2), REPLY, turn(3)]
    found = [keys_of(**grow(turns[:length])) for length in (1, 3, 5)]
    assert [len(keys) for keys in found] == [1, 3, 5]
    assert all(longer[: len(shorter)] == shorter for shorter, longer in pairwise(found))
    other = keys_of(**grow([turn(9), *turns[1:]]))
    assert not set(other) & set(found[-1])


def test_what_many_conversations_share_is_no_key():
    assert keys_of(messages=[SYSTEM]) == ()
    first, second = (keys_of(messages=[SYSTEM, turn(n)]) for n in (1, 2))
    assert len(first) == 1 and first != second
    assert keys_of(messages=[turn(1)], tools=[]) != keys_of(messages=[turn(1)], tools=[{"a": 1}])


def test_a_text_as_input_is_the_first_turn():
    message = {"role": "user", "content": "question 1"}
    assert keys_of(input="question 1") == keys_of(input=[message])


def test_prompts_are_cut_into_blocks():
    text = "once upon a time " * 200
    short, long = keys_of(prompt=text[:2000]), keys_of(prompt=text)
    assert len(short) == 1 and len(long) == len(text) // 1024
    assert long[:1] == short
    assert keys_of(prompt="short") == ()
    assert len(keys_of(prompt=list(range(1000)))) > 1


BODIES = [b"", b"{", b"[1]", b"[" * 100_000, b'{"messages": 3}', b"{}"]


@pytest.mark.parametrize("body", BODIES, ids=range(len(BODIES)))
def test_other_bodies_have_no_keys(body):
    assert find_keys(body) == ()


def test_long_bodies_are_not_looked_into():
    """Their objects would take gigabytes."""
    assert keys_of(messages=[turn(1)], tools=["x" * 2**20])
    assert keys_of(messages=[turn(1)], tools=["x" * 2**22]) == ()


def test_the_longest_beginning_decides():
    places = Places()
    keys = keys_of(messages=[turn(1), REPLY, turn(2)])
    assert places.find(keys) == ""
    places.record(keys[:1], "a", "")
    assert places.find(keys) == "a"
    places.record(keys[:2], "b", "a")
    assert places.find(keys) == "b" and places.find(keys[:1]) == "b"
    places.record(keys, "b", "b")
    assert (places.num_known, places.num_hits) == (2, 1)


def test_the_oldest_are_forgotten():
    places = Places(max_keys=2)
    for key in (b"1", b"2", b"1", b"3"):
        places.record([key], "a", "")
    assert [places.find([key]) for key in (b"1", b"2", b"3")] == ["a", "", "a"]


def test_order_of_replicas():
    lens = {"a": 0, "b": 3, "c": 1}

    def rank(prefers="", avoids=(), **more):
        return [sorted(group) for group in rank_replicas({**lens, **more}, prefers, avoids)]

    assert rank() == [["a", "b", "c"]]
    assert rank("b") == [["b"], ["a", "c"]]
    assert rank("gone") == [["a", "b", "c"]]
    assert rank("b", b=5) == [["a", "b", "c"]]  # too busy
    assert rank("b", ("b",)) == [["a", "c"], ["b"]]
    assert rank_replicas({}, "a", ()) == []


def test_equals_take_turns():
    first = {rank_replicas({"a": 0, "b": 0}, "", ())[0][0] for _ in range(100)}
    assert first == {"a", "b"}
