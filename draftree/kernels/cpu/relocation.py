"""Relocations: the places in machine code that depend on where it and its callees lie, for each
machine whose object files elf.py puts into memory.

In: an image of the code, the address that it will have, a place in it, the kind of relocation and
what it refers to. A kind that is not known here is refused.
"""

import struct
from collections.abc import Callable
from dataclasses import dataclass
from typing import Final

_WORD: Final = 0xFFFFFFFFFFFFFFFF


class UnknownCode(Exception):
    """Something in an object file that is not known here."""


@dataclass(frozen=True, slots=True)
class Machine:
    """number: in the header of its object files. stub_bytes: room in the image for each function
    that lies elsewhere. patch(image, base, place, kind, target, stub): stub is that room's place,
    0 if the target is not elsewhere.
    """

    number: int
    stub_bytes: int
    patch: Callable[[bytearray, int, int, int, int, int], None]


def _patch_x86_64(
    image: bytearray, base: int, place: int, kind: int, target: int, stub: int
) -> None:
    absolute, relative = 1, 24
    if kind == relative:
        target -= base + place
    elif kind != absolute:
        raise UnknownCode
    struct.pack_into("<Q", image, place, target & _WORD)


def _patch_arm64(
    image: bytearray, base: int, place: int, kind: int, target: int, stub: int
) -> None:
    """Calls reach 128 MiB, so those of functions elsewhere go through a stub: two instructions,
    then the address, which code that wants the address alone reads as well.
    """
    absolute, relative, call, jump, stub_page, stub_load = 257, 260, 283, 282, 311, 312
    first_part, last_part = 263, 269  # 16 bits of an address in each of four instructions
    if kind in (absolute, relative):
        value = target - (base + place if kind == relative else 0)
        struct.pack_into("<Q", image, place, value & _WORD)
        return
    (instruction,) = struct.unpack_from("<I", image, place)
    if stub:
        load_x16, branch_x16 = 0x58000050, 0xD61F0200
        struct.pack_into("<IIQ", image, stub, load_x16, branch_x16, target & _WORD)
    if kind in (call, jump):
        distance = stub - place if stub else target - (base + place)
        instruction |= distance >> 2 & 0x3FFFFFF
    elif first_part <= kind <= last_part:
        part = (kind - first_part) // 2
        instruction |= (target >> 16 * part & 0xFFFF) << 5
    elif kind == stub_page and stub:
        pages = (base + stub + 8 >> 12) - (base + place >> 12)
        instruction |= (pages & 3) << 29 | (pages >> 2 & 0x7FFFF) << 5
    elif kind == stub_load and stub:
        instruction |= (base + stub + 8 & 0xFFF) >> 3 << 10
    else:
        raise UnknownCode
    struct.pack_into("<I", image, place, instruction)


MACHINES: Final = {
    "x86_64": Machine(62, 0, _patch_x86_64),
    "aarch64": Machine(183, 16, _patch_arm64),
}
