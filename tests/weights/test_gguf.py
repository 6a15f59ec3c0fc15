"""GGUF files that are right: values, views, splits, and agreement with another reader."""

import gc
import struct
import subprocess
import sys
import time
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from draftree.errors import CheckpointError
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.weights.checkpoint import TensorInfo
from draftree.weights.file import open_checkpoint
from draftree.weights.gguf import StringArray
from tests.golden import golden
from tests.weights.gguf_bytes import (
    ARRAY,
    STRING,
    GgufBytes,
    array,
    entry,
    small_file,
    string,
    tensor,
    text_entry,
    u32_entry,
)

GOLDEN = [
    "qwen35/tiny-qwen35-A-mixed.gguf",
    "qwen35/tiny-qwen35-C-mtp-F16.gguf",
    "dense/tiny-llama-rs-F16.gguf",
    "dflash/tiny-dflash-A-F16.gguf",
]


@pytest.mark.parametrize("version", [2, 3])
def test_reads_every_kind_of_value(tmp_path: Path, version: int) -> None:
    pieces = small_file()
    pieces.version = struct.pack("<I", version)
    path = tmp_path / "small.gguf"
    path.write_bytes(pieces.build())
    checkpoint = open_checkpoint(path)
    assert checkpoint.path == path
    assert checkpoint.architecture == "llama"
    assert checkpoint.metadata == {
        "general.architecture": "llama",
        "llama.block_count": 2,
        "llama.eps": 0.5,
        "tokenizer.add_bos": True,
        "general.size": 2**63 + 1,
        "tokenizer.tokens": ["é", ""],
        "tokenizer.flags": [True, False],
        "tokenizer.types": [-1, 7],
        "nested": [[1, 2], [3]],
    }
    assert checkpoint.metadata["tokenizer.add_bos"] is True
    assert checkpoint.tensors == {
        "norm.weight": TensorInfo("norm.weight", (3,), QuantType.F32, 12),
        "matrix.weight": TensorInfo("matrix.weight", (2, 32), QuantType.Q8_0, 68),
        "cube.weight": TensorInfo("cube.weight", (2, 3, 2), QuantType.F16, 24),
    }
    assert checkpoint.raw("norm.weight").shape == (1, 12)
    assert checkpoint.raw("cube.weight").shape == (6, 4)
    np.testing.assert_array_equal(
        checkpoint.raw("matrix.weight"), np.arange(68, dtype=np.uint8).reshape(2, 34)
    )


def test_views_are_read_only_and_outlive_the_checkpoint(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file().build())
    checkpoint = open_checkpoint(path)
    norm = checkpoint.raw("norm.weight")
    assert not norm.flags.writeable and not norm.flags.owndata
    del checkpoint
    gc.collect()
    np.testing.assert_array_equal(dequantize(norm, QuantType.F32), [[1, 2, 3]])


def test_unknown_tensor_is_named(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file().build())
    with pytest.raises(CheckpointError, match=r"small\.gguf has no tensor 'other'"):
        open_checkpoint(path).raw("other")


def test_honours_the_alignment(tmp_path: Path) -> None:
    pieces = GgufBytes(
        entries=[text_entry("general.architecture", "x"), u32_entry("general.alignment", 4096)],
        tensors=[tensor("a", (1,)), tensor("b", (1,), 0, 4096)],
        data=struct.pack("<f", 1) + bytes(4092) + struct.pack("<f", 2),
        alignment=4096,
    )
    path = tmp_path / "aligned.gguf"
    path.write_bytes(pieces.build())
    raw = open_checkpoint(path).raw("b")
    assert raw.view(np.float32)[0, 0] == 2


@pytest.mark.parametrize("name", GOLDEN)
def test_agrees_with_the_gguf_package(name: str) -> None:
    from gguf import GGUFReader

    checkpoint = open_checkpoint(golden(name))
    reader = GGUFReader(golden(name))
    theirs = {k: f.contents() for k, f in reader.fields.items() if not k.startswith("GGUF.")}
    ours = checkpoint.metadata.items()
    assert {k: [*v] if isinstance(v, StringArray) else v for k, v in ours} == theirs
    assert list(checkpoint.tensors) == [tensor.name for tensor in reader.tensors]
    for other in reader.tensors:
        info = checkpoint.tensors[other.name]
        assert info.shape == tuple(other.shape.tolist())[::-1]
        assert (info.qtype, info.nbytes) == (other.tensor_type, other.n_bytes)
        assert checkpoint.raw(other.name).tobytes() == other.data.tobytes()


def test_strings_may_be_long(tmp_path: Path) -> None:
    texts = ["a" * (1 << 20), "b", "é" * (1 << 20), "c" * ((1 << 20) - 9), "", "d" * 100]
    value = array(STRING, len(texts), b"".join(map(string, texts)))
    pieces = GgufBytes([text_entry("general.architecture", "x"), entry("texts", ARRAY, value)])
    path = tmp_path / "long.gguf"
    path.write_bytes(pieces.build())
    assert open_checkpoint(path).metadata["texts"] == texts


