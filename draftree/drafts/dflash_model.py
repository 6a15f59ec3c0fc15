"""DFlash: a small block-diffusion draft that reads the target's hidden states and fills a block in
one pass.

It shares the target's embedding and head. Its keys and values for the context come from the
target's features alone, so they are computed once per committed token; those of the block are
thrown away after the pass. Relatives are told by what their files hold: DFlash2 by a selector of
candidates and convolutions, DSpark by a Markov head, JetSpec by a causal mask inside the block.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final

import numpy as np

from draftree.core import DraftSize, ModelConfig
from draftree.drafts.dflash_head import MarkovHead, PairHead, Selector
from draftree.drafts.token_table import TokenTable, index_listed
from draftree.errors import CheckpointError, ModelError
from draftree.kernels.ops import Array, KvState, Ops, Weight, narrow
from draftree.layers.attention import Attention, Projection
from draftree.layers.block import Block
from draftree.layers.conv_block import BlockConv, ConvBlock
from draftree.models.metadata import Metadata
from draftree.models.model import Model
from draftree.models.parts import read_attention, read_feed_forward, read_rope
from draftree.models.source import TensorSource
from draftree.weights.checkpoint import Checkpoint

_PADDING = 0.01  # of a vocabulary; files of one model may be padded differently
_EQUAL_TOKENS = 0.9  # at least; makers of files rename a few
_CONTEXT_LEN = 4096  # positions that a layer without a window of its own looks back
# What tells relatives.
_SELECTOR, _CONV, _MARKOV = "selector_hidden.weight", "attn_conv_base", "markov_w1.weight"
_USUAL: Final = MappingProxyType(
    {"logit_scale": 1.0, "final_logit_softcapping": 0.0, "input_embedding_scale": 1.0}
)
_PARTS, _MANY = ("attn", "ffn"), 1 << 30
_FEWEST_SCORED = 12  # candidates of a position
_UNUSED_TOKEN = 5  # the type of tokens that only fill the vocabulary up


@dataclass(frozen=True, slots=True)
class DraftConfig:
    """What a draft says about the target it was trained for."""

    hidden_size: int
    block_size: int
    feature_layers: tuple[int, ...]  # the target's hidden state after each of these layers
    mask_token: int
    vocab_size: int | None  # of the target, where the file says it
    draft_vocab: tuple[int, ...] = ()  # the only ones worth proposing, rising; none: all
    is_causal: bool = False  # inside the block
    first_row: int = 1  # of the block, that predicts the position after the anchor


@dataclass(frozen=True, slots=True)
class Draft:
    config: DraftConfig
    fuse: Projection
    context_norm: Array
    blocks: tuple[Block, ...]
    output_norm: Array
    eps: float
    head: PairHead | None = None  # what changes a candidate's logit by the token before it

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

    def record_projection(self, ops: Ops, x: Array) -> Array | None:
        """What the head makes of the block's hidden states, if it reads them."""
        if self.head is None or self.head.projection is None:
            return None
        return self.head.projection(ops, ops.rms_norm(x, self.output_norm, self.eps))

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
    for key, usual in _USUAL.items():
        if metadata.optional(key) not in (None, usual):
            raise CheckpointError(f"{checkpoint.path} asks for {key}, which is not supported.")
    samples_anchor = metadata.optional("sample_from_anchor")
    if samples_anchor is None:
        samples_anchor = _MARKOV in checkpoint.tensors
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
        is_causal=bool(metadata.optional("attention.causal")),
        first_row=0 if samples_anchor else 1,
    )


