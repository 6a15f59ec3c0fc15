"""Finding and fetching models: a path, a catalogue name, or a file on the model hub.

In: what the user typed. Out: the path of a model on this machine. Downloads land in a folder of
their own and are renamed into the cache only when complete and verified. Knows nothing of what is
inside the files.
"""

import fcntl
import hashlib
import re
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from draftree import env
from draftree.errors import FetchError
from draftree.weights.catalogue import CATALOGUE, PACKAGED_DRAFTS, ModelEntry
from draftree.weights.source import (
    Fetched,
    HubSource,
    ModelFile,
    Progress,
    Report,
    Source,
    SourceError,
)

_DATA = Path(__file__).parents[1] / "data"
_CHUNK_BYTES = 4 << 20
_PART = r"[A-Za-z0-9][A-Za-z0-9._-]{0,95}"
_HUB_FILE = re.compile(rf"(?P<repo>{_PART}/{_PART})[/:](?P<file>{_PART}(?:/{_PART}){{0,4}}\.gguf)")
_HUB_FOLDER = re.compile(rf"{_PART}/{_PART}")
_LATER_PART = re.compile(r"-(?!00001)\d{5}-of-\d{5}\.gguf$")
_SPLIT = re.compile(r"(?P<stem>.+)-00001-of-(?P<count>\d{5})\.gguf")


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """A known model and whether it is here. num_bytes: on disk, or as promised, if known."""

    entry: ModelEntry
    path: Path
    is_downloaded: bool
    num_bytes: int | None


def models_dir() -> Path:
    return env.cache_dir() / "models"


def find_entry(name: str, catalogue: Sequence[ModelEntry] = CATALOGUE) -> ModelEntry | None:
    """The model a name stands for, in the catalogue or on the hub.

    On the hub: `org/repo/file.gguf` or `org/repo:file.gguf`, and `org/repo` for a DFlash folder.
    """
    for entry in catalogue:
        if entry.name == name.lower():
            return entry
    if match := _HUB_FILE.fullmatch(name):
        repo, file = match["repo"], match["file"]
        files = tuple(ModelFile(part) for part in _split_names(file))
        return ModelEntry(f"{repo}/{file}", "from the hub", files, (HubSource(repo),))
    if _HUB_FOLDER.fullmatch(name) and not name.endswith(".gguf"):
        files = (ModelFile("config.json"), ModelFile("model.safetensors"))
        return ModelEntry(name, "from the hub", files, (HubSource(name),))
    return None


def resolve(
    name_or_path: str | Path, catalogue: Sequence[ModelEntry] = CATALOGUE, root: Path | None = None
) -> Path:
    """The path of a model that is on this machine; a FetchError says how to get one that is not."""
    text = str(name_or_path)
    if text and (path := _existing_path(text)) is not None:
        return path
    entry = find_entry(text, catalogue)
    if entry is None:
        raise FetchError(_unknown(text, catalogue))
    root = root or models_dir()
    if not _is_downloaded(entry, root):
        raise FetchError(f"{entry.name} is not downloaded; run `draftree pull {entry.name}`.")
    return _path_of(entry, root)


def usual_draft(name: str) -> str | None:
    """The name of the draft that is downloaded with a target."""
    drafts = (entry.name for entry in CATALOGUE if entry.target == name.lower() and entry.is_usual)
    return next(drafts, None)


def draft_for(
    name_or_path: str | Path,
    catalogue: Sequence[ModelEntry] = CATALOGUE,
    root: Path | None = None,
    data: Path = _DATA,
) -> Path | None:
    """The first downloaded draft that the catalogue pairs with a target (a name or a file), or the
    one that comes with the package, in the folder data.
    """
    text, root = str(name_or_path), root or models_dir()
    file_name = Path(text).name
    targets = {
        entry.name
        for entry in catalogue
        if entry.name == text.lower() or file_name == Path(entry.files[0].name).name
    }
    for entry in catalogue:
        if entry.target in targets and _is_downloaded(entry, root):
            return _path_of(entry, root)
    for target in sorted(targets & PACKAGED_DRAFTS.keys()):
        path = data / PACKAGED_DRAFTS[target]
        if path.is_file():
            return path
    return None


def target_of(draft: str | Path) -> str | None:
    """The name of the target that a known draft (a name or a file) was trained for."""
    text, file_name = str(draft).lower(), Path(draft).name
    for entry in CATALOGUE:
        if entry.target and (entry.name == text or file_name == Path(entry.files[0].name).name):
            return entry.target
    return next((name for name, file in PACKAGED_DRAFTS.items() if file == file_name), None)


def find_origin(name: str) -> str | None:
    """The hub's name of the original that the files of a known model were made from."""
    return next((entry.origin for entry in CATALOGUE if entry.name == name.lower()), None)


def list_models(
    catalogue: Sequence[ModelEntry] = CATALOGUE, root: Path | None = None
) -> list[ModelStatus]:
    """Every model of the catalogue, then those that were pulled from the hub by file name."""
    root = root or models_dir()
    hub = root / "hub"
    names = [path.relative_to(hub).as_posix() for path in hub.rglob("*.gguf")]
    names += [path.parent.relative_to(hub).as_posix() for path in hub.glob("*/*/config.json")]
    named = (find_entry(name) for name in sorted(names) if not _LATER_PART.search(name))
    extra = [entry for entry in named if entry is not None and _is_downloaded(entry, root)]
    return [_status(entry, root) for entry in (*catalogue, *extra)]