@pytest.mark.parametrize("odd", ["", "a\0b", "\0" * 8, "é" * (1 << 20), "\n"])
def test_many_strings_are_decoded_when_asked_for(tmp_path: Path, odd: str) -> None:
    texts = [*(f"tökén{i}" for i in range(50_000)), odd, "last"]
    value = array(STRING, len(texts), b"".join(map(string, texts)))
    pieces = GgufBytes([text_entry("general.architecture", "x"), entry("texts", ARRAY, value)])
    path = tmp_path / "many.gguf"
    path.write_bytes(pieces.build())
    tracemalloc.start()
    try:
        found = open_checkpoint(path).metadata["texts"]
        kept = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    assert kept < 10 * len(texts)  # where they lie, and nothing of what they say
    assert len(found) == len(texts) and list(found) == texts
    assert (found[0], found[-2], found[-3:]) == (texts[0], odd, texts[-3:])
    with pytest.raises(IndexError):
        found[len(texts)]


def test_large_vocabulary_is_quick(tmp_path: Path) -> None:
    tokens = array(STRING, 150_000, b"".join(string(f"tökén{i}") for i in range(150_000)))
    merges = array(STRING, 150_000, b"".join(string(f"Ġa b{i}") for i in range(150_000)))
    pieces = GgufBytes(
        [
            text_entry("general.architecture", "x"),
            entry("tokenizer.ggml.tokens", ARRAY, tokens),
            entry("tokenizer.ggml.merges", ARRAY, merges),
        ]
    )
    path = tmp_path / "vocab.gguf"
    path.write_bytes(pieces.build())
    seconds = []
    for _ in range(3):
        start = time.process_time()
        metadata = open_checkpoint(path).metadata
        seconds.append(time.process_time() - start)
    assert metadata["tokenizer.ggml.tokens"][149_999] == "tökén149999"
    assert min(seconds) < 3  # 0.15 s on a free core


def split_part(index: int, count: int, num_tensors: int = 2, name: str = "") -> bytes:
    entries = [
        entry("split.no", 2, struct.pack("<H", index)),
        entry("split.count", 2, struct.pack("<H", count)),
        entry("split.tensors.count", 5, struct.pack("<i", num_tensors)),
    ]
    if index == 0:
        entries.append(text_entry("general.architecture", "llama"))
    tensors = [tensor(name or f"t{index}", (1,))] if index else []
    return GgufBytes(entries, tensors, struct.pack("<f", index) if index else b"").build()


def write_split(folder: Path, **replaced: bytes) -> Path:
    for index in range(3):
        data = replaced.get(f"part{index}", split_part(index, 3))
        if data:
            (folder / f"m-{index + 1:05d}-of-00003.gguf").write_bytes(data)
    return folder / "m-00001-of-00003.gguf"


def test_split_file_is_one_checkpoint(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_split(tmp_path))
    assert checkpoint.architecture == "llama"
    assert list(checkpoint.tensors) == ["t1", "t2"]
    assert checkpoint.raw("t2").view(np.float32)[0, 0] == 2


@pytest.mark.parametrize(
    ("replaced", "sentence"),
    [
        ({"part1": b""}, r"split in 3 parts and m-00002-of-00003\.gguf is missing"),
        ({"part1": split_part(2, 3)}, "is not part 2 of 3"),
        ({"part1": split_part(1, 4)}, "is not part 2 of 3"),
        ({"part1": small_file().build()}, "is not part 2 of 3"),
        ({"part1": b"GGUF"}, r"m-00002-of-00003\.gguf is damaged"),
        ({"part2": split_part(2, 3, name="t1")}, "repeats tensor 't1'"),
        ({"part0": split_part(0, 3, num_tensors=5)}, "promises 5 tensors; its parts hold 2"),
        ({"part0": split_part(0, 4)}, "split in 4, but its name does not end in"),
        ({"part0": split_part(0, 60_000)}, "claims to be one of 60000 parts"),
    ],
)
def test_wrong_splits_are_explained(
    tmp_path: Path, replaced: dict[str, bytes], sentence: str
) -> None:
    with pytest.raises(CheckpointError, match=sentence):
        open_checkpoint(write_split(tmp_path, **replaced))


def test_later_part_points_to_the_first(tmp_path: Path) -> None:
    write_split(tmp_path)
    with pytest.raises(CheckpointError, match=r"open m-00001-of-00003\.gguf instead"):
        open_checkpoint(tmp_path / "m-00003-of-00003.gguf")


def test_opening_a_model_imports_nothing_heavy(tmp_path: Path) -> None:
    path = tmp_path / "small.gguf"
    path.write_bytes(small_file().build())
    program = (
        "import sys; from draftree.weights.hub import resolve; "
        "from draftree.weights.file import open_checkpoint; "
        "open_checkpoint(resolve(sys.argv[1])); "
        "heavy = {'torch', 'gguf', 'huggingface_hub', 'safetensors', 'numba'}; "
        "print(sorted(heavy & set(sys.modules)))"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == "[]"
