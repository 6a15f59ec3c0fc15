"""Copies of what layers remember: in the GPU's memory while there is room, else in main memory.

In: arrays of the GPU. Out: `KeptArray`s, which are numpy arrays to whoever reads them elsewhere. A
copy inside the GPU takes a thousandth of the time of one across the bus. When there is no room, the
copies that were used longest ago move to main memory.
"""

import weakref
from bisect import insort
from collections import deque
from collections.abc import Callable

import numpy as np
import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.ops import HeldArray

_SEGMENT = 256 * 2**20  # bytes that are taken from the GPU together, and kept
_ALIGNMENT = 512


class _Segment:
    """A run of the GPU's memory, in which regions are taken first fit."""

    def __init__(self, size: int, place: torch.device) -> None:
        self.size = size
        self._array = torch.empty(size, dtype=torch.uint8, device=place)
        self._free = [(0, size)]  # start and length, in order, no two beside each other

    def take(self, size: int) -> int | None:
        for i, (start, length) in enumerate(self._free):
            if length >= size:
                self._free[i : i + 1] = [(start + size, length - size)] if length > size else []
                return start
        return None

    def give(self, start: int, size: int) -> None:
        insort(self._free, (start, size))
        merged: list[tuple[int, int]] = []
        for begin, length in self._free:
            if merged and sum(merged[-1]) == begin:
                begin, length = merged[-1][0], merged.pop()[1] + length
            merged.append((begin, length))
        self._free = merged

    def view(self, start: int, like: torch.Tensor) -> torch.Tensor:
        end = start + like.numel() * like.element_size()
        return self._array[start:end].view(like.dtype).view(like.shape)


class KeptArray(HeldArray):
    """One array, wherever it lies now."""

    def __init__(self, value: torch.Tensor, number: int, give_back: Callable[[], None]) -> None:
        self.number = number
        self._value: torch.Tensor | np.ndarray = value
        self._give_back = give_back

    @property
    def nbytes(self) -> int:
        return self._value.nbytes

    def __array__(self, dtype: None = None, /, *, copy: bool | None = None) -> np.ndarray:
        value = self._value
        return value if isinstance(value, np.ndarray) else value.cpu().numpy().copy()

    def tensor(self) -> torch.Tensor:
        value = self._value
        return torch.from_numpy(value) if isinstance(value, np.ndarray) else value

    def move_to_host(self) -> None:
        self._value = np.asarray(self)
        self._give_back()
        self._give_back = _do_nothing

    def __del__(self) -> None:
        self._give_back()


class DeviceCopies:
    """max_bytes: of the GPU's memory at most; it is taken as it is needed."""

    def __init__(self, max_bytes: int, gpu: Gpu) -> None:
        self.max_bytes = max_bytes
        self._place = gpu.place
        self._segments: list[_Segment] = []
        self._kept: dict[int, weakref.ref[KeptArray]] = {}  # in the GPU, least recently used first
        self._returned: deque[tuple[int, _Segment, int, int]] = deque()  # by any thread, any time
        self._number = 0

    @property
    def num_bytes(self) -> int:
        """Of the GPU's memory, whether there is something in it or not."""
        return sum(segment.size for segment in self._segments)

    def keep(self, array: torch.Tensor, *, moves_others: bool = True) -> HeldArray:
        """A copy; the array may be a view of any strides. moves_others: for want of room another
        copy goes to main memory, not this one.
        """
        size = -(-array.numel() * array.element_size() // _ALIGNMENT) * _ALIGNMENT
        region = self._take(size, moves_others) if size else None
        if region is None:
            return array.cpu().numpy().copy()
        segment, start = region
        view = segment.view(start, array)
        view.copy_(array)
        self._number += 1
        item = self._number, segment, start, size
        kept = KeptArray(view, self._number, lambda: self._returned.append(item))
        self._kept[self._number] = weakref.ref(kept)
        return kept

    def read(self, copy: HeldArray) -> torch.Tensor:
        """To be put back at once; where it lies is up to the copy."""
        if not isinstance(copy, KeptArray):
            return torch.from_numpy(np.asarray(copy))
        if (reference := self._kept.pop(copy.number, None)) is not None:
            self._kept[copy.number] = reference
        return copy.tensor()

    def make_room(self, num_bytes: int) -> None:
        """Have so much free of what may be taken, as far as moving copies away does it."""
        self._settle()
        used = sum(kept.nbytes for kept in map(_follow, self._kept.values()) if kept is not None)
        while self._kept and used + num_bytes > self.max_bytes:
            used -= self._move_oldest()

    def release(self) -> None:
        """Move everything to main memory, and take nothing any more: others need the memory."""
        self.max_bytes = 0
        self.make_room(0)
        while self._kept:
            self._move_oldest()
        self._segments.clear()
        if self._place.type == "cuda":
            torch.cuda.empty_cache()

    def _take(self, size: int, moves_others: bool) -> tuple[_Segment, int] | None:
        while True:
            self._settle()
            for segment in self._segments:
                if (start := segment.take(size)) is not None:
                    return segment, start
            if not self._grow(size) and not (moves_others and self._move_oldest()):
                return None

    def _grow(self, size: int) -> bool:
        room = self.max_bytes - self.num_bytes
        size = max(size, min(_SEGMENT, room))
        if size > room:
            return False
        try:
            self._segments.append(_Segment(size, self._place))
        except torch.OutOfMemoryError:
            self.max_bytes = self.num_bytes
            return False
        return True

    def _move_oldest(self) -> int:
        """How many bytes went to main memory; 0: there is nothing to move."""
        while self._kept:
            kept = _follow(self._kept.pop(next(iter(self._kept))))
            if kept is not None:
                kept.move_to_host()
                self._settle()
                return kept.nbytes
        return 0

    def _settle(self) -> None:
        """What was given back meanwhile is free."""
        while self._returned:
            number, segment, start, size = self._returned.popleft()
            self._kept.pop(number, None)
            segment.give(start, size)


def _follow(reference: "weakref.ref[KeptArray]") -> KeptArray | None:
    return reference()


def _do_nothing() -> None:
    pass
