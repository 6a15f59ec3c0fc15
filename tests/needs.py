"""What some tests need that `make test` does not install: a browser, another program, a download.

Such a test is left out where that is missing, and the run's last lines say so. Only a missing
device or processor is a reason to skip: the reason then begins with one of SKIP_REASONS.
"""

import shutil
from importlib.util import find_spec
from pathlib import Path

import pytest

SKIP_REASONS = ("device: ", "processor: ", "system: ")
BROWSERS = ("chromium", "chromium-browser", "google-chrome", "google-chrome-stable", "chrome")


def needs(what: str, is_here: bool) -> pytest.MarkDecorator:
    """Leave the test out unless `what` is here."""
    return pytest.mark.needs(what, is_here)


def needs_package(name: str) -> pytest.MarkDecorator:
    return needs(f"the package {name}", has_package(name))


def has_package(name: str) -> bool:
    try:
        return find_spec(name) is not None
    except ModuleNotFoundError:  # of a dotted name, the first part
        return False


def has_browser() -> bool:
    own = Path.home() / ".cache" / "ms-playwright"
    has_any = any(map(shutil.which, BROWSERS)) or any(own.glob("chromium*"))
    return has_package("playwright") and has_any


def what_is_missing(item: pytest.Item) -> list[str]:
    """What a test needs and does not find."""
    missing = [mark.args[0] for mark in item.iter_markers("needs") if not mark.args[1]]
    names = {*getattr(item, "fixturenames", ()), *vars(getattr(item, "module", item))}
    if names & {"any_gpu", "emulated_gpu"} and not shutil.which("g++"):
        missing.append("the C++ compiler g++")
    return missing


def is_allowed(reason: str) -> bool:
    """Whether a test may be skipped for this reason."""
    return reason.removeprefix("Skipped: ").startswith(SKIP_REASONS)
