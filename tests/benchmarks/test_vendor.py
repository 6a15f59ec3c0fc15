"""The libraries of the page can be fetched anew, and only as they were pinned."""

import io
import json
import tarfile

import pytest

from benchmarks import vendor
from draftree.errors import BenchError


def make_archive(path, files):
    with tarfile.open(path, "w:gz") as archive:
        for name, text in files.items():
            info = tarfile.TarInfo(f"package/{name}")
            info.size = len(text)
            archive.addfile(info, io.BytesIO(text))


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """A registry of one package."""

    def pack(command, **options):
        make_archive(f"{command[-2]}/lib-1.0.0.tgz", {"dist/lib.js": b"1", "LICENSE": b"free"})
        return type("Done", (), {"stdout": "lib-1.0.0.tgz\n"})()

    monkeypatch.setattr(vendor.subprocess, "run", pack)
    folder = tmp_path / "vendor"
    folder.mkdir()
    return folder


def write_versions(folder, sha256):
    files = {"lib.js": "dist/lib.js", "deep/lib.LICENSE.txt": "LICENSE"}
    package = {"name": "lib", "version": "1.0.0", "sha256": sha256, "files": files}
    (folder / vendor.VERSIONS).write_text(json.dumps([package]))
    return package


def test_files_come_from_the_pinned_archive(npm, tmp_path, monkeypatch):
    package = write_versions(npm, "")
    archive = tmp_path / "lib.tgz"
    make_archive(archive, {"dist/lib.js": b"1", "LICENSE": b"free"})
    vendor.unpack(package, archive, npm)
    assert (npm / "lib.js").read_bytes() == b"1"
    assert (npm / "deep/lib.LICENSE.txt").read_bytes() == b"free"


def test_another_archive_is_refused(npm):
    write_versions(npm, "0" * 64)
    with pytest.raises(BenchError, match=r"lib@1.0.0 has the hash \w{64}, which is not that of"):
        vendor.main(npm)
    assert not (npm / "lib.js").exists()
