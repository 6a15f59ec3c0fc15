"""Multi-token prediction (MTP): a block that came with the target drafts a token at a time.

It reads the target's hidden state at a position, after the output norm, with the embedding of the
token that follows; its own output takes the hidden state's place in the next step. Features are a
token's embedding and the residual stream after the last layer, so that the entry of a position in
the block's cache is made of its own features and those of the position before.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from draftree.core import DraftSize
from draftree.drafts.context import ContextDrafter
from draftree.drafts.drafter import Drafter, DraftPrograms, Proposal, Ranking
from draftree.errors import CheckpointError, ModelError
from draftree.kernels.ops import Array, Columns, KvState, Ops, Runnable, Weight, narrow
from draftree.layers.attention import Attention, Projection
from draftree.layers.block import Block
from draftree.models.metadata import Metadata
from draftree.models.model import Model
from draftree.models.parts import read_rope
from draftree.models.qwen35 import read_attention_block
from draftree.models.source import TensorSource
from draftree.state.span import Parts, Span
from draftree.weights.checkpoint import Checkpoint

_BLOCK_LEN = 8  # the anchor and the steps after it, at most
_TARGETS = ("qwen35",)  # whose blocks for it are known
_EMBEDDING = -1  # the layer whose output is the token's embedding


@dataclass(frozen=True, slots=True)
class MtpBlock:
    embedding_norm: Array
    hidden_norm: Array
    from_embedding: Projection
    from_hidden: Projection
    block: Block
    head_norm: Array | None  # None: the target's
    head: Weight | None

    def fuse(self, ops: Ops, embedded: Array, hidden: Array) -> Array:
        """What the block reads: the next token's embedding and the hidden state before it."""
        eps = self.block.eps
        x = self.from_embedding(ops, ops.rms_norm(embedded, self.embedding_norm, eps))
        return self.from_hidden(ops, ops.rms_norm(hidden, self.hidden_norm, eps), add_to=x)

    def record_context(self, ops: Ops, features: Array, hidden_norm: Array, state: KvState) -> None:
        """Keys and values. features: embeddings, and residuals of the positions before."""
        width = features.shape[1] // 2
        hidden = ops.norm(features[:, width:], hidden_norm, self.block.eps)
        x = self.fuse(ops, features[:, :width], hidden)
        assert isinstance(self.block.mixer, Attention)
        normed = ops.rms_norm(x, self.block.mixer_norm, self.block.eps)
        self.block.mixer.write_keys(ops, normed, state)

    def record_step(
        self, ops: Ops, embedded: Array, residual: Array, norm: Array, state: KvState, out: Array
    ) -> None:
        """One position. residual: before the norm that makes a hidden state of it. out: may be
        residual.
        """
        x = self.fuse(ops, embedded, ops.norm(residual, norm, self.block.eps))
        self.block(ops, x, state)
        ops.copy_columns(x, Columns(out, 0))


class MtpKind:
    """How the block of a target becomes a drafter; weights/mtp.py cuts it out."""

    def name(self, checkpoint: Checkpoint) -> str:
        return "MTP"

    def read_size(self, checkpoint: Checkpoint) -> DraftSize:
        metadata = Metadata(checkpoint)
        head_dim = metadata.count("attention.key_length")
        return DraftSize(
            weight_bytes=sum(tensor.nbytes for tensor in checkpoint.tensors.values()),
            kv_width=2 * metadata.count("attention.head_count_kv") * head_dim,
            feature_width=2 * metadata.count("embedding_length"),
            block_len=_BLOCK_LEN,
            feature_layers=(_EMBEDDING, metadata.count("block_count") - 1),
            context_len=metadata.count("context_length"),
            head_dim=head_dim,
        )

    def check_fit(self, checkpoint: Checkpoint, target: Checkpoint, model: Model) -> None:
        if model.architecture not in _TARGETS:
            raise ModelError(
                f"{checkpoint.path} is a '{model.architecture}' model; its multi-token prediction "
                f"is not supported, only that of {', '.join(_TARGETS)}."
            )

    def load(
        self,
        checkpoint: Checkpoint,
        target: Model,
        ops: Ops,
        *,
        block_len: int,
        use_draft_vocab: bool,
    ) -> Drafter:
        return MtpDrafter(load_mtp(checkpoint, target.vocab_size, ops), target, ops, block_len)


