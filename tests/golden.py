"""Reference data made by other systems: in tests/data, and the full set where a developer has it.

Larger files are packed there; `golden` unpacks one once a process, into a folder that goes with it.
"""

import json
import lzma
import shutil
from functools import cache
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np

DATA = Path(__file__).parent / "data"
FULL_SET = Path(__file__).parents[2] / "shared" / "golden"  # tests/models/test_golden_full.py


@cache
def golden(name: str) -> Path:
    """The path of one reference file or folder."""
    stored = DATA / name
    if stored.is_file():
        return stored
    path = Path(_folder().name) / name
    path.parent.mkdir(parents=True, exist_ok=True)
    if stored.is_dir():
        path.mkdir(exist_ok=True)
        for file in stored.iterdir():
            inner = golden(f"{name}/{file.name.removesuffix('.xz')}")
            if inner.parent != path:
                shutil.copy(inner, path)
    elif stored.with_name(f"{stored.name}.head.xz").exists():
        path.write_bytes(_rebuild(stored))
    else:
        path.write_bytes(lzma.decompress(stored.with_name(f"{stored.name}.xz").read_bytes()))
    return path


@cache
def _folder() -> "TemporaryDirectory[str]":
    return TemporaryDirectory(prefix="draftree-tests-")


def _rebuild(stored: Path) -> bytes:
    """A GGUF file from its own head and the tensors of a safetensors file, to the bit."""
    from safetensors.torch import load_file

    recipe = json.loads(stored.with_name(f"{stored.name}.json").read_text())
    tensors = load_file(golden("dflash/zlab/model.safetensors"))
    head = lzma.decompress(stored.with_name(f"{stored.name}.head.xz").read_bytes())
    raw = bytearray(head.ljust(recipe["num_bytes"], b"\0"))
    for offset, name, kind in recipe["parts"]:
        part = tensors[name].float().numpy().astype(np.dtype(kind)).tobytes()
        raw[offset : offset + len(part)] = part
    assert sha256(raw).hexdigest() == recipe["sha256"], f"{stored.name} is not what it was"
    return bytes(raw)
