"""Whole rounds as one kernel each."""

import pytest

pytest.importorskip("torch", reason="torch is not installed")

from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.persistent import PersistentPass
from tests.decode.device_oracle import HOT, request


@pytest.mark.parametrize("relative", ["", "selector"])
def test_rounds_are_one_kernel(
    open_engine, launched: list[PersistentPass], any_gpu: Gpu, relative: str
) -> None:
    """Draft, tree, verify, accept and commit; the text is that of plain decoding."""
    count = 100 if any_gpu.is_real else 6
    # On a Hopper, attention inside of a persistent kernel has other bits than by warpgroups.
    plain_engine = open_engine(0, persistent=any_gpu.is_real)
    plain = [event.token for event in plain_engine.generate(request(HOT, count))]
    engine = open_engine(22, persistent=True, relative=relative)
    stream = engine.generate(request(HOT, count))
    assert [event.token for event in stream] == plain
    assert stream.usage.acceptance_length > 1.2
    rounds = [
        one for one in launched if any(k.name == "accept_kernel" for k, _ in one.source.kinds)
    ]
    scored = [any(k.name == "edges_kernel" for k, _ in one.source.kinds) for one in rounds]
    assert any(scored) == bool(relative)
    # A real GPU runs a kernel to load it, and captures it; what it then replays is not seen.
    num_rounds = stream.usage.rounds.num_rounds
    assert num_rounds > 1 and len(rounds) >= (2 if any_gpu.is_real else num_rounds)
