"""Copies of prefixes on disk: found again by another store, or ignored where they are damaged."""

import logging
import os
import stat
from pathlib import Path

import numpy as np
import pytest

from draftree.state.prefix import PrefixStore
from draftree.state.prefix_file import PrefixFolder
from draftree.state.span import Parts

LARGE = 1 << 30
TEXTS = ([1, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 9, 9], [1, 2, 3, 4, 5, 6, 7, 8, 3, 1], [7, 7])


def _open(folder: Path, *, is_recurrent: bool, key: str = "k", size: int = LARGE) -> PrefixStore:
    kept = PrefixFolder(folder, key * 20, size)
    return PrefixStore(size, is_recurrent=is_recurrent, span_len=4, folder=kept)


def _insert(store: PrefixStore, tokens: list[int]) -> None:
    def copy(start: int, end: int) -> Parts:
        return ((np.array(tokens[start:end], np.float16),), (), (np.arange(start, end),) * 2)

    store.insert(tokens, copy, lambda: ((np.full(3, sum(tokens)),),))


def _fill(folder: Path, *, is_recurrent: bool, **options: object) -> PrefixStore:
    store = _open(folder, is_recurrent=is_recurrent, **options)  # type: ignore[arg-type]
    for tokens in TEXTS:
        _insert(store, tokens)
    store.write(lambda: False)
    return store


def _files(folder: Path) -> list[Path]:
    return sorted(folder.rglob("*.npz"))


def _check(store: PrefixStore, tokens: list[int], *, is_recurrent: bool) -> int:
    match = store.find(tokens)
    known: list[int] = []
    for span in match.spans:
        assert span.start == len(known) and len(span.parts) == 3 and span.parts[1] == ()
        known += span.parts[0][0][: span.end - span.start].astype(int).tolist()
        assert np.array_equal(span.parts[2][1][:1], [span.start])
    assert known == tokens[: len(known)] and len(known) >= match.length
    if is_recurrent and match.length:
        assert match.recurrent[0][0].tolist() == [sum(tokens[: match.length])] * 3
    return match.length


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_another_store_finds_all_of_it(tmp_path: Path, is_recurrent: bool) -> None:
    first = _fill(tmp_path, is_recurrent=is_recurrent)
    again = _open(tmp_path, is_recurrent=is_recurrent)
    assert again.num_bytes == first.num_bytes
    for tokens in TEXTS:
        assert _check(again, [*tokens, 5], is_recurrent=is_recurrent) == len(tokens)
    before = _files(tmp_path)
    again.write(lambda: False)
    assert _files(tmp_path) == before


def test_only_the_owner_reads_the_files(tmp_path: Path) -> None:
    _fill(tmp_path / "new", is_recurrent=True)
    assert _files(tmp_path)
    for path in _files(tmp_path):
        assert stat.S_IMODE(path.stat().st_mode) == 0o600
        assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700


def test_files_are_read_when_they_are_needed(tmp_path: Path) -> None:
    _fill(tmp_path, is_recurrent=False)
    store = _open(tmp_path, is_recurrent=False)
    for path in _files(tmp_path):
        path.unlink()
    before = store.num_bytes
    assert store.find([5, 5]).length == 0 and store.num_bytes == before > 0
    assert store.find(TEXTS[0]).length == 0 and store.num_bytes < before


@pytest.mark.parametrize("is_recurrent", [False, True])
@pytest.mark.parametrize("damage", ["flip", "cut", "empty", "text"])
def test_a_damaged_file_is_ignored(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, damage: str, is_recurrent: bool
) -> None:
    _fill(tmp_path, is_recurrent=is_recurrent)
    whole = {path: path.read_bytes() for path in _files(tmp_path)}
    for path, content in whole.items():
        for other, bytes_ in whole.items():
            other.write_bytes(bytes_)
        place = content.index(b"2.0.npy") if b"2.0.npy" in content else content.index(b"0.0.npy")
        flipped = bytearray(content)
        flipped[place + 140] ^= 255
        path.write_bytes(
            {"flip": bytes(flipped), "cut": content[:-40], "empty": b"", "text": b"hello"}[damage]
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING, "draftree"):
            store = _open(tmp_path, is_recurrent=is_recurrent)
            lengths = [_check(store, tokens, is_recurrent=is_recurrent) for tokens in TEXTS]
        assert lengths != [len(tokens) for tokens in TEXTS]
        assert len([r for r in caplog.records if str(path) in r.getMessage()]) == 1
        store.clear()
        assert store.num_bytes == 0


