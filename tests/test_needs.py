"""Tests that do not run: left out where a tool is missing, skipped only for want of a device."""

from types import SimpleNamespace

import pytest

from tests.conftest import Unrun
from tests.golden import DATA, golden
from tests.needs import is_allowed, needs, needs_package, what_is_missing


def finish(*reasons: str) -> Unrun:
    unrun = Unrun(SimpleNamespace())
    for reason in reasons:
        longrepr = ("tests/test_x.py", 3, f"Skipped: {reason}")
        unrun.pytest_runtest_logreport(
            SimpleNamespace(nodeid="tests/test_x.py::test_y", skipped=True, longrepr=longrepr)
        )
    return unrun


@pytest.mark.parametrize("is_wrong", [True, False])
def test_a_skip_for_another_reason_fails_the_run(is_wrong: bool) -> None:
    unrun = finish("device: there is no GPU", "processor: not this one")
    if is_wrong:
        unrun = finish("device: there is no GPU", "the reference file is not here")
    session = SimpleNamespace(exitstatus=pytest.ExitCode.OK)
    unrun.pytest_sessionfinish(session)
    assert session.exitstatus == (pytest.ExitCode.TESTS_FAILED if is_wrong else pytest.ExitCode.OK)
    assert [sentence.rpartition(": ")[2] for sentence in unrun.wrong_skips] == (
        ["the reference file is not here"] if is_wrong else []
    )


def test_reasons() -> None:
    assert is_allowed("Skipped: device: none") and is_allowed("processor: old")
    assert not is_allowed("got empty parameter set for (name)") and not is_allowed("a device: x")


def test_a_test_is_left_out_where_a_tool_is_missing() -> None:
    def item(*marks: pytest.MarkDecorator) -> SimpleNamespace:
        return SimpleNamespace(iter_markers=lambda _: [one.mark for one in marks])

    marks = (needs("a tool", False), needs("another", True), needs_package("no_such.package"))
    items, left = [item(*marks), item(needs_package("json")), item()], []
    kept = items[1:]
    assert what_is_missing(items[0]) == ["a tool", "the package no_such.package"]
    hook = SimpleNamespace(pytest_deselected=lambda items: left.extend(items))
    unrun = Unrun(SimpleNamespace(hook=hook))
    unrun.pytest_collection_modifyitems(items)
    assert items == kept and len(left) == 1
    assert unrun.left_out == {"a tool": 1, "the package no_such.package": 1}


def test_packed_references_come_out_whole() -> None:
    """The rebuilt draft is the converter's file to the bit, which its checksum says."""
    assert golden("dflash/tiny-dflash-A-F16.gguf").stat().st_size == 5_124_224
    names = {path.name for path in golden("dflash/zlab").iterdir()}
    assert names == {"config.json", "config_sliding_window.json", "model.safetensors"}
    assert golden("ddtree/ddtree.npz").parent == DATA / "ddtree"
    with pytest.raises(FileNotFoundError):
        golden("dense/no-such-file.npz")
