"""A block's operations in order, with attention and with a delta net."""

from draftree.kernels.ops import Columns, KvState, LayerStore
from draftree.layers.attention import Projection
from draftree.layers.block import Block, FeedForward
from draftree.layers.delta_net import DeltaNet, RecurrentState
from tests.layers.tape import Tape
from tests.layers.test_attention import PLAIN

FFN = FeedForward(Projection("Wg"), Projection("Wu"), Projection("Wd"))
FFN_CALLS = ["rms_norm", "linears", "silu_mul", "linear"]
DELTA_NET = DeltaNet(
    *(Projection(name) for name in ("Wqkv", "Wz", "Wa", "Wb", "Wo")),
    *("taps", "decay", "decay bias", "norm"),
    eps=1e-6,
    key_heads=2,
    value_heads=4,
    head_dim=16,
    kernel_len=4,
)


def test_a_block_copies_its_input_in_its_first_norm() -> None:
    tape, columns = Tape(), Columns("features", 128)
    Block("n1", PLAIN, "n2", FFN, eps=1e-6)(tape, "x", KvState(), copy_to=columns)
    mixer = ["linears", "rope_and_store_kv", "attention", "matmul_input", "linear"]
    assert tape.calls == ["rms_norm", *mixer, *FFN_CALLS]
    assert [options.get("copy_to") for options in tape.options] == [columns, *[None] * 9]


def test_a_delta_net_convolves_and_updates_in_one_operation() -> None:
    tape = Tape()
    state = RecurrentState(LayerStore(), LayerStore())
    Block("n1", DELTA_NET, "n2", FFN, eps=1e-6)(tape, "x", state)
    mixer = ["linears", "conv_gated_delta", "gated_norm", "linear"]
    assert tape.calls == ["rms_norm", *mixer, *FFN_CALLS]
