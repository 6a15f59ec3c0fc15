"""GGUF files that are wrong: one sentence each, no other exception, no large allocation."""

import os
import struct
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftree.errors import CheckpointError
from draftree.weights.file import open_checkpoint
from tests.examples import examples
from tests.weights.gguf_bytes import (
    ARRAY,
    BOOL,
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

HUGE = 2**64 - 1
MANY = 400 * string("söme")  # so many that they are not decoded one by one
ARCHITECTURE = text_entry("general.architecture", "llama")


def with_entry(extra: bytes) -> bytes:
    return GgufBytes([ARCHITECTURE, extra]).build()


def with_tensors(*tensors: bytes, data: bytes = bytes(64)) -> bytes:
    return GgufBytes([ARCHITECTURE], list(tensors), data).build()


def nested(depth: int) -> bytes:
    value = array(0, 1, b"\1")
    for _ in range(depth - 1):
        value = array(ARRAY, 1, value)
    return entry("deep", ARRAY, value)


HOSTILE = {
    "empty": (b"", "is empty"),
    "one byte": (b"G", "ends inside the first four bytes"),
    "other format": (b"PK\3\4" + bytes(100), "is not a GGUF file"),
    "swapped magic": (b"FUGG" + bytes(100), "big-endian"),
    "swapped version": (GgufBytes(version=b"\0\0\0\3").build(), "big-endian"),
    "version 1": (GgufBytes(version=b"\1\0\0\0").build(), "version 1; only versions 2 and 3"),
    "version 9": (GgufBytes(version=b"\x09\0\0\0").build(), "version 9"),
    "no counts": (b"GGUF\3\0\0\0\1", "ends inside the tensor count"),
    "too many tensors": (GgufBytes(num_tensors=HUGE).build(), f"claims {HUGE} tensors"),
    "too many entries": (GgufBytes(num_entries=HUGE).build(), "metadata entries, more than"),
    "more tensors than bytes": (GgufBytes(num_tensors=9).build(), "list of 9 tensors"),
    "more entries than bytes": (GgufBytes(num_entries=9).build(), "list of 9 metadata entries"),
    "key of 2^64": (with_entry(struct.pack("<Q", HUGE) + bytes(50)), f"key 1 claims {HUGE} bytes"),
    "key past the end": (with_entry(struct.pack("<Q", 999) + bytes(50)), "inside metadata key 1"),
    "empty key": (with_entry(text_entry("", "x")), "key 1 is empty"),
    "key not UTF-8": (with_entry(text_entry(b"\xff\xfe", "x")), "key 1 at byte .* not valid UTF-8"),
    "same key twice": (with_entry(ARCHITECTURE), "'general.architecture' appears twice"),
    "string of 2^64": (
        with_entry(entry("s", STRING, struct.pack("<Q", HUGE))),
        f"value 's' claims {HUGE} bytes",
    ),
    "string past the end": (
        with_entry(entry("s", STRING, struct.pack("<Q", 60_000_000))),
        "ends inside metadata value 's'",
    ),
    "string not UTF-8": (with_entry(text_entry("s", b"\xc3")), "value 's' .*not valid UTF-8"),
    "unknown value type": (with_entry(entry("v", 13, bytes(8))), "unknown value type 13"),
    "bad boolean": (with_entry(entry("b", BOOL, b"\2")), "boolean with the value 2"),
    "bad booleans": (with_entry(entry("b", ARRAY, array(BOOL, 2, b"\1\3"))), "array of booleans"),
    "array of unknown type": (with_entry(entry("a", ARRAY, array(77, 1, bytes(8)))), "type 77"),
    "array of 2^64 numbers": (
        with_entry(entry("a", ARRAY, array(0, HUGE, bytes(8)))),
        f"claims {HUGE} items",
    ),
    "array of 2^64 strings": (
        with_entry(entry("a", ARRAY, array(STRING, HUGE, bytes(8)))),
        f"claims {HUGE} items",
    ),
    "numbers past the end": (
        with_entry(entry("a", ARRAY, array(10, 4_000_000, bytes(8)))),
        "ends inside metadata value 'a'",
    ),
    "strings past the end": (
        with_entry(entry("a", ARRAY, array(STRING, 4_000_000, bytes(8)))),
        "ends inside metadata value 'a'",
    ),
    "item past the end": (
        with_entry(entry("a", ARRAY, array(STRING, 2, string("x") + struct.pack("<Q", 9999)))),
        "inside item 1 of metadata value 'a'",
    ),
    "item of 2^64": (
        with_entry(entry("a", ARRAY, array(STRING, 1, struct.pack("<Q", HUGE)))),
        f"item 0 of metadata value 'a' claims {HUGE} bytes",
    ),
    "item not UTF-8": (
        with_entry(entry("a", ARRAY, array(STRING, 2, string("x") + string(b"\xff")))),
        "item 1 of metadata value 'a' at byte .* not valid UTF-8",
    ),
    "one of many items past the end": (
        with_entry(entry("a", ARRAY, array(STRING, 500, MANY + struct.pack("<Q", 9999)))),
        "inside item 400 of metadata value 'a'",
    ),
    "fewer of many items than claimed": (
        with_entry(entry("a", ARRAY, array(STRING, 500, MANY))),
        "inside item 40. of metadata value 'a'",
    ),
    "one of many items of 2^64": (
        with_entry(entry("a", ARRAY, array(STRING, 401, MANY + struct.pack("<Q", HUGE)))),
        f"item 400 of metadata value 'a' claims {HUGE} bytes",
    ),
    "one of many items not UTF-8": (
        with_entry(entry("a", ARRAY, array(STRING, 500, MANY + string(b"x\xc3") + MANY))),
        "item 400 of metadata value 'a' at byte .* not valid UTF-8",
    ),
    "arrays past the end": (
        with_entry(entry("a", ARRAY, array(ARRAY, 4_000_000, bytes(8)))),
        "ends inside metadata value 'a'",
    ),
    "nested too deep": (with_entry(nested(5)), "nests arrays more than 4 deep"),
    "nested a thousand deep": (with_entry(nested(1000)), "nests arrays more than 4 deep"),
    "no architecture": (GgufBytes([text_entry("a", "b")]).build(), "does not say its architecture"),
    "architecture a number": (
        GgufBytes([u32_entry("general.architecture", 3)]).build(),
        "does not say its architecture",
    ),
    "alignment 0": (with_entry(u32_entry("general.alignment", 0)), "general.alignment is 0"),
    "alignment 33": (with_entry(u32_entry("general.alignment", 33)), "not a power of two"),
    "alignment 2^31": (with_entry(u32_entry("general.alignment", 2**31)), "not a power of two"),
    "alignment a text": (with_entry(text_entry("general.alignment", "a")), "not a power of two"),
    "alignment true": (with_entry(entry("general.alignment", BOOL, b"\1")), "not a power of two"),
    "split count a text": (with_entry(text_entry("split.count", "a")), "one of 'a' parts"),
    "tensor without a name": (with_tensors(tensor("", (1,))), "empty name"),
    "tensor name not UTF-8": (with_tensors(tensor(b"\x80", (1,))), "not valid UTF-8"),
    "tensor name too long": (with_tensors(tensor("n" * 70_000, (1,))), "claims 70000 bytes"),
    "tensor without dimensions": (
        with_tensors(tensor("t", ()) + bytes(32)),
        "0 dimensions instead of 1 to 4",
    ),
    "five dimensions": (with_tensors(tensor("t", (1,) * 5)), "5 dimensions instead of 1 to 4"),
    "four billion dimensions": (
        with_tensors(string("t") + struct.pack("<I", 2**32 - 1) + bytes(64)),
        "4294967295 dimensions",
    ),
    "dimension 0": (with_tensors(tensor("t", (4, 0))), "impossible shape"),
    "overflowing dimensions": (with_tensors(tensor("t", (2**33, 2**33))), "impossible shape"),
    "wrapping dimensions": (with_tensors(tensor("t", (2**32, 2**32, 2))), "impossible shape"),
    "unknown tensor type": (with_tensors(tensor("t", (32,), 99)), "GGML type 99"),
    "removed tensor type": (with_tensors(tensor("t", (32,), 4)), "GGML type 4"),
    "unsupported tensor type": (with_tensors(tensor("t", (256,), 21)), "IQ3_S"),
    "row not whole blocks": (with_tensors(tensor("t", (33,), 8)), "rows of 33, not whole Q8_0"),
    "short row, whole total": (
        with_tensors(tensor("t", (16, 2), 8)),
        "rows of 16, not whole Q8_0 blocks",
    ),
    "misaligned tensor": (with_tensors(tensor("t", (1,), 0, 4)), "not a multiple of 32"),
    "tensor past the end": (with_tensors(tensor("t", (17,))), "ends 4 bytes past the end"),
    "offset past the end": (with_tensors(tensor("t", (1,), 0, 96)), "past the end"),
    "offset of 2^64": (with_tensors(tensor("t", (1,), 0, HUGE - 31)), "past the end"),
    "tensor larger than any disk": (with_tensors(tensor("t", (2**60,))), "past the end"),
    "no data at all": (with_tensors(tensor("t", (1,)), data=b""), "past the end"),
    "overlapping tensors": (
        with_tensors(tensor("a", (16,)), tensor("b", (8,), 0, 32)),
        "tensor 'b' overlaps tensor 'a'",
    ),
    "same place": (with_tensors(tensor("a", (1,)), tensor("b", (1,))), "overlaps"),
    "same tensor twice": (
        with_tensors(tensor("a", (1,)), tensor("a", (1,), 0, 32)),
        "tensor 'a' appears twice",
    ),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_hostile_file_gives_one_sentence_and_no_large_allocation(tmp_path: Path, name: str) -> None:
    data, sentence = HOSTILE[name]
    path = tmp_path / "hostile.gguf"
    path.write_bytes(data)
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match=sentence) as caught:
            open_checkpoint(path)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    message = str(caught.value)
    assert "hostile.gguf" in message and message.endswith(".") and "\n" not in message
    assert len(message) < len(str(path)) + 300
    assert peak < 4 << 20


def test_control_characters_do_not_reach_the_message(tmp_path: Path) -> None:
    path = tmp_path / "hostile.gguf"
    path.write_bytes(with_tensors(tensor("\x1b[2J\n", (33,), 8)))
    with pytest.raises(CheckpointError) as caught:
        open_checkpoint(path)
    assert "\x1b" not in str(caught.value) and "\n" not in str(caught.value)


def test_many_arrays_share_one_budget(tmp_path: Path) -> None:
    two_million = array(0, 2_000_000, bytes(2_000_000))
    pieces = GgufBytes([entry(f"a{i}", ARRAY, two_million) for i in range(3)])
    path = tmp_path / "hostile.gguf"
    path.write_bytes(pieces.build())
    with pytest.raises(CheckpointError, match="value 'a2' claims 2000000 items"):
        open_checkpoint(path)


def test_many_short_arrays_take_no_long_time(tmp_path: Path) -> None:
    count = 200_000
    inner = array(STRING, 1, string("x")) * count
    path = tmp_path / "nested.gguf"
    path.write_bytes(with_entry(entry("a", ARRAY, array(ARRAY, count, inner))))
    start = time.process_time()
    assert open_checkpoint(path).metadata["a"] == [["x"]] * count
    assert time.process_time() - start < 10


def test_header_is_bounded_even_in_a_large_file(tmp_path: Path) -> None:
    # Sparse: 17 strings of 60 MB of zeros would be a gigabyte of metadata.
    path = tmp_path / "hostile.gguf"
    with path.open("wb") as file:
        file.write(GgufBytes(num_entries=17).build()[:24])
        for index in range(17):
            file.write(string(f"k{index}") + struct.pack("<IQ", STRING, 60_000_000))
            file.seek(60_000_000, os.SEEK_CUR)
        file.truncate()
    tracemalloc.start()
    try:
        with pytest.raises(CheckpointError, match="past 256 MiB of header"):
            open_checkpoint(path)
        assert tracemalloc.get_traced_memory()[1] < 400 << 20
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("make", "sentence"),
    [
        (lambda path: None, "does not exist"),
        (lambda path: path.mkdir(), "folder without config.json"),
        (lambda path: os.mkfifo(path), "not an ordinary file"),
        (lambda path: path.symlink_to(path), "cannot be opened"),
    ],
)
def test_paths_that_are_no_file(
    tmp_path: Path, make: Callable[[Path], None], sentence: str
) -> None:
    path = tmp_path / "model.gguf"
    make(path)
    with pytest.raises(CheckpointError, match=sentence):
        open_checkpoint(path)


