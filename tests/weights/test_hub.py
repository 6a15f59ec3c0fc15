"""Resolving names and pulling models, with sources that do as they are told."""

import fcntl
import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import pytest

from draftree.errors import FetchError
from draftree.weights import hub
from draftree.weights.catalogue import CATALOGUE, DEFAULT_MODEL, ModelEntry
from draftree.weights.file import open_checkpoint
from draftree.weights.source import (
    Fetched,
    HubSource,
    ModelFile,
    Progress,
    Report,
    Source,
    SourceError,
    WheelSource,
)
from tests.weights.fake_hub import running_hub

DATA = b"weights" * 1000
SHA = hashlib.sha256(DATA).hexdigest()
FILE = ModelFile("m.gguf", len(DATA), SHA)


@dataclass
class FakeSource:
    """Gives its data, half of it at a time when is_slow; an error instead when it has one."""

    label: str = "the shelf"
    data: bytes = DATA
    error: str | None = None
    is_slow: bool = False
    sha256: str | None = None
    starts: list[int] = field(default_factory=list)

    def fetch(self, file: ModelFile, folder: Path, report: Report) -> Fetched:
        path = folder / "file"
        here = path.read_bytes() if path.exists() else b""
        self.starts.append(len(here))
        if self.error is not None:
            raise SourceError(self.error)
        step = len(self.data) // 2 if self.is_slow else len(self.data)
        path.write_bytes(self.data[: len(here) + step])
        report(Progress(file.name, self.label, "download", len(here) + step, len(self.data)))
        if path.stat().st_size < len(self.data):
            raise SourceError("the connection broke")
        return Fetched(path, self.sha256)


def entry(*sources: Source, file: ModelFile = FILE) -> ModelEntry:
    return ModelEntry("tiny", "a test", (file,), sources)


def test_pull_verifies_and_stores(tmp_path: Path) -> None:
    seen: list[Progress] = []
    catalogue = [entry(FakeSource())]
    path = hub.pull("tiny", seen.append, catalogue, tmp_path)
    assert path == tmp_path / "tiny" / "m.gguf"
    assert path.read_bytes() == DATA
    assert [progress.stage for progress in seen] == ["download", "verify"]
    assert hub.resolve("tiny", catalogue, tmp_path) == path
    assert not list((tmp_path / ".partial").iterdir())


def test_second_pull_fetches_nothing(tmp_path: Path) -> None:
    source = FakeSource()
    for _ in range(2):
        hub.pull("TINY", None, [entry(source)], tmp_path)
    assert len(source.starts) == 1


