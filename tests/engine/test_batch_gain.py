"""Whether shared passes are worth it, on a clock that stands still."""

from draftree.engine.batch_gain import BatchGain
from tests.serve.test_turns import Clock


def _step(gain: BatchGain, clock: Clock, num_tokens: int, seconds: float, count: int = 100) -> None:
    """Steps of one request by itself, which follow each other."""
    for _ in range(count):
        gain.begin("one")
        clock.now_s += seconds
        gain.note_step(num_tokens)
    gain.begin("one")
    gain.forget()


def _share(
    gain: BatchGain, clock: Clock, num_rows: int, seconds: float, beside_s: float = 0.005
) -> None:
    """Passes of so many rows, which follow each other, and what comes with each."""
    for _ in range(100):
        gain.begin((num_rows,))
        clock.now_s += seconds
        gain.note_pass(num_rows, seconds)
        clock.now_s += beside_s  # to say what was written
    gain.forget()


def test_rates_are_compared() -> None:
    clock = Clock()
    gain = BatchGain(clock)
    _step(gain, clock, 3, 0.03)  # 100 tokens a second
    assert gain.is_worth(2, 1.1), "nothing is known of passes"
    _share(gain, clock, 2, 0.035)  # 50
    _share(gain, clock, 8, 0.045)  # 160
    assert not gain.is_worth(2, 1.0) and gain.is_worth(8, 1.1) and not gain.is_worth(8, 1.7)
    assert not gain.is_worth(3, 1.0), "no shorter than of two rows"
    assert gain.is_worth(5, 1.0), "not tried yet"
    _step(gain, clock, 2, 0.05)  # 40
    assert gain.is_worth(2, 1.1), "rounds alone became worse"


def test_nothing_is_tried_before_rounds_alone_are_known() -> None:
    clock = Clock()
    gain = BatchGain(clock)
    assert not gain.is_worth(4, 1.0)
    _step(gain, clock, 1, 5.0, count=2)  # the first ones make much
    _step(gain, clock, 1, 0.01, count=7)
    assert not gain.is_worth(4, 1.0)
    _step(gain, clock, 1, 0.01, count=1)
    assert gain.is_worth(4, 1.0)
    _share(gain, clock, 4, 0.1, 0.0)  # 40 tokens a second, of 100
    assert not gain.is_worth(4, 1.0), "the first steps do not count"


def test_what_is_old_is_measured_again() -> None:
    clock = Clock()
    gain = BatchGain(clock)
    _step(gain, clock, 1, 0.01)
    _share(gain, clock, 2, 0.03)
    assert not gain.is_worth(2, 1.0)
    clock.now_s += 100.0
    assert not gain.is_worth(2, 1.0), "rounds alone come first"
    _step(gain, clock, 1, 0.01, count=8)
    assert gain.is_worth(2, 1.0), "what passes took is old"
    _share(gain, clock, 2, 0.015, 0.001)
    assert gain.is_worth(2, 1.1)


def test_what_comes_between_is_not_counted() -> None:
    clock = Clock()
    gain = BatchGain(clock)
    _step(gain, clock, 1, 0.01)
    _share(gain, clock, 4, 0.02)
    for _ in range(10):
        gain.begin((4,))
        clock.now_s += 0.02
        gain.note_pass(4, 0.02)
        gain.begin("another")  # whose round it is until the next pass
        clock.now_s += 5.0
    _step(gain, clock, 1, 0.01)
    assert gain.is_worth(4, 1.5) and not gain.is_worth(4, 1.7)


def test_a_pause_of_the_machine_counts_little() -> None:
    clock = Clock()
    gain = BatchGain(clock)
    _step(gain, clock, 1, 0.01)
    _share(gain, clock, 4, 0.02)  # 160 tokens a second, of 100
    gain.begin((4,))
    clock.now_s += 10.0
    gain.note_pass(4, 0.02)
    _share(gain, clock, 4, 0.02)
    assert gain.is_worth(4, 1.5)
