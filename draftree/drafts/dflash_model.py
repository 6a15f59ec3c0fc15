"""DFlash: a small block-diffusion draft that reads the target's hidden states and fills a block in
one pass.

It shares the target's embedding and head. Its keys and values for the context come from the
target's features alone, so they are computed once per committed token; those of the block are
thrown away after the pass.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from draftree.core import DraftSize, ModelConfig
from draftree.errors import CheckpointError, ModelError
from draftree.kernels.ops import Array, KvState, Ops, Weight, narrow
from draftree.layers.attention import Attention, Projection
from draftree.layers.block import Block
from draftree.models.metadata import Metadata
from draftree.models.model import Model
from draftree.models.parts import read_attention, read_feed_forward, read_rope
from draftree.models.source import TensorSource
from draftree.weights.checkpoint import Checkpoint

_PADDING = 0.01  # of a vocabulary; files of one model may be padded differently
_EQUAL_TOKENS = 0.9  # at least; makers of files rename a few
_CONTEXT_LEN = 4096  # positions that a layer without a window of its own looks back


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What a draft says about the target it was trained for."""

    hidden_size: int
    block_size: int
    feature_layers: tuple[int, ...]  # the target's hidden state after each of these layers
    mask_token: int
    vocab_size: int | None  # of the target, where the file says it
    draft_vocab: tuple[int, ...] = ()  # the only ones worth proposing, rising; none: all


@dataclass(frozen=True, slots=True)
class Draft:
    config: DraftConfig
    fuse: Projection
    context_norm: Array
    blocks: tuple[Block, ...]
    output_norm: Array
    eps: float

    def new_state(self, ops: Ops) -> tuple[KvState, ...]:
        return tuple(narrow(block.mixer.new_state(ops), KvState) for block in self.blocks)

    def record_context(self, ops: Ops, features: Array, states: tuple[KvState, ...]) -> None:
        """Keys and values of committed positions, the same fused vector for every layer."""
        x = self.fuse(ops, ops.matmul_input(features))
        fused = ops.rms_norm(x, self.context_norm, self.eps)
        for block, state in zip(self.blocks, states, strict=True):
            assert isinstance(block.mixer, Attention)
            with ops.scope():
                block.mixer.write_keys(ops, fused, state)

    def record_block(self, ops: Ops, target: Model, states: tuple[KvState, ...]) -> Array:
        """The block's hidden states before the final norm."""
        x = target.embedding(ops)
        for block, state in zip(self.blocks, states, strict=True):
            block(ops, x, state)
        return x

    def record_head(self, ops: Ops, head: Weight, x: Array) -> Array:
        """head: the target's, or some of its rows."""
        return ops.head(x, self.output_norm, self.eps, head)


def read_draft_config(checkpoint: Checkpoint) -> DraftConfig:
    if checkpoint.architecture != "dflash":
        raise ModelError(
            f"{checkpoint.path} is a '{checkpoint.architecture}' model, not a DFlash draft."
        )
    metadata = Metadata(checkpoint)
    layers = metadata.optional("target_layers")
    mask = checkpoint.metadata.get("tokenizer.ggml.mask_token_id")
    if not isinstance(layers, list) or not layers or not all(isinstance(i, int) for i in layers):
        raise CheckpointError(f"{checkpoint.path} does not list the target layers it reads.")
    if not isinstance(mask, int):
        raise CheckpointError(f"{checkpoint.path} does not name its mask token.")
    likely = metadata.optional("head_tokens") or []
    if not isinstance(likely, list) or likely != sorted({i for i in likely if isinstance(i, int)}):
        raise CheckpointError(f"{checkpoint.path}: its head tokens are not a rising list of ids.")
    return DraftConfig(
        hidden_size=metadata.count("embedding_length"),
        block_size=metadata.count("block_size"),
        feature_layers=tuple(i - 1 for i in layers),  # the file counts inputs of the next layer
        mask_token=mask,
        vocab_size=len(_tokens(checkpoint)) or _vocab_size(metadata),
        draft_vocab=tuple(likely),
    )


def read_draft_size(checkpoint: Checkpoint) -> DraftSize:
    """What planning needs to know, without loading a tensor."""
    config, metadata = read_draft_config(checkpoint), Metadata(checkpoint)
    kv_heads = metadata.count("attention.head_count_kv", metadata.count("attention.head_count"))
    head_dim = metadata.count("attention.key_length")
    return DraftSize(
        weight_bytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
        kv_width=metadata.count("block_count") * 2 * kv_heads * head_dim,
        feature_width=len(config.feature_layers) * config.hidden_size,
        block_len=config.block_size,
        feature_layers=config.feature_layers,
        context_len=max(_windows(metadata, metadata.count("block_count"))),
        head_dim=head_dim,
    )


