"""GGUF files (versions 2 and 3, whole or split) as a Checkpoint, over a memory map.

In: a path. Out: metadata as plain Python values and tensors as views of the map. Every count,
length and offset is checked against the file before it is used, since files come from strangers;
what is wrong becomes one CheckpointError. Knows nothing of architectures or of what a tensor means.
"""

import re
import struct
from array import array
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from math import prod
from pathlib import Path
from types import MappingProxyType
from typing import Any, NoReturn

import numpy as np

from draftree.errors import CheckpointError
from draftree.kernels.quant.formats import QuantType, row_bytes
from draftree.weights.checkpoint import Checkpoint, TensorInfo
from draftree.weights.mapping import map_file

_U32 = struct.Struct("<I")
_U64 = struct.Struct("<Q")
_SCALARS = MappingProxyType(  # value type -> layout; 8 and 9 are others
    {kind: struct.Struct("<" + code) for kind, code in enumerate("BbHhIifB--Qqd") if code != "-"}
)
_BOOL, _STRING, _ARRAY = 7, 8, 9
_DEFAULT_ALIGNMENT = 32
_OTHER_TYPES = MappingProxyType(  # for the message alone
    {16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S"}
    | {29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4"}
)

# Far above any real file, low enough that a hostile one cannot fill the memory.
_MAX_HEADER_BYTES = 256 << 20
_MAX_STRING_BYTES = 64 << 20
_FEW_STRINGS = 256  # more of them are decoded when asked for
_MAX_NAME_BYTES = 65_535
_MAX_ENTRIES = 65_536  # metadata entries, and tensors
_MAX_ARRAY_ITEMS = 4 << 20  # in all arrays together
_MAX_ARRAY_DEPTH = 4
_MAX_DIMS = 4
_MAX_PARTS = 1024

_PART_NAME = re.compile(r"(?P<stem>.+)-(?P<index>\d{5})-of-(?P<count>\d{5})\.gguf", re.DOTALL)


class StringArray(Sequence[str]):
    """Strings of a file, decoded when asked for: Python's own take ten times the memory."""

    def __init__(self, view: memoryview, ends: "array[int]") -> None:
        """ends: where what is before the first string ends, then where each string does."""
        self._view, self._ends = view, ends

    def __len__(self) -> int:
        return len(self._ends) - 1

    def __getitem__(self, index: Any) -> Any:
        return list(self)[index]

    def __iter__(self) -> Iterator[str]:
        text, gap = self.join(), "\0" * _U64.size
        if text.count("\0") == len(gap) * len(self):  # to cut one long string is much faster
            return iter(text.split(gap)[1:])
        return (str(self._view[a + len(gap) : b], "utf-8") for a, b in pairwise(self._ends))

    def join(self) -> str:
        """All of them, with zeros for lengths: those end a character as a string's end does."""
        data = np.frombuffer(self._view[self._ends[0] : self._ends[-1]], dtype=np.uint8).copy()
        gaps = np.array(self._ends[:-1]) - self._ends[0]
        for byte in range(_U64.size):
            data[gaps + byte] = 0
        return data.tobytes().decode()


class _Cursor:
    """Reads little-endian values off the front of a file, never past its end."""

    def __init__(self, path: Path, data: np.ndarray) -> None:
        self.path = path
        self.pos = 0
        self.end = min(len(data), _MAX_HEADER_BYTES)
        self._view = data.data
        self._is_cut = len(data) > self.end
        self._items_left = _MAX_ARRAY_ITEMS

    def fail(self, reason: str) -> NoReturn:
        raise CheckpointError(f"{self.path} is damaged: {reason}.")

    def need(self, num_bytes: int, what: str) -> None:
        """Stop unless the header still holds num_bytes."""
        if num_bytes <= self.end - self.pos:
            return
        if self._is_cut:
            self.fail(
                f"{what} at byte {self.pos} goes past {_MAX_HEADER_BYTES >> 20} MiB of header"
            )
        self.fail(f"the file ends inside {what} at byte {self.pos}; it may be a partial download")

    def scalar(self, layout: struct.Struct, what: str) -> Any:
        self.need(layout.size, what)
        (value,) = layout.unpack_from(self._view, self.pos)
        self.pos += layout.size
        return value

    def string(self, what: str, max_bytes: int = _MAX_STRING_BYTES) -> str:
        length = self.scalar(_U64, what)
        if length > max_bytes:
            self.fail(f"{what} claims {length} bytes, more than the {max_bytes} allowed")
        self.need(length, what)
        start, self.pos = self.pos, self.pos + length
        try:
            return str(self._view[start : self.pos], "utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} at byte {start} is not valid UTF-8")

    def value(self, value_type: int, what: str, depth: int = 0) -> Any:
        if value_type == _STRING:
            return self.string(what)
        if value_type == _ARRAY:
            return self._array(what, depth + 1)
        if value_type not in _SCALARS:
            self.fail(f"{what} has the unknown value type {value_type}")
        value = self.scalar(_SCALARS[value_type], what)
        if value_type != _BOOL:
            return value
        if value > 1:
            self.fail(f"{what} is a boolean with the value {value}")
        return value == 1

    def _array(self, what: str, depth: int) -> Sequence[Any]:
        if depth > _MAX_ARRAY_DEPTH:
            self.fail(f"{what} nests arrays more than {_MAX_ARRAY_DEPTH} deep")
        item_type = self.scalar(_U32, what)
        count = self.scalar(_U64, what)
        if item_type not in _SCALARS and item_type not in (_STRING, _ARRAY):
            self.fail(f"{what} is an array of the unknown value type {item_type}")
        if count > self._items_left:
            self.fail(f"{what} claims {count} items, more than the {self._items_left} allowed")
        self._items_left -= count
        if item_type == _STRING:
            self.need(8 * count, what)
            return self._strings(count, what)
        if item_type == _ARRAY:
            self.need(12 * count, what)
            return [self._array(what, depth + 1) for _ in range(count)]
        return self._scalars(item_type, count, what)

    def _scalars(self, item_type: int, count: int, what: str) -> list[Any]:
        layout = _SCALARS[item_type]
        self.need(layout.size * count, what)
        items = np.frombuffer(self._view, np.dtype(layout.format), count, self.pos)
        self.pos += layout.size * count
        if item_type == _BOOL:
            if count and items.max() > 1:
                self.fail(f"{what} is an array of booleans with other values than 0 and 1")
            items = items.astype(np.bool_)
        values: list[Any] = items.tolist()
        return values

    def _strings(self, count: int, what: str) -> Sequence[str]:
        if count <= _FEW_STRINGS:
            return [self.string(f"item {index} of {what}") for index in range(count)]
        ends, pos, last = array("Q", (self.pos,)), self.pos, self.end - _U64.size
        view, unpack, append = self._view, _U64.unpack_from, ends.append
        for _ in range(count):
            length = unpack(view, pos)[0] if pos <= last else 0
            pos += _U64.size + length
            if length > _MAX_STRING_BYTES or pos > self.end:
                break
            append(pos)
        strings, num_good = StringArray(view, ends), len(ends) - 1
        try:
            strings.join()
        except UnicodeDecodeError as error:
            num_good = bisect_right(ends, ends[0] + error.start) - 1
        if num_good < count:
            self.pos = ends[num_good]
            self.string(f"item {num_good} of {what}")  # which says what is wrong with it
        self.pos = pos
        return strings


@dataclass(frozen=True, slots=True)
class _Part:
    """One GGUF file: metadata, tensors, and the bytes of each tensor."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]
    views: dict[str, np.ndarray]  # uint8 [rows, row_bytes]


def open_gguf(path: Path) -> Checkpoint:
    """Open a GGUF file, or all parts of a split one when path is its first part."""
    first = _read_part(path)
    architecture = first.metadata.get("general.architecture")
    count = first.metadata.get("split.count", 1)
    if not isinstance(count, int) or not 0 <= count <= _MAX_PARTS:
        raise CheckpointError(f"{path} is damaged: it claims to be one of {count!r} parts.")
    parts = [first] if count <= 1 else [first, *_read_other_parts(path, first, count)]
    if not isinstance(architecture, str) or not architecture:
        raise CheckpointError(f"{path} does not say its architecture (general.architecture).")
    tensors: dict[str, TensorInfo] = {}
    views: dict[str, np.ndarray] = {}
    for part in parts:
        tensors.update(part.tensors)
        views.update(part.views)
    return Checkpoint(path, first.metadata, tensors, views)


def _read_other_parts(path: Path, first: _Part, count: int) -> list[_Part]:
    match = _PART_NAME.fullmatch(path.name)
    if match is None or int(match["count"]) != count:
        raise CheckpointError(
            f"{path} is a part of a model split in {count}, but its name does not end in "
            f"-00001-of-{count:05d}.gguf; give the parts their original names."
        )
    names = [f"{match['stem']}-{index:05d}-of-{count:05d}.gguf" for index in range(1, count + 1)]
    if first.metadata.get("split.no") != 0 or int(match["index"]) != 1:
        raise CheckpointError(f"{path} is a later part of a split model; open {names[0]} instead.")
    parts: list[_Part] = []
    seen = set(first.tensors)
    for index, name in enumerate(names[1:], start=1):
        part_path = path.with_name(name)
        if not part_path.exists():
            raise CheckpointError(f"{path} is split in {count} parts and {name} is missing.")
        part = _read_part(part_path)
        if (part.metadata.get("split.no"), part.metadata.get("split.count")) != (index, count):
            raise CheckpointError(f"{part_path} is not part {index + 1} of {count} of {path.name}.")
        if again := seen & part.tensors.keys():
            raise CheckpointError(f"{part_path} repeats tensor {min(again)!r} of another part.")
        seen |= part.tensors.keys()
        parts.append(part)
    promised = first.metadata.get("split.tensors.count", len(seen))
    if promised != len(seen):
        raise CheckpointError(f"{path} promises {promised} tensors; its parts hold {len(seen)}.")
    return parts


def _read_part(path: Path) -> _Part:
    data = map_file(path)
    cursor = _Cursor(path, data)
    num_tensors, num_entries = _read_preamble(cursor)
    metadata = _read_metadata(cursor, num_entries)
    alignment = _read_alignment(cursor, metadata)
    infos = [_read_tensor_info(cursor, alignment) for _ in range(num_tensors)]
    data_start = -(-cursor.pos // alignment) * alignment
    _check_layout(cursor, infos, max(0, len(data) - data_start))
    tensors: dict[str, TensorInfo] = {}
    views: dict[str, np.ndarray] = {}
    for info, offset in infos:
        if info.name in tensors:
            cursor.fail(f"tensor {_quote(info.name)} appears twice")
        start = data_start + offset
        tensors[info.name] = info
        views[info.name] = data[start : start + info.nbytes].reshape(
            -1, row_bytes(info.qtype, info.shape[-1])
        )
    return _Part(metadata, tensors, views)


def _read_preamble(cursor: _Cursor) -> tuple[int, int]:
    """Check magic and version; return the numbers of tensors and of metadata entries."""
    magic = cursor.scalar(struct.Struct("4s"), "the first four bytes")
    if magic == b"FUGG":
        raise CheckpointError(f"{cursor.path} is a big-endian GGUF, which is not supported.")
    if magic != b"GGUF":
        raise CheckpointError(f"{cursor.path} is not a GGUF file: it begins with {magic!r}.")
    version = cursor.scalar(_U32, "the version")
    if version not in (2, 3):
        if version & 0xFFFF == 0 and version >> 24 in (1, 2, 3):
            raise CheckpointError(f"{cursor.path} is a big-endian GGUF, which is not supported.")
        raise CheckpointError(
            f"{cursor.path} is GGUF version {version}; only versions 2 and 3 are supported."
        )
    num_tensors = cursor.scalar(_U64, "the tensor count")
    num_entries = cursor.scalar(_U64, "the metadata count")
    for count, what, least_bytes in (
        (num_entries, "metadata entries", 13),
        (num_tensors, "tensors", 33),
    ):
        if count > _MAX_ENTRIES:
            cursor.fail(f"it claims {count} {what}, more than the {_MAX_ENTRIES} allowed")
        cursor.need(count * least_bytes, f"the list of {count} {what}")
    return num_tensors, num_entries


def _read_metadata(cursor: _Cursor, num_entries: int) -> dict[str, Any]:
    metadata: dict[str, Any] = {}
    for index in range(num_entries):
        key = cursor.string(f"metadata key {index}", _MAX_NAME_BYTES)
        if not key:
            cursor.fail(f"metadata key {index} is empty")
        if key in metadata:
            cursor.fail(f"metadata key {_quote(key)} appears twice")
        what = f"metadata value {_quote(key)}"
        metadata[key] = cursor.value(cursor.scalar(_U32, what), what)
    return metadata


def _read_alignment(cursor: _Cursor, metadata: dict[str, Any]) -> int:
    alignment = metadata.get("general.alignment", _DEFAULT_ALIGNMENT)
    is_valid = isinstance(alignment, int) and 8 <= alignment <= 1 << 20
    if not is_valid or alignment & (alignment - 1):
        cursor.fail(
            f"general.alignment is {_quote(alignment)}, not a power of two from 8 to 1048576"
        )
    return int(alignment)


def _read_tensor_info(cursor: _Cursor, alignment: int) -> tuple[TensorInfo, int]:
    """One tensor's description and its offset from the start of the data."""
    name = cursor.string("a tensor name", _MAX_NAME_BYTES)
    what = f"tensor {_quote(name)}"
    if not name:
        cursor.fail("a tensor has an empty name")
    num_dims = cursor.scalar(_U32, what)
    if not 1 <= num_dims <= _MAX_DIMS:
        cursor.fail(f"{what} has {num_dims} dimensions instead of 1 to {_MAX_DIMS}")
    shape = tuple(cursor.scalar(_U64, what) for _ in range(num_dims))[::-1]
    type_number = cursor.scalar(_U32, what)
    offset = cursor.scalar(_U64, what)
    try:
        qtype = QuantType(type_number)
    except ValueError:
        type_name = _OTHER_TYPES.get(type_number, "unknown")
        raise CheckpointError(
            f"{cursor.path} stores {what} in GGML type {type_number} ({type_name}), "
            "which is not supported; files named Q4_0 to Q8_0 or Q4_K_M to Q6_K are."
        ) from None
    num_weights = prod(shape)
    if num_weights == 0 or num_weights >= 1 << 63:
        cursor.fail(f"{what} has the impossible shape {shape}")
    if shape[-1] % qtype.block_len:
        cursor.fail(f"{what} has rows of {shape[-1]}, not whole {qtype.name} blocks")
    if offset % alignment:
        cursor.fail(f"{what} lies at offset {offset}, which is not a multiple of {alignment}")
    nbytes = num_weights // qtype.block_len * qtype.block_bytes
    return TensorInfo(name, shape, qtype, nbytes), offset


def _check_layout(
    cursor: _Cursor, infos: list[tuple[TensorInfo, int]], num_data_bytes: int
) -> None:
    """Stop when a tensor leaves the file or shares bytes with another one."""
    end, previous = 0, ""
    for info, offset in sorted(infos, key=lambda pair: pair[1]):
        what = f"tensor {_quote(info.name)}"
        if offset + info.nbytes > num_data_bytes:
            cursor.fail(
                f"{what} ends {offset + info.nbytes - num_data_bytes} bytes past the end of the "
                "file; it may be a partial download"
            )
        if offset < end:
            cursor.fail(f"{what} overlaps tensor {_quote(previous)}")
        end, previous = offset + info.nbytes, info.name


def _quote(value: object) -> str:
    """Show a value of the file in a message: control characters escaped, long ones cut."""
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."
