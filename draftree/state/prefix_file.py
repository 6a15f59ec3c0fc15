"""Copies of prefixes in files, which outlive the process: one for each span and recurrent state.

A file is an npz archive, whose members have checksums. It names the engine that made it and all
tokens up to its end. What is damaged, or of another engine, counts as not there and is said once.
Files hold what users wrote: only their owner may read them.
"""

import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import numpy as np

from draftree.state.span import Parts, count_bytes

_log: Final = logging.getLogger("draftree")
_SUFFIX: Final = ".prefix.npz"
_ABANDONED_S: Final = 3600  # after which nobody writes a file any more


@dataclass(eq=False, slots=True)
class Copy:
    """Parts in main memory, or in a file until they are needed."""

    num_bytes: int
    parts: Parts | None
    path: Path | None = None

    @classmethod
    def of(cls, parts: Parts) -> "Copy":
        return cls(count_bytes(parts), parts)


@dataclass(frozen=True, slots=True)
class KeptFile:
    """One that is there, not read yet. start: of the span, which ends with the tokens; a recurrent
    state is that at the end, and starts there.
    """

    tokens: np.ndarray  # int64, from the beginning of the text
    start: int
    copy: Copy


class PrefixFolder:
    """Files of one engine in a folder that several may share. key: what decides an engine's bits.
    max_bytes: of all files in the folder together.
    """

    def __init__(self, folder: Path, key: str, max_bytes: int) -> None:
        self._folder, self._key, self._max_bytes = folder, key, max_bytes
        self._own = folder / key[:16]
        self._is_writable = True

    def scan(self) -> list[KeptFile]:
        """All that can be read, what was used longest ago first."""
        for age, path in _ages(self._own, ".prefix.[0-9]*"):
            if age < time.time() - _ABANDONED_S:
                path.unlink(missing_ok=True)
        found = (self._look(path) for _, path in sorted(_ages(self._own)))
        return [file for file in found if file is not None]

    def write(self, tokens: np.ndarray, start: int, copy: Copy) -> None:
        """Keep a copy in a file; where that is impossible, it stays in memory alone."""
        assert copy.parts is not None
        if not self._is_writable:
            return
        arrays: dict[str, Any] = {
            f"{i}.{j}": array for i, of in enumerate(copy.parts) for j, array in enumerate(of)
        }
        about: dict[str, Any] = {"key": self._key, "start": start, "bytes": copy.num_bytes}
        about["counts"] = [len(of) for of in copy.parts]
        digest = sha256(f"{self._key} {start} ".encode() + tokens.tobytes()).hexdigest()
        path = self._own / f"{digest[:32]}{_SUFFIX}"
        draft = path.with_suffix(f".{os.getpid()}")
        try:
            self._own.mkdir(mode=0o700, parents=True, exist_ok=True)
            descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
            with os.fdopen(descriptor, "wb") as file:
                text = np.frombuffer(json.dumps(about).encode(), np.uint8)
                np.savez(file, about=text, tokens=tokens, **arrays)
            draft.replace(path)
        except OSError as error:
            self._is_writable = False
            _log.warning("Earlier conversations are no longer kept on disk (%s).", error)
            with suppress(OSError):
                draft.unlink()
            return
        copy.path = path

    def read(self, copy: Copy) -> Parts | None:
        """What a file holds, which counts as a use of it; None if it is damaged."""
        assert copy.path is not None
        try:
            with np.load(copy.path, allow_pickle=False) as archive:
                counts = json.loads(archive["about"].tobytes())["counts"]
                parts = tuple(
                    tuple(archive[f"{i}.{j}"] for j in range(count))
                    for i, count in enumerate(counts)
                )
        except Exception as error:  # whatever a broken archive makes its reader raise
            _log_ignored(copy.path, error)
            return None
        with suppress(OSError):
            os.utime(copy.path)
        return parts

    def remove(self, copy: Copy) -> None:
        if copy.path is not None:
            with suppress(OSError):
                copy.path.unlink()

    def limit(self) -> None:
        """Remove files of other engines, the oldest first, until all files fit."""
        with suppress(OSError):
            self._limit()

    def _limit(self) -> None:
        sizes = [(age, path, path.stat().st_size) for age, path in sorted(_ages(self._folder))]
        excess = sum(size for _, _, size in sizes) - self._max_bytes
        for _, path, size in sizes:
            if excess > 0 and path.parent != self._own:
                path.unlink(missing_ok=True)
                excess -= size

    def _look(self, path: Path) -> KeptFile | None:
        try:
            with np.load(path, allow_pickle=False) as archive:
                about = json.loads(archive["about"].tobytes())
                tokens = np.asarray(archive["tokens"], np.int64)
            if about["key"] != self._key:
                raise ValueError("another engine made it")
            return KeptFile(tokens, int(about["start"]), Copy(int(about["bytes"]), None, path))
        except Exception as error:
            _log_ignored(path, error)
            return None


def _log_ignored(path: Path, error: Exception) -> None:
    reason = str(error).rstrip(".") or type(error).__name__
    _log.warning("%s of the prefix cache is ignored: %s.", path, reason)


def _ages(folder: Path, suffix: str = _SUFFIX) -> Iterator[tuple[float, Path]]:
    """When each file was written or used last."""
    for path in folder.rglob(f"*{suffix}"):
        with suppress(OSError):
            yield path.stat().st_mtime, path
