"""`python -m benchmarks.vendor`: the libraries of the server's page, as their authors built them.

In: draftree/serve/page/vendor/versions.json, which pins every package and the hash of its archive.
Out: the files beside it. Needs npm; nothing of it runs when draftree is installed or served.
"""

import hashlib
import json
import subprocess
import tarfile
import tempfile
from pathlib import Path
from typing import Any, Final

from draftree.errors import BenchError

FOLDER: Final = Path("draftree/serve/page/vendor")
VERSIONS: Final = "versions.json"


def read_versions(folder: Path) -> list[dict[str, Any]]:
    """name, version, sha256 of the archive, licence, and files: their names here and there."""
    packages: list[dict[str, Any]] = json.loads((folder / VERSIONS).read_text(encoding="utf-8"))
    return packages


def fetch(package: dict[str, Any], folder: Path) -> Path:
    """The archive of a package, if it is the one that was pinned."""
    name = f"{package['name']}@{package['version']}"
    command = ["npm", "pack", "--silent", "--pack-destination", str(folder), name]
    found = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    path = folder / found[-1]
    digest = hashlib.sha256(path.read_bytes()).hexdigest()
    if digest != package["sha256"]:
        raise BenchError(f"{name} has the hash {digest}, which is not that of {VERSIONS}.")
    return path


def unpack(package: dict[str, Any], archive: Path, folder: Path) -> None:
    with tarfile.open(archive) as opened:
        for target, source in package["files"].items():
            file = opened.extractfile(f"package/{source}")
            if file is None:
                raise BenchError(f"{package['name']} has no file {source}.")
            place = folder / target
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_bytes(file.read())


def main(folder: Path = FOLDER) -> None:
    with tempfile.TemporaryDirectory() as name:
        for package in read_versions(folder):
            unpack(package, fetch(package, Path(name)), folder)
            print(f"{package['name']} {package['version']}: {len(package['files'])} files")


if __name__ == "__main__":
    main()