def load_mtp(checkpoint: Checkpoint, vocab_size: int, ops: Ops) -> MtpBlock:
    metadata, source = Metadata(checkpoint), TensorSource(checkpoint, ops)
    hidden, prefix = metadata.count("embedding_length"), "blk.0.nextn"
    if source.has(f"{prefix}.embed_tokens.weight"):
        raise CheckpointError(
            f"{checkpoint.path} has embeddings of its own for multi-token prediction, which is "
            "not supported."
        )
    rope = read_rope(
        ops, metadata, source, metadata.count("attention.key_length"), interleaved=False
    )
    raw, qtype = source.raw(f"{prefix}.eh_proj.weight", hidden, 2 * hidden)
    if hidden % qtype.block_len:
        raise CheckpointError(
            f"{checkpoint.path}: {prefix}.eh_proj.weight cannot be cut in two between its blocks."
        )
    halves = [np.ascontiguousarray(half) for half in np.split(raw, 2, axis=1)]
    head_norm, head = f"{prefix}.shared_head_norm.weight", f"{prefix}.shared_head_head.weight"
    block = MtpBlock(
        embedding_norm=source.vector(f"{prefix}.enorm.weight", hidden),
        hidden_norm=source.vector(f"{prefix}.hnorm.weight", hidden),
        from_embedding=Projection(ops.pack(halves[0], qtype)),
        from_hidden=Projection(ops.pack(halves[1], qtype)),
        block=read_attention_block(source, "blk.0", metadata, rope),
        head_norm=source.vector(head_norm, hidden) if source.has(head_norm) else None,
        head=source.weight(head, vocab_size, hidden) if source.has(head) else None,
    )
    source.finish()
    return block


class MtpDrafter(ContextDrafter):
    """The block bound to its target. Rounds are the host's: every step waits for a choice."""

    def __init__(self, mtp: MtpBlock, target: Model, ops: Ops, block_len: int = 0) -> None:
        state = narrow(mtp.block.mixer.new_state(ops), KvState)
        super().__init__(ops, (state,), 2 * target.hidden_size, block_len or _BLOCK_LEN)
        self._width = target.hidden_size
        head_norm = target.output_norm if mtp.head_norm is None else mtp.head_norm
        self._residual = ops.new_rows(self._width)  # of the last position, in the first row
        self._out = ops.new_rows(self._width)
        with ops.scope(), ops.capture() as self._context_program:
            mtp.record_context(ops, self._input, target.output_norm, state)
        steps: list[Runnable] = []
        for rows, norm in ((self._residual, target.output_norm), (self._out, head_norm)):
            with ops.scope(), ops.capture() as program:
                mtp.record_step(ops, target.embedding(ops), rows, norm, state, self._out)
            steps.append(program)
        self._first_step, self._next_step = steps
        with ops.scope(), ops.capture() as self._head_program:
            head = target.head if mtp.head is None else mtp.head
            self._logits = ops.head(self._out, head_norm, mtp.block.eps, head)
        self.reset()

    def programs(self) -> DraftPrograms | None:
        return None

    def copy(self, start: int, end: int) -> Parts:
        """With the residual at the end, where it is known, and the end that it belongs to."""
        last = np.full((1, self._width + 1), -1.0, dtype=np.float32)
        if end == self.position:
            last[:, :-1], last[0, -1] = self._ops.read(self._residual, 1), end
        return (*super().copy(start, end), (last,))

    def restore(self, spans: Sequence[Span], shared: int, length: int) -> None:
        """Where the residual before the next position is not known, that one does without."""
        is_here = shared == length == self.position
        ends = [np.asarray(span.parts[-1][0]) for span in spans]
        lasts = [end for end in ends if end[0, -1] == length]
        own = [Span(span.start, span.end, span.parts[:-1]) for span in spans]
        super().restore(own, shared, length)
        if not is_here:
            self._residual[:1] = self._ops.constant(lasts[0][:, :-1]) if lasts else 0.0

    def reset(self) -> None:
        super().reset()
        self._residual[:1] = 0.0

    def _begin_at(self, first: int, length: int) -> None:
        """There is no entry at the first position, which has no position before it."""
        super()._begin_at(first, length)
        self._ops.step.set_first(max(first, 1))

    def _put(self, features: Array) -> None:
        start, end, width = self._num_waiting, self._num_waiting + len(features), self._width
        rows = self._input[start:end]
        rows[:, :width] = features[:, :width]
        rows[:1, width:] = self._residual[:1]
        rows[1:, width:] = features[:-1, width:]
        self._residual[:1] = features[-1:, width:]
        self._num_waiting = end

    def propose(
        self, anchor: int, ranking: Ranking, num_candidates: int, num_positions: int
    ) -> Proposal:
        """A chain, and at each of its positions the candidates beside it."""
        self._flush()
        rows: list[Proposal] = []
        num_steps = min(num_positions, self.block_len - 1) if self._context_len else 0
        token = anchor
        for step in range(num_steps):
            logits = self.step_logits(token, step)
            rows.append(ranking.rank(logits, self._context_len + 1 + step, num_candidates))
            token = int(rows[-1].tokens[0, 0])
        if not rows:  # nothing before the anchor
            return Proposal(np.empty((0, 0), dtype=np.int64), np.empty((0, 0)))
        tokens = np.concatenate([row.tokens for row in rows])
        return Proposal(tokens, np.concatenate([row.log_probs for row in rows]))

    def step_logits(self, token: int, step: int) -> np.ndarray:
        """float32 [1, vocab_size]: what follows the token, the anchor at step 0 or what was chosen
        in the step before.
        """
        self._ops.step.set_chain((token,), self._context_len + step)
        self._ops.step.set_rows((0,))
        (self._next_step if step else self._first_step).run()
        self._head_program.run()
        return self._ops.read(self._logits, 1)
