"""When to draft under an automatic budget: as long as it gains, with plain steps in between to
compare, and after pauses again, to see whether it gains now.

In: what drafted rounds are expected to gain over plain steps. Out: whether the next one drafts.
"""

# Running mean of the gain: rounds differ by half of it, so many count. Drafting ends a little below
# no gain, since each change costs: the next few plain steps are slower.
_GAIN_WEIGHT, _STOP_GAIN = 0.06, 0.95
_TRIAL_GAIN = 1.0  # what is believed at the start of a trial
_FIRST_PAUSE, _LONGEST_PAUSE = 32, 256  # plain steps; twice as many after each trial that failed
# After so many rounds with a draft, fewer where the gain is small, come so many plain steps, to
# compare. The first of them are slower: the draft has had the caches.
_CLEAR_GAIN, _CLEAR_RUN, _UNCLEAR_RUN = 1.2, 128, 48
_PLAIN_RUN, _COLD_STEPS = 7, 4
PRIOR_GAIN, PRIOR_SAMPLED_GAIN = 1.2, 1.05  # where noise decides, less can be guessed


class Turns:
    """Outlives a request: the next one is likely to be like it."""

    def __init__(self, prior_gain: float = PRIOR_GAIN) -> None:
        self._prior_gain = self._gain = prior_gain
        self._pause = _FIRST_PAUSE  # when drafting ends the next time
        self._rest = 0  # plain steps of a pause that are still to come
        self._num_to_compare = 0  # the same, of those that are taken to compare
        self._num_drafted = 0  # rounds since a plain step was timed
        self._plain_run = 0  # plain steps since the last draft
        self._is_trial = False  # the next draft is the first one after a pause

    def is_draft_next(self) -> bool:
        """Asked once a round."""
        if self._rest == 0 and self._gain < _STOP_GAIN:
            self._gain, self._is_trial = _TRIAL_GAIN, True  # that follows the pause
            self._rest, self._pause = self._pause, min(2 * self._pause, _LONGEST_PAUSE)
        if self._rest > 0:
            self._rest -= 1
            return False
        if self._num_drafted >= (_CLEAR_RUN if self._gain > _CLEAR_GAIN else _UNCLEAR_RUN):
            self._num_drafted, self._num_to_compare = 0, _PLAIN_RUN
            self._pause = _FIRST_PAUSE  # a whole run of drafts is no trial that failed
        if self._num_to_compare > 0:
            self._num_to_compare -= 1
            return False
        return True

    def begins_trial(self) -> bool:
        """Whether this round is the first one after a pause; true once."""
        begins, self._is_trial = self._is_trial, False
        return begins

    def observe_gain(self, gain: float) -> None:
        """A drafted round is expected to give so many tokens for one of plain steps."""
        self._gain += _GAIN_WEIGHT * (gain - self._gain)

    def observe_draft(self) -> None:
        self._num_drafted += 1
        self._plain_run = 0

    def observe_plain(self) -> bool:
        """A plain step was taken; whether it had the caches to itself."""
        self._plain_run += 1
        is_warm = self._plain_run > _COLD_STEPS
        if is_warm:
            self._num_drafted = 0
        return is_warm

    def end_request(self) -> None:
        """A pause goes on in the next one."""
        self._gain = (4 * self._gain + self._prior_gain) / 5