def test_path_that_no_file_can_have() -> None:
    with pytest.raises(CheckpointError, match="cannot be opened"):
        open_checkpoint("a\0b")


VALID = small_file().build()


def open_or_explain(path: Path, data: bytes) -> None:
    """Either every tensor of the file can be read, or a CheckpointError says why not."""
    path.write_bytes(data)
    try:
        checkpoint = open_checkpoint(path)
    except CheckpointError:
        return
    for name, info in checkpoint.tensors.items():
        assert checkpoint.raw(name).nbytes == info.nbytes
        int(checkpoint.raw(name).sum())


def test_every_truncation_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "cut.gguf"
    for length in range(len(VALID)):
        path.write_bytes(VALID[:length])
        with pytest.raises(CheckpointError):
            open_checkpoint(path)


@examples(400)
@given(
    edits=st.lists(
        st.tuples(st.integers(0, len(VALID) - 1), st.integers(0, 255)), min_size=1, max_size=8
    ),
    cut=st.integers(0, len(VALID)),
)
def test_mutated_bytes_open_or_explain(
    tmp_path_factory: pytest.TempPathFactory, edits: list[tuple[int, int]], cut: int
) -> None:
    data = bytearray(VALID)
    for position, value in edits:
        data[position] = value
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    open_or_explain(path, bytes(data))
    open_or_explain(path, bytes(data[:cut]))


@examples(400)
@given(
    position=st.integers(0, len(VALID) - 8),
    value=st.one_of(
        st.integers(0, 64),
        st.integers(0, HUGE),
        st.sampled_from([2**31 - 1, 2**31, 2**32 - 1, 2**32, 2**63 - 1, 2**63, HUGE]),
    ),
    num_bytes=st.sampled_from([4, 8]),
)
def test_mutated_words_open_or_explain(
    tmp_path_factory: pytest.TempPathFactory, position: int, value: int, num_bytes: int
) -> None:
    word = struct.pack("<Q", value)[:num_bytes]
    path = tmp_path_factory.getbasetemp() / "mutated.gguf"
    open_or_explain(path, VALID[:position] + word + VALID[position + num_bytes :])


@examples(200)
@given(tail=st.binary(max_size=300))
def test_noise_after_the_magic_opens_or_explains(
    tmp_path_factory: pytest.TempPathFactory, tail: bytes
) -> None:
    path = tmp_path_factory.getbasetemp() / "noise.gguf"
    open_or_explain(path, b"GGUF\3\0\0\0" + struct.pack("<QQ", 1, 2) + tail)
