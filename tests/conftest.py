"""Fixtures that several parts share: real model files, and the GPU that CUDA kernels run on.

And the rule for tests that do not run: see tests/needs.py.
"""

import gc
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import pytest


def _share_cores(worker: str, num_workers: int) -> None:
    """Each process of a run in parallel keeps to its share of the cores, and so does what it
    starts: threads that wait for each other would wait for the other tests' work instead.
    """
    if hasattr(os, "sched_setaffinity"):
        cores = sorted(os.sched_getaffinity(0))
        share = cores[int(worker.removeprefix("gw")) % len(cores) :: num_workers]
        os.sched_setaffinity(0, share)
    # Libraries, and engines that are told nothing, take one thread each.
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    import draftree.config

    draftree.config.usable_cores = lambda: 1


gc.disable()  # until everything is imported: what tests are made of is never garbage

# Before numpy is imported, which counts the cores once.
if "PYTEST_XDIST_WORKER" in os.environ:
    _share_cores(
        os.environ["PYTEST_XDIST_WORKER"], int(os.environ.get("PYTEST_XDIST_WORKER_COUNT", 1))
    )

from tests.examples import choose_profile  # noqa: E402
from tests.golden import FULL_SET  # noqa: E402
from tests.kernels.share import compile_share  # noqa: E402
from tests.needs import has_browser, is_allowed, what_is_missing  # noqa: E402

if TYPE_CHECKING:
    from draftree.kernels.cuda.compile import Gpu
    from draftree.kernels.cuda.persistent import PersistentPass

MANY_TESTS = 1000  # which need most kernels of the CPU

collect_ignore = [
    *(() if FULL_SET.exists() else ("models/test_golden_full.py",)),
]
collect_ignore_glob = [] if has_browser() else ["serve/test_page_*.py"]


class Unrun:
    """Counts the tests that a run left out or skipped, also over several processes."""

    def __init__(self, config: pytest.Config) -> None:
        self._config = config
        self.left_out: Counter[str] = Counter()
        self.wrong_skips: dict[str, None] = {}  # in order, each once

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        missing = [(item, what_is_missing(item)) for item in items]
        self.left_out.update(what for _, needed in missing for what in needed)
        items[:] = [item for item, needed in missing if not needed]
        self._config.hook.pytest_deselected(items=[item for item, needed in missing if needed])

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._note(report)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        self._note(report)

    def _note(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        if report.skipped and not hasattr(report, "wasxfail"):
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else "?"
            if not is_allowed(reason):
                self.wrong_skips[f"{report.nodeid}: {reason}"] = None

    @pytest.hookimpl(trylast=True)
    def pytest_sessionfinish(self, session: pytest.Session) -> None:
        if hasattr(self._config, "workeroutput"):
            self._config.workeroutput["unrun"] = dict(self.left_out), list(self.wrong_skips)
        if self.wrong_skips and session.exitstatus == pytest.ExitCode.OK:
            session.exitstatus = pytest.ExitCode.TESTS_FAILED

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node: object) -> None:
        left_out, wrong_skips = getattr(node, "workeroutput", {}).get("unrun", ({}, []))
        self.left_out |= Counter(left_out)
        self.wrong_skips |= dict.fromkeys(wrong_skips)

    def pytest_terminal_summary(self, terminalreporter: pytest.TerminalReporter) -> None:
        if not has_browser():
            terminalreporter.write_line("left out: the page's tests, which need a browser")
        for what, count in sorted(self.left_out.items()):
            terminalreporter.write_line(f"left out: {count} tests that need {what}")
        for sentence in self.wrong_skips:
            message = "only a missing device or processor is a reason to skip (tests/needs.py)"
            terminalreporter.write_line(f"FAILED {sentence}; {message}", red=True)


def pytest_pycollect_makemodule() -> None:
    """A tokenizer that a module opens has garbage collected: only that module's own."""
    gc.freeze()


def pytest_collection_finish(session: pytest.Session) -> None:
    if "PYTEST_XDIST_WORKER" in os.environ and len(session.items) >= MANY_TESTS:
        compile_share(int(os.environ["PYTEST_XDIST_WORKER"].removeprefix("gw")))
    _freeze()
    gc.enable()


@pytest.fixture(scope="module", autouse=True)
def _freeze_after_a_file() -> Iterator[None]:
    yield
    _freeze()


def _freeze() -> None:
    """What is left by now stays: it need not be walked at every collection of garbage, of which
    opening a tokenizer or an engine asks for one.
    """
    gc.collect()
    gc.freeze()


def pytest_configure(config: pytest.Config) -> None:
    config.addinivalue_line("markers", "needs(what, is_here): left out where it is missing")
    config.pluginmanager.register(Unrun(config))
    choose_profile(config)


@pytest.fixture(scope="session")
def smollm2_path() -> Path:
    """The default model's file, downloaded when it is not there yet."""
    from draftree.weights import hub

    return hub.pull("smollm2-135m")


@pytest.fixture
def real_gpu() -> "Gpu":
    """A real one; tests that ask for it are marked gpu."""
    import torch

    from draftree.kernels.cuda.compile import gpu

    if not torch.cuda.is_available():
        pytest.skip("device: there is no CUDA device")
    return gpu(0)


@pytest.fixture(params=["emulated", pytest.param("real", marks=pytest.mark.gpu)])
def any_gpu(request: pytest.FixtureRequest) -> "Gpu":
    if request.param == "real":
        return request.getfixturevalue("real_gpu")
    from tests.kernels.emulator import emulated_gpu

    return emulated_gpu()


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> "list[PersistentPass]":
    """Passes and rounds that ran as one kernel."""
    from draftree.kernels.cuda.persistent import PersistentPass

    seen: list[PersistentPass] = []
    launch = PersistentPass.launch

    def note(self: PersistentPass) -> None:
        seen.append(self)
        launch(self)

    monkeypatch.setattr(PersistentPass, "launch", note)
    return seen
