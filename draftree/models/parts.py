"""Parts that several architectures build alike from a file's usual tensor names."""

from collections.abc import Iterable

from draftree.errors import CheckpointError
from draftree.kernels.ops import HeadNorm, Ops, Rope, Weight
from draftree.layers.attention import Attention
from draftree.layers.block import Block, FeedForward
from draftree.layers.rotary import inverse_frequencies
from draftree.models.metadata import Metadata
from draftree.models.model import Embedding, Model
from draftree.models.source import TensorSource


def read_rope(
    ops: Ops, metadata: Metadata, source: TensorSource, head_dim: int, *, interleaved: bool
) -> Rope:
    """Frequencies from the base, divided by rope_freqs.weight where the file has it."""
    rotary_dim = metadata.count("rope.dimension_count", head_dim)
    if rotary_dim > head_dim or rotary_dim % 2:
        raise CheckpointError(f"{rotary_dim} rotary dims do not fit heads of {head_dim}.")
    frequencies = inverse_frequencies(rotary_dim, metadata.number("rope.freq_base", 10000.0))
    if source.has("rope_freqs.weight"):
        frequencies /= source.array("rope_freqs.weight", 1, rotary_dim // 2)[0]
    scaling = metadata.optional("rope.scaling.type") or "none"
    if scaling == "linear":
        frequencies /= metadata.number("rope.scaling.factor")
    elif scaling != "none":
        raise CheckpointError(f"Rope scaling of type '{scaling}' is not supported yet.")
    return Rope(ops.rope_table(frequencies), head_dim, interleaved)


def read_feed_forward(source: TensorSource, prefix: str, hidden: int, width: int) -> FeedForward:
    return FeedForward(
        gate=source.projection(f"{prefix}.ffn_gate.weight", width, hidden),
        up=source.projection(f"{prefix}.ffn_up.weight", width, hidden),
        down=source.projection(f"{prefix}.ffn_down.weight", hidden, width),
    )


def read_vocabulary(
    ops: Ops, source: TensorSource, vocab_size: int, hidden: int
) -> tuple[Embedding, Weight, Embedding]:
    """Embedding, head, and the head's rows in the file; without one the embedding is both."""
    embedding = Embedding(*source.raw("token_embd.weight", vocab_size, hidden))
    head = embedding
    if source.has("output.weight"):
        head = Embedding(*source.raw("output.weight", vocab_size, hidden))
    return embedding, source.pack(head.raw, head.qtype), head


def read_attention(
    source: TensorSource,
    prefix: str,
    metadata: Metadata,
    rope: Rope,
    *,
    has_head_norms: bool,
    window: int = 0,
    bidirectional: bool = False,
) -> Attention:
    """Separate q, k, v, with biases where the file has them."""
    hidden, head_dim = metadata.count("embedding_length"), rope.head_dim
    heads = metadata.count("attention.head_count")
    kv_heads = metadata.count("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise CheckpointError(f"{heads} query heads cannot share {kv_heads} key heads.")
    eps = metadata.number("attention.layer_norm_rms_epsilon")

    def part(name: str, num_heads: int) -> "tuple[str, int, int]":
        return f"{prefix}.attn_{name}.weight", num_heads * head_dim, hidden

    def norm(name: str) -> HeadNorm | None:
        if not has_head_norms:
            return None
        return HeadNorm(source.vector(f"{prefix}.attn_{name}_norm.weight", head_dim), eps)

    return Attention(
        query=source.projection(*part("q", heads), bias=f"{prefix}.attn_q.bias"),
        key=source.projection(*part("k", kv_heads), bias=f"{prefix}.attn_k.bias"),
        value=source.projection(*part("v", kv_heads), bias=f"{prefix}.attn_v.bias"),
        output=source.projection(
            f"{prefix}.attn_output.weight",
            hidden,
            heads * head_dim,
            bias=f"{prefix}.attn_output.bias",
        ),
        rope=rope,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        query_norm=norm("q"),
        key_norm=norm("k"),
        window=window,
        bidirectional=bidirectional,
    )


def read_dense_model(
    ops: Ops,
    metadata: Metadata,
    source: TensorSource,
    *,
    architecture: str,
    vocab_size: int,
    interleaved_rotary: bool,
    has_head_norms: bool,
) -> Model:
    """Attention in every block, one feed-forward each: the plain decoder-only transformer."""
    hidden = metadata.count("embedding_length")
    heads = metadata.count("attention.head_count")
    head_dim = metadata.count("attention.key_length", max(hidden // heads, 1))
    eps = metadata.number("attention.layer_norm_rms_epsilon")
    rope = read_rope(ops, metadata, source, head_dim, interleaved=interleaved_rotary)
    width = metadata.count("feed_forward_length")

    def read_block(index: int) -> Block:
        prefix = f"blk.{index}"
        return Block(
            mixer_norm=source.vector(f"{prefix}.attn_norm.weight", hidden),
            mixer=read_attention(source, prefix, metadata, rope, has_head_norms=has_head_norms),
            ffn_norm=source.vector(f"{prefix}.ffn_norm.weight", hidden),
            ffn=read_feed_forward(source, prefix, hidden, width),
            eps=eps,
        )

    blocks = map(read_block, range(metadata.count("block_count")))
    return assemble_model(
        ops, metadata, source, blocks, architecture=architecture, vocab_size=vocab_size
    )


def assemble_model(
    ops: Ops,
    metadata: Metadata,
    source: TensorSource,
    blocks: Iterable[Block],
    *,
    architecture: str,
    vocab_size: int,
) -> Model:
    """What comes before and after the blocks, and all of it together.

    The head is read first: it is the largest matrix by far, and while it is packed it takes memory
    twice.
    """
    hidden = metadata.count("embedding_length")
    embedding, head, head_rows = read_vocabulary(ops, source, vocab_size, hidden)
    return Model(
        architecture=architecture,
        vocab_size=vocab_size,
        hidden_size=hidden,
        context_length=metadata.count("context_length"),
        eps=metadata.number("attention.layer_norm_rms_epsilon"),
        embedding=embedding,
        blocks=tuple(blocks),
        output_norm=source.vector("output_norm.weight", hidden),
        head=head,
        head_rows=head_rows,
    )
