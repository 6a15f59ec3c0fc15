"""How many random examples a test tries: a third of them in `make test`, all in `make test-all`."""

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
    has_all = settings.get_current_profile_name() == _ALL
    return settings(max_examples=count if has_all else count // _SHARE, deadline=None)
