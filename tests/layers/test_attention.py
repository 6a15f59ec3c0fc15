"""What happens to queries, keys and values, and in which order."""

from dataclasses import replace

from draftree.layers.attention import Attention, HeadNorm, Projection
from draftree.layers.rotary import Rotary
from tests.layers.tape import Tape

PLAIN = Attention(
    *(Projection("Wq"), Projection("Wk", "bk"), Projection("Wv"), Projection("Wo")),
    rotary=Rotary("table", 16, interleaved=True),
    num_kv_heads=2,
    head_dim=16,
)


def test_keys_are_in_the_cache_before_anyone_attends() -> None:
    tape = Tape()
    PLAIN(tape, "x", "cache", add_to="residual")
    assert tape.calls.index("kv_write") < tape.calls.index("attention")
    assert tape.calls == [*("linears", "rope", "rope", "kv_write", "attention", "linear")]


def test_norms_come_before_rotation_and_the_gate_after_attention() -> None:
    tape = Tape()
    norm = HeadNorm("w", 1e-6)
    gated = replace(PLAIN, query_norm=norm, key_norm=norm, gate=Projection("Wg"))
    gated(tape, "x", "cache", add_to="residual")
    assert tape.calls == [
        *("linears", "head_norm", "rope"),
        *("head_norm", "rope", "kv_write"),
        *("attention", "sigmoid_mul", "linear"),
    ]


def test_context_keys_need_no_query() -> None:
    tape = Tape()
    PLAIN.write_keys(tape, "fused", "cache")
    assert tape.calls == ["linears", "rope", "kv_write"]
