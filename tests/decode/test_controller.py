"""When to draft: gains that vary, pauses that grow, plain steps to compare with."""

from collections.abc import Callable
from itertools import groupby

import numpy as np

from draftree.decode.controller import SpeculationController

POSITION = 100
Gain = Callable[[int], float]  # of a round, by its number


def new_controller(prior_gain: float = 1.2) -> SpeculationController:
    """One that knows what plain steps take."""
    controller = SpeculationController(prior_gain=prior_gain)
    while not controller.cost.is_measured:
        controller.cost.observe_plain(1.0, POSITION)
    return controller


def take_rounds(controller: SpeculationController, count: int, gain: Gain) -> list[bool]:
    """Whether each of them drafted."""
    drafted = []
    for number in range(count):
        drafted.append(controller.is_draft_next(POSITION))
        if drafted[-1]:
            controller._observe_gain(gain(number))
            controller.observe_draft(1, 1.0, 1.0)
        else:
            controller.observe_plain(1.0, 1.0, POSITION)
    return drafted


def runs(drafted: list[bool], *, is_drafted: bool) -> list[int]:
    return [len(list(group)) for kind, group in groupby(drafted) if kind is is_drafted]


def varying(mean: float, seed: int = 0) -> Gain:
    """Rounds differ by much more than what a draft gains."""
    noise = np.random.default_rng(seed)
    return lambda _: max(0.3, mean + 0.45 * float(noise.standard_normal()))


def test_a_small_gain_is_taken_though_rounds_vary() -> None:
    shares = [
        np.mean(take_rounds(new_controller(), 3000, varying(1.15, seed))) for seed in range(8)
    ]
    assert min(shares) > 0.8  # an eighth of the rounds is there to compare


def test_what_does_not_pay_is_tried_less_and_less() -> None:
    drafted = take_rounds(new_controller(), 6000, varying(0.8))
    assert np.mean(drafted) < 0.07
    pauses = runs(drafted, is_drafted=False)
    assert pauses[:4] == [32, 64, 128, 256] and max(pauses) == 256


def test_after_a_good_trial_the_next_pause_is_short() -> None:
    controller = new_controller()
    take_rounds(controller, 1500, lambda _: 0.7)
    take_rounds(controller, 1500, lambda _: 1.3)
    pauses = runs(take_rounds(controller, 200, lambda _: 0.7), is_drafted=False)
    assert 32 in pauses[:2]  # before it there may be steps to compare


def test_a_trial_forgives_once() -> None:
    controller = new_controller()
    assert controller.is_draft_next(POSITION) and not controller._is_trial
    take_rounds(controller, 40, lambda _: 0.0)
    while not controller.is_draft_next(POSITION):
        controller.observe_plain(1.0, 1.0, POSITION)
    before = controller._calibration._accepted[0][0]
    controller.begin_draft()
    after = controller._calibration._accepted[0][0]
    assert after < before
    controller.begin_draft()
    assert controller._calibration._accepted[0][0] == after


def test_plain_steps_to_compare_do_not_end_a_run_of_drafts() -> None:
    drafted = take_rounds(new_controller(), 1000, lambda _: 1.5)
    assert set(runs(drafted, is_drafted=True)[:-1]) == {128}
    assert set(runs(drafted, is_drafted=False)) == {7}


def test_plain_steps_count_once_the_caches_are_theirs() -> None:
    controller = new_controller()
    controller.observe_draft(1, 2.0, 1.0)
    for ms in (9.0, 9.0, 9.0, 9.0):
        controller.observe_plain(ms, ms, POSITION)
    assert controller.cost.plain_ms == 1.0
    controller.observe_plain(1.2, 1.2, POSITION)
    assert controller.cost.plain_ms > 1.0


def test_a_request_goes_on_where_the_last_one_ended() -> None:
    """In a pause; without one, between the last one's gain and a guess."""
    controller = new_controller()
    drafted = take_rounds(controller, 20, lambda _: 0.0)
    controller.end_request()
    drafted += take_rounds(controller, 40, lambda _: 0.0)
    assert runs(drafted, is_drafted=False)[0] == 32
    controller = new_controller(prior_gain=1.2)
    take_rounds(controller, 8, lambda _: 0.7)  # almost enough to end it
    controller.end_request()
    rounds = runs(take_rounds(controller, 40, lambda _: 0.7), is_drafted=True)[0]
    assert 2 < rounds < 8


def test_the_first_request_is_drafted_once_plain_steps_are_known() -> None:
    assert not SpeculationController().is_draft_next(POSITION)
    for prior_gain in (1.2, 1.05):
        assert new_controller(prior_gain).is_draft_next(POSITION)


def test_plain_steps_are_taken_where_they_were_not_timed() -> None:
    """Far away in the context they take another time."""
    controller = new_controller()
    kinds = []
    for position in (POSITION, *[20_000] * 9):
        kinds.append(controller.is_draft_next(position))
        if kinds[-1]:
            controller.observe_draft(1, 2.0, 1.0)
        else:
            controller.observe_plain(1.0, 1.0, position)
    assert kinds == [True] + [False] * 7 + [True] * 2
