"""What tells one reply from another, beside its text: the token of its ids, its time, its seed.

Given from outside, it lets a reply be written twice in the same events; see `is_repeatable`.
"""

import secrets
import time
import uuid
from dataclasses import dataclass


def new_token() -> str:
    return uuid.uuid4().hex


@dataclass(frozen=True, slots=True)
class Identity:
    """seed: of requests that give none. is_repeatable: a stream has one event a piece of text,
    however fast they come, so that another run of the same request has the same events. begun: the
    tokens of each reply that an earlier run has told.
    """

    token: str
    created: int
    seed: int
    is_repeatable: bool = False
    begun: tuple[tuple[int, ...], ...] = ()

    @classmethod
    def new(cls, *, is_repeatable: bool = False) -> "Identity":
        return cls(new_token(), int(time.time()), secrets.randbits(63), is_repeatable)
