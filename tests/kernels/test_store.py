"""Compiled code on disk: whole, of the right key, or not there."""

import logging
from pathlib import Path

import pytest

from draftree.kernels.cpu.store import is_writable, read_code, write_code

KEY, OTHER = "ab" * 32, "ab" * 31 + "cd"
CODE = bytes(range(256)) * 3 + b"\n\n"


def test_what_was_written_is_read(tmp_path: Path) -> None:
    write_code(tmp_path / "new", "add", KEY, "cfunc.add", CODE)
    assert read_code(tmp_path / "new", "add", KEY) == ("cfunc.add", CODE)
    assert [path.suffix for path in (tmp_path / "new").iterdir()] == [".o"]


def test_another_key_with_the_same_beginning_is_no_hit(tmp_path: Path) -> None:
    write_code(tmp_path, "add", KEY, "cfunc.add", CODE)
    assert read_code(tmp_path, "add", OTHER) is None
    assert read_code(tmp_path, "sub", KEY) is None


def test_a_damaged_file_is_not_there(tmp_path: Path) -> None:
    write_code(tmp_path, "add", KEY, "cfunc.add", CODE)
    (path,) = tmp_path.iterdir()
    whole = path.read_bytes()
    for length in (*range(0, len(whole), 7), len(whole) - 1):
        path.write_bytes(whole[:length])
        assert read_code(tmp_path, "add", KEY) is None
        path.write_bytes(whole[:length] + bytes([whole[length] ^ 1]) + whole[length + 1 :])
        assert read_code(tmp_path, "add", KEY) is None
    path.write_bytes(whole + b"\0")
    assert read_code(tmp_path, "add", KEY) is None
    path.write_bytes(whole)
    assert read_code(tmp_path, "add", KEY) == ("cfunc.add", CODE)


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_bytes(b"")
    folder = tmp_path / "file" / "kernels"
    with caplog.at_level(logging.WARNING, logger="draftree"):
        for _ in range(2):
            assert not is_writable(folder)
            write_code(folder, "add", KEY, "cfunc.add", CODE)
    assert [record.message[:34] for record in caplog.records] == [
        "Compiling CPU kernels at every sta"
    ]
    assert read_code(folder, "add", KEY) is None
