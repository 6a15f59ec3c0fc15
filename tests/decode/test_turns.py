"""When to draft: gains that vary, pauses that grow, plain steps to compare with."""

from collections.abc import Callable
from itertools import groupby

import numpy as np

from draftree.decode.turns import Turns

Gain = Callable[[int], float]  # of a round, by its number


def take_rounds(turns: Turns, count: int, gain: Gain) -> list[bool]:
    """Whether each of them drafted."""
    drafted = []
    for number in range(count):
        drafted.append(turns.is_draft_next())
        if drafted[-1]:
            turns.observe_gain(gain(number))
            turns.observe_draft()
        else:
            turns.observe_plain()
    return drafted


def runs(drafted: list[bool], *, is_drafted: bool) -> list[int]:
    return [len(list(group)) for kind, group in groupby(drafted) if kind is is_drafted]


def varying(mean: float, seed: int = 0) -> Gain:
    """Rounds differ by much more than what a draft gains."""
    noise = np.random.default_rng(seed)
    return lambda _: max(0.3, mean + 0.45 * float(noise.standard_normal()))


def test_a_small_gain_is_taken_though_rounds_vary() -> None:
    shares = [np.mean(take_rounds(Turns(), 3000, varying(1.15, seed))) for seed in range(8)]
    assert min(shares) > 0.8  # an eighth of the rounds is there to compare


def test_what_does_not_pay_is_tried_less_and_less() -> None:
    drafted = take_rounds(Turns(), 6000, varying(0.8))
    assert np.mean(drafted) < 0.07
    pauses = runs(drafted, is_drafted=False)
    assert pauses[:4] == [32, 64, 128, 256] and max(pauses) == 256


def test_after_a_good_trial_the_next_pause_is_short() -> None:
    turns = Turns()
    take_rounds(turns, 1500, lambda _: 0.7)
    take_rounds(turns, 1500, lambda _: 1.3)
    pauses = runs(take_rounds(turns, 200, lambda _: 0.7), is_drafted=False)
    assert 32 in pauses[:2]  # before it there may be steps to compare


def test_a_trial_is_known_as_one() -> None:
    turns = Turns()
    assert turns.is_draft_next() and not turns.begins_trial()
    take_rounds(turns, 40, lambda _: 0.0)
    while not turns.is_draft_next():
        turns.observe_plain()
    assert turns.begins_trial() and not turns.begins_trial()


def test_plain_steps_to_compare_do_not_end_a_run_of_drafts() -> None:
    drafted = take_rounds(Turns(), 1000, lambda _: 1.5)
    assert set(runs(drafted, is_drafted=True)[:-1]) == {128}
    assert set(runs(drafted, is_drafted=False)) == {7}


def test_plain_steps_count_once_the_caches_are_theirs() -> None:
    turns = Turns()
    turns.observe_draft()
    assert [turns.observe_plain() for _ in range(6)] == [False] * 4 + [True] * 2


def test_a_request_goes_on_where_the_last_one_ended() -> None:
    """In a pause; without one, between the last one's gain and a guess."""
    turns = Turns()
    drafted = take_rounds(turns, 20, lambda _: 0.0)
    turns.end_request()
    drafted += take_rounds(turns, 40, lambda _: 0.0)
    assert runs(drafted, is_drafted=False)[0] == 32
    turns = Turns(prior_gain=1.2)
    take_rounds(turns, 8, lambda _: 0.7)  # almost enough to end it
    turns.end_request()
    rounds = runs(take_rounds(turns, 40, lambda _: 0.7), is_drafted=True)[0]
    assert 2 < rounds < 8


def test_the_first_request_is_drafted_at_once() -> None:
    assert Turns().is_draft_next() and Turns(prior_gain=1.05).is_draft_next()