def _tokens(checkpoint: Checkpoint) -> Sequence[object]:
    tokens = checkpoint.metadata.get("tokenizer.ggml.tokens")
    return tokens if isinstance(tokens, Sequence) and not isinstance(tokens, str) else ()


def _vocab_size(metadata: Metadata) -> int | None:
    return None if metadata.optional("vocab_size") is None else metadata.count("vocab_size")


def check_tokens(draft: Checkpoint, target: Checkpoint) -> None:
    """Refuse a draft whose file lists other tokens than the target's; a few may be renamed."""
    pairs = list(zip(_tokens(draft), _tokens(target), strict=False))
    num_equal = sum(a == b for a, b in pairs)
    if num_equal < _EQUAL_TOKENS * len(pairs):
        raise ModelError(
            f"The draft {draft.path} does not fit the target {target.path}: only {num_equal} of "
            f"{len(pairs)} tokens are the same, so it was made for another tokenizer."
        )


def check_fit(
    config: DraftConfig, draft_name: str, target: Model | ModelConfig, target_name: str
) -> None:
    """Refuse a draft that was made for another target."""
    reason, vocab_size = "", target.vocab_size
    trained_size = vocab_size if config.vocab_size is None else config.vocab_size
    if config.hidden_size != target.hidden_size:
        reason = f"it expects hidden size {config.hidden_size}, the target has {target.hidden_size}"
    elif not all(0 <= i < target.num_layers for i in config.feature_layers):
        reason = (
            f"it reads layers {list(config.feature_layers)}, the target has {target.num_layers}"
        )
    elif not 0 <= config.mask_token < vocab_size:
        reason = (
            f"its mask token {config.mask_token} is outside the target's vocabulary of {vocab_size}"
        )
    elif abs(trained_size - vocab_size) > _PADDING * vocab_size:
        reason = f"it was trained on a vocabulary of {trained_size}, the target has {vocab_size}"
    elif (
        config.draft_vocab and not 0 <= config.draft_vocab[0] <= config.draft_vocab[-1] < vocab_size
    ):
        reason = f"it proposes tokens outside the target's vocabulary of {vocab_size}"
    if reason:
        raise ModelError(f"The draft {draft_name} does not fit the target {target_name}: {reason}.")


def _windows(metadata: Metadata, num_layers: int) -> list[int]:
    """How far back each layer looks: its sliding window, or our bound for full attention."""
    window = metadata.optional("attention.sliding_window")
    pattern = metadata.optional("attention.sliding_window_pattern")
    if not window or not isinstance(pattern, list) or len(pattern) != num_layers:
        return [_CONTEXT_LEN] * num_layers
    return [int(window) if is_sliding else _CONTEXT_LEN for is_sliding in pattern]


def load_draft(checkpoint: Checkpoint, ops: Ops) -> Draft:
    config = read_draft_config(checkpoint)
    metadata, source = Metadata(checkpoint), TensorSource(checkpoint, ops)
    hidden, num_layers = config.hidden_size, metadata.count("block_count")
    eps = metadata.number("attention.layer_norm_rms_epsilon")
    head_dim = metadata.count("attention.key_length")
    rope = read_rope(ops, metadata, source, head_dim, interleaved=False)
    blocks = []
    for i, window in enumerate(_windows(metadata, num_layers)):
        prefix = f"blk.{i}"
        blocks.append(
            Block(
                mixer_norm=source.vector(f"{prefix}.attn_norm.weight", hidden),
                mixer=read_attention(
                    source,
                    prefix,
                    metadata,
                    rope,
                    has_head_norms=True,
                    window=window,
                    bidirectional=True,
                ),
                ffn_norm=source.vector(f"{prefix}.ffn_norm.weight", hidden),
                ffn=read_feed_forward(
                    source, prefix, hidden, metadata.count("feed_forward_length")
                ),
                eps=eps,
            )
        )
    fuse = source.projection("fc.weight", hidden, len(config.feature_layers) * hidden)
    context_norm = source.vector("enc.output_norm.weight", hidden)
    output_norm = source.vector("output_norm.weight", hidden)
    source.finish()
    return Draft(config, fuse, context_norm, tuple(blocks), output_norm, eps)
