"""llama.cpp's programs: `llama-bench`, built from source for this very CPU, which needs cmake and a
compiler, and where `llama-server` lies.
"""

import subprocess
from pathlib import Path
from typing import Annotated, Final

import typer

from draftree.errors import BenchError

LlamaServer = Annotated[
    Path | None,
    typer.Option(help="llama.cpp's server, to measure beside ours.", show_default=False),
]
_OPTIONS: Final = (
    *("-DCMAKE_BUILD_TYPE=Release", "-DGGML_NATIVE=ON", "-DBUILD_SHARED_LIBS=OFF"),
    *("-DLLAMA_BUILD_TESTS=OFF", "-DLLAMA_BUILD_EXAMPLES=OFF", "-DLLAMA_CURL=OFF"),
)


def build_llama_bench(source: Path, folder: Path, jobs: int) -> Path:
    """The path of the program. The source tree is only read; what is built lies in folder."""
    if not (source / "tools" / "llama-bench").is_dir():
        raise BenchError(f"{source} is not a source tree of llama.cpp with tools/llama-bench.")
    configure = ["cmake", "-S", str(source), "-B", str(folder), *_OPTIONS]
    build = ["cmake", "--build", str(folder), "--target", "llama-bench", "-j", str(jobs)]
    for command in (configure, build):
        try:
            result = subprocess.run(command, stdout=subprocess.DEVNULL)
        except FileNotFoundError:
            raise BenchError("Building llama.cpp needs cmake, which is not installed.") from None
        if result.returncode != 0:
            raise BenchError(f"`{' '.join(command)}` failed with status {result.returncode}.")
    return folder / "bin" / "llama-bench"
