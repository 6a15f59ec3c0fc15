"""Compiled code on disk: a file for each function, written whole or not at all.

A file is a mark of this format, a digest of all that follows, the key that says what was compiled
for which machine, then the name of the function in the object and the object. Whatever is not
exactly what was asked for counts as not there.
"""

import hashlib
import logging
import os
from contextlib import suppress
from functools import cache
from pathlib import Path

_log = logging.getLogger("draftree")
_MARK = b"draftree code 1\n"
_DIGEST_BYTES = 32


def read_code(folder: Path, name: str, key: str) -> tuple[str, bytes] | None:
    """The symbol and the object that were kept, if they are there and whole."""
    try:
        content = _path(folder, name, key).read_bytes()
    except OSError:
        return None
    body = content[len(_MARK) + _DIGEST_BYTES :]
    if content[: -len(body)] != _MARK + hashlib.sha256(body).digest():
        return None
    kept_key, symbol, code = body.split(b"\n", 2)
    return (symbol.decode(), code) if kept_key == key.encode() else None


def write_code(folder: Path, name: str, key: str, symbol: str, code: bytes) -> None:
    """Keep it, if the folder can be written; another process may do the same at the same time."""
    if not is_writable(folder):
        return
    body = b"\n".join((key.encode(), symbol.encode(), code))
    path = _path(folder, name, key)
    draft = path.with_suffix(f".{os.getpid()}")
    with suppress(OSError):
        draft.write_bytes(_MARK + hashlib.sha256(body).digest() + body)
        draft.replace(path)


@cache
def is_writable(folder: Path) -> bool:
    """Asked whenever something is compiled: says once why this takes a while, or always will."""
    try:
        is_first = not folder.exists()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"probe.{os.getpid()}"
        probe.touch()
        probe.unlink()
    except OSError as error:
        _log.warning("Compiling CPU kernels at every start: they cannot be kept (%s).", error)
        return False
    if is_first:
        _log.warning("Compiling CPU kernels for this machine; this happens once.")
    return True


def _path(folder: Path, name: str, key: str) -> Path:
    return folder / f"{name}-{key[:16]}.o"
