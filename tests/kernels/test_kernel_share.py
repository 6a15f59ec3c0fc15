"""Processes that compile kernels together."""

from pathlib import Path

import pytest

from draftree.kernels.cpu.store import write_code
from tests.kernels import share


class Missing:
    def __init__(self, name: str, folder: Path, made: list[str]) -> None:
        self.name, self.key, self._folder, self._made = name, name * 32, folder, made

    @property
    def address(self) -> int:
        self._made.append(self.name)
        write_code(self._folder, self.name, self.key, "symbol", b"code")
        return 1


def test_two_begin_at_both_ends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []
    kernels = [Missing(name, tmp_path, made) for name in "abc"]
    monkeypatch.setattr(share, "list_kernels", lambda: kernels)
    monkeypatch.setattr(share, "code_dir", lambda: tmp_path)
    share.compile_share(1)
    assert made == ["c", "b", "a"]
    next(tmp_path.glob("b-*")).unlink()
    share.compile_share(0)
    assert made == ["c", "b", "a", "b"]


def test_kernels_of_all_tests_are_listed() -> None:
    names = [kernel.name for kernel in share.list_kernels()]
    assert names == sorted(names) and {"attention_kernel", "choose_filtered", "run"} <= {*names}
