"""A tiny GGUF writer for tests. Unlike real writers it can also write wrong files."""

import struct
from dataclasses import dataclass, field

U32, F32, BOOL, STRING, ARRAY, U64 = 4, 6, 7, 8, 9, 10


def string(text: str | bytes) -> bytes:
    data = text.encode() if isinstance(text, str) else text
    return struct.pack("<Q", len(data)) + data


def entry(key: str | bytes, value_type: int, value: bytes) -> bytes:
    return string(key) + struct.pack("<I", value_type) + value


def text_entry(key: str | bytes, text: str | bytes) -> bytes:
    return entry(key, STRING, string(text))


def u32_entry(key: str, value: int) -> bytes:
    return entry(key, U32, struct.pack("<I", value))


def array(item_type: int, count: int, items: bytes) -> bytes:
    return struct.pack("<IQ", item_type, count) + items


def tensor(
    name: str | bytes, dims: tuple[int, ...], type_number: int = 0, offset: int = 0
) -> bytes:
    """dims in file order: the row length first."""
    packed = b"".join(struct.pack("<Q", dim) for dim in dims)
    return (
        string(name)
        + struct.pack("<I", len(dims))
        + packed
        + struct.pack("<IQ", type_number, offset)
    )


@dataclass
class GgufBytes:
    """The pieces of a file; every one may be replaced by something wrong."""

    entries: list[bytes] = field(default_factory=list)
    tensors: list[bytes] = field(default_factory=list)
    data: bytes = b""
    magic: bytes = b"GGUF"
    version: bytes = struct.pack("<I", 3)
    num_tensors: int | None = None
    num_entries: int | None = None
    alignment: int = 32

    def build(self) -> bytes:
        num_tensors = len(self.tensors) if self.num_tensors is None else self.num_tensors
        num_entries = len(self.entries) if self.num_entries is None else self.num_entries
        head = self.magic + self.version + struct.pack("<QQ", num_tensors, num_entries)
        head += b"".join(self.entries) + b"".join(self.tensors)
        return head + bytes(-len(head) % self.alignment) + self.data


def small_file() -> GgufBytes:
    """A valid file with one value of every kind and three tensors."""
    return GgufBytes(
        entries=[
            text_entry("general.architecture", "llama"),
            u32_entry("llama.block_count", 2),
            entry("llama.eps", F32, struct.pack("<f", 0.5)),
            entry("tokenizer.add_bos", BOOL, b"\1"),
            entry("general.size", U64, struct.pack("<Q", 2**63 + 1)),
            entry("tokenizer.tokens", ARRAY, array(STRING, 2, string("é") + string(""))),
            entry("tokenizer.flags", ARRAY, array(BOOL, 2, b"\1\0")),
            entry("tokenizer.types", ARRAY, array(5, 2, struct.pack("<ii", -1, 7))),
            entry("nested", ARRAY, array(ARRAY, 2, array(0, 2, b"\1\2") + array(0, 1, b"\3"))),
        ],
        tensors=[
            tensor("norm.weight", (3,), 0, 0),
            tensor("matrix.weight", (32, 2), 8, 32),
            tensor("cube.weight", (2, 3, 2), 1, 128),
        ],
        data=struct.pack("<3f", 1, 2, 3) + bytes(20) + bytes(range(68)) + bytes(28) + bytes(24),
    )
