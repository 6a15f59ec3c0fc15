"""Requests that take turns on a GPU, whose copies stay there or move to main memory."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.config import GpuInfo
from draftree.core import Request
from draftree.engine import parts as parts_module
from draftree.kernels.cuda import compile as cuda_compile
from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.copies import DeviceCopies
from tests.engine.turns import HOT, alone, make_prompt, open_engine, take_turns

REQUESTS = Request(make_prompt(20, 1), 4, HOT), Request(make_prompt(12, 2), 4)


def test_replies_do_not_depend_on_where_copies_lie(
    any_gpu: Gpu, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cuda_compile, "gpu", lambda index: any_gpu)
    monkeypatch.setattr(parts_module, "find_gpu", lambda device: GpuInfo(0, "a GPU", 2**36))
    moved: list[int] = []
    move = DeviceCopies._move_oldest

    def noting(copies: DeviceCopies) -> int:
        moved.append(move(copies))
        return moved[-1]

    monkeypatch.setattr(DeviceCopies, "_move_oldest", noting)
    engine = open_engine(math="auto", chunk=16, max_ctx=64, prefix_bytes=1 << 30)
    expected = [alone(engine, request).facts for request in REQUESTS]
    for room in (0, 150_000, 1 << 30):  # none, little, plenty
        engine.reset()
        moved.clear()
        engine._parts.device._copies.max_bytes = room  # type: ignore[attr-defined]
        replies = take_turns(engine, REQUESTS)
        assert [reply.facts for reply in replies] == expected, room
        assert replies[0].num_pauses >= 3
        assert (sum(moved) > 0) == (room == 150_000)
    engine.close()
