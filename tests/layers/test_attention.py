"""What happens to queries, keys and values, and in which order."""

from dataclasses import replace

import pytest

from draftree.kernels.ops import HeadNorm, KvState, LayerStore, Rope
from draftree.layers.attention import Attention, Projection
from tests.layers.tape import Tape

CACHE = KvState()
PLAIN = Attention(
    *(Projection("Wq"), Projection("Wk", "bk"), Projection("Wv"), Projection("Wo")),
    rope=Rope("table", 16, interleaved=True),
    num_kv_heads=2,
    head_dim=16,
)


def test_keys_are_in_the_cache_before_anyone_attends() -> None:
    tape = Tape()
    PLAIN(tape, "x", CACHE, add_to="residual")
    assert tape.calls == ["linears", "rope_and_store_kv", "attention", "matmul_input", "linear"]


def test_heads_are_normed_when_they_are_rotated_and_the_gate_comes_after_attention() -> None:
    tape = Tape()
    query_norm, key_norm = HeadNorm("wq", 1e-6), HeadNorm("wk", 1e-6)
    gated = replace(PLAIN, query_norm=query_norm, key_norm=key_norm, gate=Projection("Wg"))
    gated(tape, "x", CACHE, add_to="residual")
    assert tape.calls == ["linears", "rope_and_store_kv", "attention", "sigmoid_mul", "linear"]
    queries, keys = tape.args[1][:2]
    assert queries.norm is query_norm and keys.norm is key_norm


def test_context_keys_need_no_query() -> None:
    tape = Tape()
    PLAIN.write_keys(tape, "fused", CACHE)
    assert tape.calls == ["linears", "rope_and_store_kv"]


def test_a_state_of_another_layer_is_refused() -> None:
    with pytest.raises(TypeError, match="expected a KvState of this device, not LayerStore"):
        PLAIN(Tape(), "x", LayerStore(), add_to="residual")