def pull(
    name: str,
    progress: Report | None = None,
    catalogue: Sequence[ModelEntry] = CATALOGUE,
    root: Path | None = None,
) -> Path:
    """Download a model unless it is here already, and return its path."""
    entry = find_entry(name, catalogue)
    if entry is None:
        raise FetchError(_unknown(name, catalogue))
    root = root or models_dir()
    if _is_downloaded(entry, root):
        return _path_of(entry, root)
    report = progress or (lambda _: None)
    partial = root / ".partial" / entry.name.replace("/", "--")
    try:
        partial.mkdir(parents=True, exist_ok=True)
        with _locked(partial, entry.name):
            for file in entry.files:
                final = _folder_of(entry, root) / file.name
                if not _is_whole(final, file):
                    fetched = _fetch_verified(entry, file, partial, report)
                    final.parent.mkdir(parents=True, exist_ok=True)
                    fetched.replace(final)
            shutil.rmtree(partial, ignore_errors=True)
    except OSError as error:
        raise FetchError(f"{entry.name} could not be stored in {root}: {error}.") from error
    return _path_of(entry, root)


def _fetch_verified(entry: ModelEntry, file: ModelFile, partial: Path, report: Report) -> Path:
    """The file from the first source that gives it whole."""
    failures: list[str] = []
    for index, source in enumerate(entry.sources):
        # Each source has its own folder, which stays after a failure so that it can go on there.
        folder = partial / f"{index}"
        folder.mkdir(exist_ok=True)
        try:
            fetched = source.fetch(file, folder, report)
            _verify(file, source, fetched, folder, report)
            return fetched.path
        except SourceError as error:
            failures.append(f"{source.label}: {error}")
    if len(failures) == 1:
        raise FetchError(f"{entry.name} could not be downloaded from {failures[0]}.")
    tried = "; ".join(failures)
    raise FetchError(f"{entry.name} could not be downloaded; tried {tried}.")


def _verify(
    file: ModelFile, source: Source, fetched: Fetched, folder: Path, report: Report
) -> None:
    """Compare size and hash with what is known; all that led to a wrong file is deleted."""
    num_bytes = fetched.path.stat().st_size
    expected = file.sha256 or fetched.checksum
    if file.num_bytes is not None and num_bytes != file.num_bytes:
        shutil.rmtree(folder, ignore_errors=True)
        raise SourceError(f"{file.name} has {num_bytes} bytes instead of {file.num_bytes}")
    if expected is None:
        return
    is_git = len(expected) == 40
    digest = hashlib.sha1(b"blob %d\0" % num_bytes) if is_git else hashlib.sha256()
    num_done = 0
    with fetched.path.open("rb") as data:
        while chunk := data.read(_CHUNK_BYTES):
            digest.update(chunk)
            num_done += len(chunk)
            report(Progress(file.name, source.label, "verify", num_done, num_bytes))
    if digest.hexdigest() != expected:
        shutil.rmtree(folder, ignore_errors=True)
        raise SourceError(
            f"{file.name} has the checksum {digest.hexdigest()} instead of {expected}, and was "
            "deleted"
        )


@contextmanager
def _locked(partial: Path, name: str) -> Iterator[None]:
    """Keep other processes from writing the same partial files."""
    with (partial / "lock").open("w") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise FetchError(f"{name} is being downloaded by another process.") from None
        yield


def _existing_path(text: str) -> Path | None:
    try:
        path = Path(text).expanduser()
        return path if path.exists() else None
    except (OSError, RuntimeError, ValueError):
        return None  # too long, an unknown user's home, or not a path at all


def _folder_of(entry: ModelEntry, root: Path) -> Path:
    """Where an entry's files lie. Hub references keep their repository's name."""
    source = entry.sources[0]
    if "/" in entry.name and isinstance(source, HubSource):
        return root / "hub" / source.repo
    return root / entry.name


def _path_of(entry: ModelEntry, root: Path) -> Path:
    folder = _folder_of(entry, root)
    return folder if entry.is_folder else folder / entry.files[0].name


def _is_whole(path: Path, file: ModelFile) -> bool:
    return path.is_file() and file.num_bytes in (None, path.stat().st_size)


def _is_downloaded(entry: ModelEntry, root: Path) -> bool:
    return all(_is_whole(_folder_of(entry, root) / file.name, file) for file in entry.files)


def _status(entry: ModelEntry, root: Path) -> ModelStatus:
    is_downloaded = _is_downloaded(entry, root)
    num_bytes = entry.num_bytes
    if is_downloaded:
        folder = _folder_of(entry, root)
        num_bytes = sum((folder / file.name).stat().st_size for file in entry.files)
    return ModelStatus(entry, _path_of(entry, root), is_downloaded, num_bytes)


def _split_names(file: str) -> list[str]:
    """All parts of a split GGUF, given its first; else the file itself."""
    match = _SPLIT.fullmatch(file)
    if match is None:
        return [file]
    count = min(int(match["count"]), 1000)
    return [f"{match['stem']}-{i:05d}-of-{match['count']}.gguf" for i in range(1, count + 1)]


def _unknown(name: str, catalogue: Sequence[ModelEntry]) -> str:
    names = ", ".join(entry.name for entry in catalogue)
    return (
        f"{name!r} is neither a file nor a known model; give a path, a hub file as "
        f"org/repo/file.gguf, or one of: {names}."
    )