def name_kind(checkpoint: Checkpoint) -> str:
    """What people call a draft of this file."""
    if _SELECTOR in checkpoint.tensors:
        return "DFlash2" if f"blk.0.{_CONV}" in checkpoint.tensors else "DFlash with selector"
    if _MARKOV in checkpoint.tensors:
        return "DSpark"
    return "JetSpec" if read_draft_config(checkpoint).is_causal else "DFlash"


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
        block = Block(
            mixer_norm=source.vector(f"{prefix}.attn_norm.weight", hidden),
            mixer=read_attention(
                source,
                prefix,
                metadata,
                rope,
                has_head_norms=True,
                window=window,
                bidirectional=not config.is_causal,
            ),
            ffn_norm=source.vector(f"{prefix}.ffn_norm.weight", hidden),
            ffn=read_feed_forward(source, prefix, hidden, metadata.count("feed_forward_length")),
            eps=eps,
        )
        if source.has(f"{prefix}.{_CONV}"):
            convs = (_read_conv(ops, source, f"{prefix}.{name}_conv", metadata) for name in _PARTS)
            parts = (block.mixer_norm, block.mixer, block.ffn_norm, block.ffn, block.eps)
            block = ConvBlock(*parts, *convs)
        blocks.append(block)
    fuse = source.projection("fc.weight", hidden, len(config.feature_layers) * hidden)
    context_norm = source.vector("enc.output_norm.weight", hidden)
    output_norm = source.vector("output_norm.weight", hidden)
    head = _read_head(checkpoint, source, config)
    source.finish()
    return Draft(config, fuse, context_norm, tuple(blocks), output_norm, eps, head)


def _read_conv(ops: Ops, source: TensorSource, name: str, metadata: Metadata) -> BlockConv:
    """base: [2, taps, width]; projection: [2 * taps * groups, width]; before and after each."""
    hidden, taps = metadata.count("embedding_length"), metadata.count("conv_kernel_size")
    group_len = metadata.count("conv_group_size")
    if hidden % group_len:
        raise CheckpointError(f"Groups of {group_len} do not fit a hidden size of {hidden}.")
    base = source.array(f"{name}_base", 2 * taps, hidden)
    num_rows = 2 * taps * (hidden // group_len)
    own = [
        Projection(source.weight(f"{name}_proj.weight", num_rows, hidden, keep=rows))
        for rows in np.split(np.arange(num_rows), 2)
    ]
    return BlockConv(ops.constant(base[:taps]), ops.constant(base[taps:]), *own)


def _read_head(
    checkpoint: Checkpoint, source: TensorSource, config: DraftConfig
) -> PairHead | None:
    metadata = Metadata(checkpoint)
    is_listed = bool(metadata.optional("selector_by_head_token"))
    row_of = index_listed(config.draft_vocab) if is_listed and config.draft_vocab else None

    def table(name: str) -> tuple[TokenTable, int]:
        num_rows, rank = checkpoint.tensors[name].shape if source.has(name) else (0, 0)
        return TokenTable(*source.raw(name, num_rows, rank), row_of), rank

    if source.has(_SELECTOR):
        before, rank = table("selector_predecessor.weight")
        after, after_rank = table("selector_successor.weight")
        num_rows = {len(before.raw), len(after.raw)}
        if is_listed and num_rows != {len(config.draft_vocab) + 1}:
            reason = "have a row for each head token and one for all others"
            raise CheckpointError(f"{checkpoint.path}: the selector's tables do not {reason}.")
        if rank != after_rank:
            raise CheckpointError(f"{checkpoint.path}: the selector's tables differ in rank.")
        projection = source.projection(_SELECTOR, rank, config.hidden_size)
        num_tokens = min(_count_used(checkpoint), _MANY if is_listed else min(num_rows))
        top_k = metadata.count("selector_top_k")
        # A DFlash2 learned with its selector; other drafts guess without one as well.
        fewest = 0 if source.has(f"blk.0.{_CONV}") else min(top_k, _FEWEST_SCORED)
        return Selector(before, after, projection, top_k, num_tokens, fewest)
    if source.has(_MARKOV):
        source.ignore("conf_proj.")  # the engine learns by itself how far a draft can be trusted
        before, _ = table(_MARKOV)
        after, _ = table("markov_w2.weight")
        return MarkovHead(before, after(np.arange(len(after.raw))))
    return None


def _count_used(checkpoint: Checkpoint) -> int:
    """Tokens up to the last that is more than filling, where the file tells."""
    kinds = checkpoint.metadata.get("tokenizer.ggml.token_type")
    if not isinstance(kinds, Sequence) or isinstance(kinds, str):
        return _MANY
    used = [i for i, kind in enumerate(kinds) if kind != _UNUSED_TOKEN]
    return used[-1] + 1 if used else _MANY