def test_files_of_another_engine_are_left_alone_until_room_is_short(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    _fill(tmp_path, is_recurrent=False, key="a")
    others = _files(tmp_path)
    store = _fill(tmp_path, is_recurrent=False, key="b")
    assert _check(store, TEXTS[0], is_recurrent=False) == len(TEXTS[0])
    assert set(others) < set(_files(tmp_path))
    PrefixFolder(tmp_path, "b" * 20, 1).limit()
    assert not set(others) & set(_files(tmp_path))
    own = _files(tmp_path)
    stranger = own[0].with_name(f"stranger{''.join(own[0].suffixes)}")
    _fill(tmp_path, is_recurrent=False, key="a")
    os.replace(next(path for path in _files(tmp_path) if path not in own), stranger)
    with caplog.at_level(logging.WARNING, "draftree"):
        assert _check(_open(tmp_path, is_recurrent=False, key="b"), TEXTS[1], is_recurrent=False)
    assert "another engine" in caplog.text


@pytest.mark.parametrize("is_recurrent", [False, True])
def test_what_is_given_up_is_removed_from_disk(tmp_path: Path, is_recurrent: bool) -> None:
    store = _fill(tmp_path, is_recurrent=is_recurrent)
    num_files = len(_files(tmp_path))
    store.max_bytes = store.num_bytes // 2
    store.reserve(0)
    assert 0 < len(_files(tmp_path)) < num_files
    again = _open(tmp_path, is_recurrent=is_recurrent)
    assert again.num_bytes == store.num_bytes
    store.clear()
    assert _files(tmp_path) == []


def test_what_was_used_last_stays_when_a_smaller_store_opens(tmp_path: Path) -> None:
    _fill(tmp_path, is_recurrent=True)
    for age, path in enumerate(_files(tmp_path)):
        os.utime(path, (age, age))
    used = _open(tmp_path, is_recurrent=True)
    assert _check(used, TEXTS[1], is_recurrent=True) == len(TEXTS[1])
    small = _open(tmp_path, is_recurrent=True, size=used.num_bytes // 2)
    assert _check(small, TEXTS[1], is_recurrent=True) == len(TEXTS[1])
    assert small.num_bytes <= used.num_bytes // 2


def test_writing_stops_when_asked_and_goes_on_later(tmp_path: Path) -> None:
    whole = _fill(tmp_path / "whole", is_recurrent=True)
    store = _open(tmp_path / "part", is_recurrent=True)
    for tokens in TEXTS:
        _insert(store, tokens)
    answers = iter([False, False, True])
    store.write(lambda: next(answers))
    assert len(_files(tmp_path / "part")) == 2
    store.write(lambda: False)
    assert len(_files(tmp_path / "part")) == len(_files(tmp_path / "whole"))
    assert whole.num_bytes == store.num_bytes


def test_a_folder_that_cannot_be_written_is_said_once(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").write_text("in the way")
    with caplog.at_level(logging.WARNING, "draftree"):
        store = _fill(tmp_path / "file", is_recurrent=True)
        store.write(lambda: False)
    assert len(caplog.records) == 1
    assert _check(store, TEXTS[0], is_recurrent=True) == len(TEXTS[0])


def test_abandoned_drafts_are_removed(tmp_path: Path) -> None:
    _fill(tmp_path, is_recurrent=False)
    folder = _files(tmp_path)[0].parent
    old, new = folder / "x.prefix.123", folder / "y.prefix.123"
    for path in (old, new):
        path.write_bytes(b"")
    os.utime(old, (0, 0))
    _open(tmp_path, is_recurrent=False)
    assert not old.exists() and new.exists()
