"""Copies of what layers remember come back whole, wherever they were moved meanwhile."""

import gc
import random

import numpy as np
import pytest

pytest.importorskip("torch", reason="torch is not installed")

import torch

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.copies import DeviceCopies, KeptArray

KIB = 1024


def numbers(seed: int, count: int, gpu: Gpu) -> torch.Tensor:
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    return torch.from_numpy(values).to(gpu.place)


def is_on_gpu(copy: object) -> bool:
    return isinstance(copy, KeptArray) and isinstance(copy._value, torch.Tensor)


def test_a_copy_outlives_what_it_was_made_of(any_gpu: Gpu) -> None:
    copies = DeviceCopies(64 * KIB, any_gpu)
    array = numbers(1, 6 * 4 * 5, any_gpu).view(6, 4, 5)
    expected = array.transpose(0, 2).cpu().numpy().copy()
    kept = copies.keep(array.transpose(0, 2))
    array.zero_()
    assert is_on_gpu(kept)
    assert kept.nbytes == expected.nbytes
    np.testing.assert_array_equal(np.asarray(kept), expected)
    assert torch.equal(copies.read(kept).cpu(), torch.from_numpy(expected))


def test_without_room_copies_are_in_main_memory(any_gpu: Gpu) -> None:
    for max_bytes in (0, 2 * KIB):
        copies = DeviceCopies(max_bytes, any_gpu)
        array = numbers(1, KIB, any_gpu)
        kept = copies.keep(array)
        assert isinstance(kept, np.ndarray)
        assert torch.equal(copies.read(kept), array.cpu())
        assert copies.num_bytes <= max_bytes


def test_the_least_recently_used_moves_away(any_gpu: Gpu) -> None:
    copies = DeviceCopies(4 * KIB, any_gpu)
    arrays = [numbers(seed, 256, any_gpu) for seed in range(5)]  # a KiB each
    kept = [copies.keep(array) for array in arrays[:4]]
    copies.read(kept[0])
    kept.append(copies.keep(arrays[4]))
    assert [is_on_gpu(copy) for copy in kept] == [True, False, True, True, True]
    for copy, array in zip(kept, arrays, strict=True):
        assert torch.equal(copies.read(copy).cpu(), array.cpu())


def test_a_copy_may_stay_behind_others(any_gpu: Gpu) -> None:
    copies = DeviceCopies(2 * KIB, any_gpu)
    kept = [copies.keep(numbers(seed, 256, any_gpu), moves_others=False) for seed in range(3)]
    assert [is_on_gpu(copy) for copy in kept] == [True, True, False]


def test_what_nobody_holds_leaves_its_place(any_gpu: Gpu) -> None:
    copies = DeviceCopies(4 * KIB, any_gpu)
    kept = [copies.keep(numbers(seed, 256, any_gpu)) for seed in range(4)]
    del kept[1:3]
    gc.collect()
    wide = copies.keep(numbers(9, 512, any_gpu))  # in the place of both
    assert is_on_gpu(wide)
    assert all(map(is_on_gpu, kept))
    assert copies.num_bytes == 4 * KIB


def test_room_is_made_ahead(any_gpu: Gpu) -> None:
    copies = DeviceCopies(8 * KIB, any_gpu)
    kept = [copies.keep(numbers(seed, 256, any_gpu)) for seed in range(8)]
    copies.make_room(3 * KIB)
    assert [is_on_gpu(copy) for copy in kept] == [False] * 3 + [True] * 5
    copies.make_room(3 * KIB)
    assert sum(map(is_on_gpu, kept)) == 5


def test_released_memory_is_not_taken_again(any_gpu: Gpu) -> None:
    copies = DeviceCopies(8 * KIB, any_gpu)
    arrays = [numbers(seed, 256, any_gpu) for seed in range(3)]
    kept = [copies.keep(array) for array in arrays]
    copies.release()
    assert copies.num_bytes == 0
    assert not any(map(is_on_gpu, kept))
    for copy, array in zip(kept, arrays, strict=True):
        assert torch.equal(copies.read(copy), array.cpu())
    assert isinstance(copies.keep(arrays[0]), np.ndarray)


@pytest.mark.parametrize("seed", range(4))
def test_any_history_keeps_all_values(any_gpu: Gpu, seed: int) -> None:
    rng, copies = random.Random(seed), DeviceCopies(24 * KIB, any_gpu)
    held: dict[int, tuple[object, torch.Tensor]] = {}
    for number in range(300):
        action = rng.random()
        if action < 0.5 or not held:
            array = numbers(number, rng.randrange(1, 1500), any_gpu)
            held[number] = copies.keep(array), array.cpu()
        elif action < 0.75:
            held.pop(rng.choice(sorted(held)))
        elif action < 0.8:
            copies.make_room(rng.randrange(24 * KIB))
        else:
            copy, array = held[rng.choice(sorted(held))]
            assert torch.equal(copies.read(copy).cpu(), array)
        assert copies.num_bytes <= 24 * KIB
    for copy, array in held.values():
        assert torch.equal(torch.from_numpy(np.asarray(copy)), array)
