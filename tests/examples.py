"""How much a test tries in `make test`: a third of its random examples, some of its cases.
`make test-all` tries them all.
"""

from collections.abc import Iterable
from typing import Any

import pytest
from hypothesis import settings

_ALL = "all examples"
_SHARE = 3


def choose_profile(config: pytest.Config) -> None:
    """Called before tests are imported: all examples where tests that take minutes run as well."""
    if "not long" not in config.option.markexpr:
        settings.register_profile(_ALL, settings())
        settings.load_profile(_ALL)


def examples(count: int) -> settings:
    """Decorator: so many examples, each of any duration."""
    return settings(max_examples=share(count), deadline=None)


def share(count: int) -> int:
    """Of so many repetitions, those that are tried."""
    return count if settings.get_current_profile_name() == _ALL else count // _SHARE


def mark_long(cases: Iterable[Any], *, but: tuple[Any, ...]) -> list[Any]:
    """Values for `parametrize`, of which only some are tried in `make test`."""

    def mark(case: Any) -> Any:
        values = case if isinstance(case, tuple) else (case,)
        return pytest.param(*values, marks=pytest.mark.long)

    return [case if case in but else mark(case) for case in cases]
