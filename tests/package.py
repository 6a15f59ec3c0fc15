"""What `make package` checks of the files it built: their size and content, and that the wheel
works in an empty environment, away from the checkout.

In: the folder with one wheel and one sdist. Out: exit status 1 and a sentence if something is
wrong. The default model must have been downloaded.
"""

import subprocess
import sys
import tarfile
import tempfile
import venv
import zipfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
MAX_FILE_BYTES = 40_000_000  # two drafts are most of it
MAX_ENVIRONMENT_BYTES = 450_000_000
HEAVY = ("torch", "matplotlib", "pytest")
NEEDED = (
    "draftree/py.typed",
    "draftree/data/smollm2-135m-dflash.q4_1.gguf",
    "draftree/data/qwen2.5-coder-0.5b-dflash.q4_1.gguf",
    "draftree/kernels/cuda/source/linear.cu",
    "draftree/serve/page/index.html",
    "draftree/serve/page/vendor/katex.js",
    "draftree/serve/page/vendor/fonts/KaTeX_Main-Regular.woff2",
    "draftree/serve/page/vendor/katex.LICENSE.txt",
    "LICENSE",
)


def check_file(path: Path, names: list[str]) -> None:
    if path.stat().st_size > MAX_FILE_BYTES:
        sys.exit(f"{path.name} has {path.stat().st_size:,} bytes, more than {MAX_FILE_BYTES:,}.")
    for needed in NEEDED:
        if not any(name.endswith(needed) for name in names):
            sys.exit(f"{path.name} does not hold {needed}.")


def try_wheel(wheel: Path, folder: Path) -> int:
    """Install it alone and complete a prompt. Returns the environment's size in bytes."""
    place = folder / "environment"
    venv.create(place, symlinks=True)
    python = place / "bin" / "python"
    pip = [sys.executable, "-m", "pip", "--python", str(python), "install", "-qq", "--no-compile"]
    options = ["--disable-pip-version-check", "-c", str(ROOT / "constraints.txt")]
    subprocess.run([*pip, *options, str(wheel)], check=True, cwd=folder)
    draftree = str(place / "bin" / "draftree")
    version = _output([draftree, "--version"], folder)
    if wheel.name.split("-")[1] not in version:
        sys.exit(f"`draftree --version` says {version!r}, and the wheel is {wheel.name}.")
    text = _output([draftree, "run", "smollm2-135m", "-n", "16", "-p", "def fibonacci(n):"], folder)
    if "return" not in text:
        sys.exit(f"The wheel's completion is {text!r}.")
    heavy = [name for name in HEAVY if next(place.glob(f"lib/*/site-packages/{name}"), None)]
    if heavy:
        sys.exit(f"A plain install brings {', '.join(heavy)}.")
    files = (path for path in place.rglob("*") if path.is_file() and not path.is_symlink())
    return sum(path.stat().st_size for path in files)


def _output(command: list[str], folder: Path) -> str:
    done = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if done.returncode != 0:
        sys.exit(f"{' '.join(command)} failed: {done.stderr.strip()}")
    return done.stdout


def main(folder: Path) -> None:
    (wheel,), (sdist,) = folder.glob("*.whl"), folder.glob("*.tar.gz")
    with zipfile.ZipFile(wheel) as archive:
        check_file(wheel, archive.namelist())
    with tarfile.open(sdist) as archive:
        check_file(sdist, archive.getnames())
    with tempfile.TemporaryDirectory() as name:
        num_bytes = try_wheel(wheel.resolve(), Path(name))
    if num_bytes > MAX_ENVIRONMENT_BYTES:
        sys.exit(f"A plain install takes {num_bytes:,} bytes, more than {MAX_ENVIRONMENT_BYTES:,}.")
    print(f"{wheel.name}: {wheel.stat().st_size:,} bytes, {num_bytes:,} installed")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