def test_pull_goes_on_after_a_break(tmp_path: Path) -> None:
    source = FakeSource(is_slow=True)
    with pytest.raises(FetchError, match="tiny could not be downloaded from the shelf: the conn"):
        hub.pull("tiny", None, [entry(source)], tmp_path)
    with pytest.raises(FetchError, match="not downloaded; run `draftree pull tiny`"):
        hub.resolve("tiny", [entry(source)], tmp_path)
    assert hub.pull("tiny", None, [entry(source)], tmp_path).read_bytes() == DATA
    assert source.starts == [0, len(DATA) // 2]


def test_wrong_hash_names_both_and_leaves_nothing(tmp_path: Path) -> None:
    bad = b"x" * len(DATA)
    with pytest.raises(FetchError) as caught:
        hub.pull("tiny", None, [entry(FakeSource(data=bad))], tmp_path)
    assert SHA in str(caught.value) and hashlib.sha256(bad).hexdigest() in str(caught.value)
    assert not (tmp_path / "tiny" / "m.gguf").exists()
    assert not list((tmp_path / ".partial").rglob("file"))


def test_wrong_size_is_refused_without_a_hash(tmp_path: Path) -> None:
    wanted = entry(FakeSource(), file=ModelFile("m.gguf", 5))
    with pytest.raises(FetchError, match="has 7000 bytes instead of 5"):
        hub.pull("tiny", None, [wanted], tmp_path)


def test_hash_of_the_source_is_checked_where_ours_is_unknown(tmp_path: Path) -> None:
    file = ModelFile("m.gguf")
    with pytest.raises(FetchError, match="instead of 0000"):
        hub.pull("tiny", None, [entry(FakeSource(sha256="0" * 64), file=file)], tmp_path)
    hub.pull("tiny", None, [entry(FakeSource(sha256=SHA), file=file)], tmp_path)


def test_next_source_is_tried(tmp_path: Path) -> None:
    sources = FakeSource(data=b"x" * len(DATA)), FakeSource(error="down"), FakeSource()
    assert hub.pull("tiny", None, [entry(*sources)], tmp_path).read_bytes() == DATA


def test_all_failures_are_listed(tmp_path: Path) -> None:
    sources = FakeSource("the first", error="no network"), FakeSource("the second", error="gated")
    with pytest.raises(FetchError) as caught:
        hub.pull("tiny", None, [entry(*sources)], tmp_path)
    assert str(caught.value) == (
        "tiny could not be downloaded; tried the first: no network; the second: gated."
    )


def test_two_processes_do_not_write_the_same_file(tmp_path: Path) -> None:
    folder = tmp_path / ".partial" / "tiny"
    folder.mkdir(parents=True)
    with (folder / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(FetchError, match="by another process"):
            hub.pull("tiny", None, [entry(FakeSource())], tmp_path)
    hub.pull("tiny", None, [entry(FakeSource())], tmp_path)


def test_folder_that_cannot_be_written(tmp_path: Path) -> None:
    (tmp_path / "models").write_text("a file where the folder should be")
    with pytest.raises(FetchError, match="could not be stored"):
        hub.pull("tiny", None, [entry(FakeSource())], tmp_path / "models")


def test_draft_folder_needs_both_files(tmp_path: Path) -> None:
    files = (ModelFile("config.json"), ModelFile("model.safetensors"))
    catalogue = [ModelEntry("draft", "a test", files, (FakeSource(),), "tiny")]
    folder = hub.pull("draft", None, catalogue, tmp_path)
    assert folder == tmp_path / "draft" and (folder / "config.json").is_file()
    (folder / "config.json").unlink()
    with pytest.raises(FetchError, match="draftree pull draft"):
        hub.resolve("draft", catalogue, tmp_path)


def test_file_of_the_wrong_size_counts_as_missing(tmp_path: Path) -> None:
    catalogue = [entry(FakeSource())]
    path = hub.pull("tiny", None, catalogue, tmp_path)
    path.write_bytes(DATA[:-1])
    assert not hub.list_models(catalogue, tmp_path)[0].is_downloaded
    assert hub.pull("tiny", None, catalogue, tmp_path).read_bytes() == DATA


def test_resolve_takes_paths_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "my.gguf"
    path.write_bytes(b"")
    assert hub.resolve(path) == hub.resolve(str(path)) == path
    monkeypatch.setenv("HOME", str(tmp_path))
    assert hub.resolve("~/my.gguf") == path


@pytest.mark.parametrize(
    "name",
    ["", "nothing", "nothing.gguf", "/no/such.gguf", "a/b.gguf", "a\0b", "n" * 5000, "~nobody0/x"],
)
def test_unknown_names_list_what_is_known(tmp_path: Path, name: str) -> None:
    with pytest.raises(FetchError, match=r"neither a file nor a known model.*smollm2-135m"):
        hub.resolve(name, root=tmp_path)
    with pytest.raises(FetchError, match="neither a file nor a known model"):
        hub.pull(name, root=tmp_path)


@pytest.mark.parametrize("name", ["org/repo/m.Q4_0.gguf", "org/repo:m.Q4_0.gguf"])
def test_hub_files_by_name(name: str) -> None:
    found = hub.find_entry(name)
    assert found is not None
    assert (found.name, found.files) == ("org/repo/m.Q4_0.gguf", (ModelFile("m.Q4_0.gguf"),))
    assert found.sources == (HubSource("org/repo"),)


def test_split_hub_file_is_all_its_parts() -> None:
    found = hub.find_entry("org/repo/sub/m-00001-of-00003.gguf")
    assert found is not None
    assert [file.name for file in found.files] == [
        f"sub/m-0000{number}-of-00003.gguf" for number in (1, 2, 3)
    ]


@pytest.mark.parametrize(
    "name", ["org/repo/../x.gguf", "../repo/x.gguf", "org/repo/.x.gguf", "org//x.gguf", "a/b\n"]
)
def test_hub_names_cannot_leave_the_cache(name: str) -> None:
    assert hub.find_entry(name) is None


def test_list_shows_what_is_here(tmp_path: Path) -> None:
    catalogue = [entry(FakeSource())]
    (before,) = hub.list_models(catalogue, tmp_path)
    assert (before.is_downloaded, before.num_bytes) == (False, len(DATA))
    hub.pull("tiny", None, catalogue, tmp_path)
    for name in ("x.gguf", "s-00001-of-00002.gguf", "s-00002-of-00002.gguf"):
        path = tmp_path / "hub" / "org" / "repo" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(b"123")
    found = {
        status.entry.name: (status.is_downloaded, status.num_bytes)
        for status in hub.list_models(catalogue, tmp_path)
    }
    assert found == {
        "tiny": (True, len(DATA)),
        "org/repo/x.gguf": (True, 3),
        "org/repo/s-00001-of-00002.gguf": (True, 6),
    }
    assert hub.resolve("org/repo:x.gguf", root=tmp_path) == path.with_name("x.gguf")


def test_draft_is_found_by_its_target(tmp_path: Path) -> None:
    draft = ModelEntry("tiny-draft", "", (ModelFile("d.gguf"),), (FakeSource(),), target="tiny")
    catalogue = [entry(FakeSource()), draft]
    assert hub.draft_for("tiny", catalogue, tmp_path) is None
    path = hub.pull("tiny-draft", None, catalogue, tmp_path)
    assert hub.draft_for("tiny", catalogue, tmp_path) == path
    assert hub.draft_for("/elsewhere/m.gguf", catalogue, tmp_path) == path
    assert hub.draft_for("other", catalogue, tmp_path) is None


@pytest.mark.parametrize(
    ("target", "file"),
    [
        ("qwen2.5-coder-0.5b", "qwen2.5-coder-0.5b-instruct-q4_k_m.gguf"),
        ("smollm2-135m", "SmolLM2-135M-Instruct.Q4_1.gguf"),
    ],
)
def test_a_draft_in_the_package_is_found_by_name_and_by_file(
    target: str, file: str, tmp_path: Path
) -> None:
    find = partial(hub.draft_for, root=tmp_path / "models", data=tmp_path)
    assert find(target) is None
    stand_in = tmp_path / f"{target}-dflash.q4_1.gguf"
    stand_in.touch()
    assert find(target) == find(f"/elsewhere/{file}") == stand_in
    assert find("qwen2.5-coder-1.5b") is None
    assert hub.target_of(stand_in) == target


def test_the_target_of_a_known_draft_and_what_its_files_were_made_from() -> None:
    assert hub.target_of("qwen3.6-27b-dflash-q8_0") == "qwen3.6-27b"
    assert hub.target_of("/elsewhere/dflash-draft-3.6-q8_0.gguf") == "qwen3.6-27b"
    assert hub.target_of("/elsewhere/smollm2-135m-dflash.q4_1.gguf") == "smollm2-135m"
    assert hub.target_of("smollm2-135m") is None
    assert hub.find_origin("SmolLM2-135m") == "HuggingFaceTB/SmolLM2-135M-Instruct"
    assert hub.find_origin("/elsewhere/m.gguf") is None


def each(check: Callable[[ModelEntry], bool]) -> bool:
    return all(check(known) for known in CATALOGUE)


def test_catalogue_is_sound() -> None:
    names = [known.name for known in CATALOGUE]
    assert len(set(names)) == len(names) and DEFAULT_MODEL in names
    assert each(lambda known: known.name == known.name.lower() and "/" not in known.name)
    assert each(lambda known: known.target is None or known.target in names)
    assert each(lambda known: bool(known.files) and bool(known.sources) and bool(known.summary))
    for known in CATALOGUE:
        has_wheel = any(isinstance(source, WheelSource) for source in known.sources)
        # Packages are not trusted, so each file that may come from one has its hash here.
        assert not has_wheel or all(file.sha256 and file.num_bytes for file in known.files)


def test_default_model_is_real(smollm2_path: Path) -> None:
    assert hashlib.sha256(smollm2_path.read_bytes()).hexdigest() == CATALOGUE[0].files[0].sha256
    checkpoint = open_checkpoint(smollm2_path)
    assert checkpoint.architecture == "llama" and len(checkpoint.tensors) == 272
    assert checkpoint.tensors["token_embd.weight"].shape == (49152, 576)
    assert len(checkpoint.metadata["tokenizer.ggml.tokens"]) == 49152


def _git_id(data: bytes) -> str:
    return hashlib.sha1(b"blob %d\0" % len(data) + data).hexdigest()


@pytest.mark.parametrize(
    ("etag", "words"),
    [
        (SHA, None),
        (_git_id(DATA), None),
        ("0" * 64, "instead of 0000"),
        ("0" * 40, "instead of 0000"),
        ("version-7", r"states no checksum of m\.gguf"),
    ],
)
def test_what_a_hub_says_of_a_file_is_checked(tmp_path: Path, etag: str, words: str | None) -> None:
    """A large file's SHA-256, or the name that git has for a small one."""
    with running_hub() as running:
        running.files["org/repo/m.gguf"] = DATA
        running.etags["org/repo/m.gguf"] = etag
        wanted = entry(HubSource("org/repo", running.endpoint), file=ModelFile("m.gguf"))
        if words is None:
            assert hub.pull("tiny", None, [wanted], tmp_path).read_bytes() == DATA
            return
        with pytest.raises(FetchError, match=words):
            hub.pull("tiny", None, [wanted], tmp_path)
        assert not (tmp_path / "tiny" / "m.gguf").exists()
