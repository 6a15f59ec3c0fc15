"""Qwen3.5 and 3.6 text models: three gated delta net blocks, then one gated attention block,
repeated.

Facts of the file: value heads are stored tiled (value head j uses key head j % key_heads); the
query projection holds, per head, the query and then the gate; a multi-token-prediction block at the
end is not part of the main pass (drafts/mtp.py).
"""

from collections.abc import Callable
from functools import partial

import numpy as np

from draftree.errors import CheckpointError
from draftree.kernels.ops import HeadNorm, Ops, Rope
from draftree.layers.attention import Attention, Projection
from draftree.layers.block import Block
from draftree.layers.delta_net import DeltaNet
from draftree.models.metadata import Metadata
from draftree.models.model import Model
from draftree.models.parts import assemble_model, read_feed_forward, read_rope
from draftree.models.source import TensorSource


def _read_attention(
    source: TensorSource, prefix: str, metadata: Metadata, rope: Rope, eps: float
) -> Attention:
    hidden, head_dim = metadata.count("embedding_length"), rope.head_dim
    heads = metadata.count("attention.head_count")
    kv_heads = metadata.count("attention.head_count_kv")
    rows = np.arange(heads * 2 * head_dim).reshape(heads, 2, head_dim)  # per head: query, gate
    name, num_rows = f"{prefix}.attn_q.weight", heads * 2 * head_dim
    return Attention(
        query=Projection(source.weight(name, num_rows, hidden, keep=rows[:, 0].ravel())),
        gate=Projection(source.weight(name, num_rows, hidden, keep=rows[:, 1].ravel())),
        key=source.projection(f"{prefix}.attn_k.weight", kv_heads * head_dim, hidden),
        value=source.projection(f"{prefix}.attn_v.weight", kv_heads * head_dim, hidden),
        output=source.projection(f"{prefix}.attn_output.weight", hidden, heads * head_dim),
        rope=rope,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        query_norm=HeadNorm(source.vector(f"{prefix}.attn_q_norm.weight", head_dim), eps),
        key_norm=HeadNorm(source.vector(f"{prefix}.attn_k_norm.weight", head_dim), eps),
    )


def _read_delta_net(
    ops: Ops, source: TensorSource, prefix: str, metadata: Metadata, eps: float
) -> DeltaNet:
    hidden, head_dim = metadata.count("embedding_length"), metadata.count("ssm.state_size")
    key_heads = metadata.count("ssm.group_count")
    value_heads = metadata.count("ssm.time_step_rank")
    kernel_len = metadata.count("ssm.conv_kernel")
    inner = value_heads * head_dim
    if metadata.count("ssm.inner_size") != inner or value_heads % key_heads:
        raise CheckpointError(
            f"{value_heads} value heads of {head_dim} do not fit {key_heads} key heads "
            f"and an inner size of {metadata.count('ssm.inner_size')}."
        )
    channels = 2 * key_heads * head_dim + inner
    return DeltaNet(
        qkv=source.projection(f"{prefix}.attn_qkv.weight", channels, hidden),
        gate=source.projection(f"{prefix}.attn_gate.weight", inner, hidden),
        alpha=source.projection(f"{prefix}.ssm_alpha.weight", value_heads, hidden),
        beta=source.projection(f"{prefix}.ssm_beta.weight", value_heads, hidden),
        output=source.projection(f"{prefix}.ssm_out.weight", hidden, inner),
        conv_weight=ops.constant(source.array(f"{prefix}.ssm_conv1d.weight", channels, kernel_len)),
        decay=source.vector(f"{prefix}.ssm_a", value_heads),
        decay_bias=source.vector(f"{prefix}.ssm_dt.bias", value_heads),
        norm=source.vector(f"{prefix}.ssm_norm.weight", head_dim),
        eps=eps,
        key_heads=key_heads,
        value_heads=value_heads,
        head_dim=head_dim,
        kernel_len=kernel_len,
    )


def _attention_layers(metadata: Metadata, num_layers: int) -> list[bool]:
    recurrent = metadata.optional("attention.recurrent_layers")
    if isinstance(recurrent, list) and len(recurrent) >= num_layers:
        return [not flag for flag in recurrent[:num_layers]]
    interval = metadata.count("full_attention_interval", 4)
    return [(i + 1) % interval == 0 for i in range(num_layers)]


def read_attention_block(
    source: TensorSource, prefix: str, metadata: Metadata, rope: Rope
) -> Block:
    read_mixer = partial(_read_attention, source, prefix, metadata, rope)
    return _read_block(source, prefix, metadata, read_mixer)


def _read_block(
    source: TensorSource,
    prefix: str,
    metadata: Metadata,
    read_mixer: Callable[[float], Attention | DeltaNet],
) -> Block:
    hidden = metadata.count("embedding_length")
    eps = metadata.number("attention.layer_norm_rms_epsilon")
    return Block(
        mixer_norm=source.vector(f"{prefix}.attn_norm.weight", hidden),
        mixer=read_mixer(eps),
        ffn_norm=source.vector(f"{prefix}.post_attention_norm.weight", hidden),
        ffn=read_feed_forward(source, prefix, hidden, metadata.count("feed_forward_length")),
        eps=eps,
    )


def read_model(ops: Ops, metadata: Metadata, source: TensorSource, *, vocab_size: int) -> Model:
    rope = read_rope(
        ops, metadata, source, metadata.count("attention.key_length"), interleaved=False
    )
    num_extra = metadata.optional("nextn_predict_layers") or 0
    num_layers = metadata.count("block_count") - int(num_extra)
    for i in range(num_layers, metadata.count("block_count")):
        source.ignore(f"blk.{i}.")

    def read_block(index: int, is_attention: bool) -> Block:
        prefix = f"blk.{index}"
        if is_attention:
            return read_attention_block(source, prefix, metadata, rope)
        read_mixer = partial(_read_delta_net, ops, source, prefix, metadata)
        return _read_block(source, prefix, metadata, read_mixer)

    blocks = map(read_block, range(num_layers), _attention_layers(metadata, num_layers))
    return assemble_model(
        ops, metadata, source, blocks, architecture="qwen35", vocab_size=vocab_size
    )
