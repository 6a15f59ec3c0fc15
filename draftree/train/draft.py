"""The DFlash draft as a torch module: many blocks of many sequences in one pass.

In: features of the context, anchors, block tokens. Out: hidden states of every block row. Parameter
names are those of z-lab checkpoints. Each block sees the context before its anchor and itself.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from draftree.errors import ModelError
from draftree.train.attention import Turn, rotary_table, rotate
from draftree.train.rounding import BLOCK_LEN, round_weights
from draftree.train.settings import DraftShape
from draftree.train.teacher import Teacher

_PART_BLOCKS = 16  # blocks that attention takes at once: rows of others are only masked work


@dataclass(frozen=True, slots=True)
class DraftSpec:
    """All sizes of a draft, as its files state them."""

    hidden_size: int
    num_layers: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    feature_layers: tuple[int, ...]
    num_target_layers: int
    block_size: int
    mask_token: int
    vocab_size: int
    context_length: int
    eps: float
    rope_base: float
    sliding_window: int = 0


def resolve_shape(
    shape: DraftShape, teacher: Teacher, mask_token: int, max_len: int = 0
) -> DraftSpec:
    """Fill in what was left to the target, and to max_len, the longest sequence to learn from."""
    num_target_layers = len(teacher.layers)
    features = shape.feature_layers or usual_features(num_target_layers)
    if not all(0 <= layer < num_target_layers for layer in features):
        raise ModelError(
            f"The feature layers {list(features)} are not all among the target's "
            f"{num_target_layers} layers."
        )
    num_heads = shape.num_heads or teacher.num_heads
    num_kv_heads = shape.num_kv_heads or teacher.num_kv_heads
    if num_heads % num_kv_heads:
        raise ModelError(f"{num_heads} query heads cannot share {num_kv_heads} key heads.")
    return DraftSpec(
        hidden_size=teacher.hidden_size,
        num_layers=shape.num_layers,
        ffn_size=shape.ffn_size or teacher.ffn_size,
        num_heads=num_heads,
        num_kv_heads=num_kv_heads,
        head_dim=shape.head_dim or teacher.head_dim,
        feature_layers=features,
        num_target_layers=num_target_layers,
        block_size=shape.block_size,
        mask_token=mask_token if shape.mask_token < 0 else shape.mask_token,
        vocab_size=teacher.vocab_size,
        context_length=teacher.context_length,
        eps=1e-6,
        rope_base=teacher.rope_base,
        # Beyond the distances it has seen a draft guesses badly, so it does not look there.
        sliding_window=max(shape.sliding_window or max_len, 0),
    )


def usual_features(num_target_layers: int, count: int = 5) -> tuple[int, ...]:
    """Evenly from the second layer to the third last, fewer where the target is small."""
    first, last = min(1, num_target_layers - 1), max(num_target_layers - 3, 0)
    if last <= first:
        return tuple(range(num_target_layers))[-2:]
    step = (last - first) / (count - 1)
    return tuple(sorted({round(first + index * step) for index in range(count)}))


class Norm(nn.Module):
    def __init__(self, size: int, eps: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(size))
        self._eps = eps

    def forward(self, x: Tensor) -> Tensor:
        return F.rms_norm(x, self.weight.shape, self.weight.to(x.dtype), self._eps)


class Matrix(nn.Module):
    """Weights are kept in float32 and used in the dtype of what comes in."""

    def __init__(self, rows: int, cols: int, std: float = 0.02) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(rows, cols) * std)
        self.rounded: Tensor | None = None  # what to use instead

    def forward(self, x: Tensor) -> Tensor:
        return F.linear(x, self.used().to(x.dtype))

    def used(self) -> Tensor:
        """What a pass multiplies with; its gradients go to the weights before rounding."""
        weight = self.weight
        return weight if self.rounded is None else self.rounded + (weight - weight.detach())


@dataclass(frozen=True, slots=True)
class View:
    """Where the rows of a pass are and what they may see."""

    context_turn: Turn
    block_turn: Turn
    num_parts: int  # blocks are looked at in so many parts, each with the context and its own rows
    mask: Tensor  # [batch * num_parts, 1, groups * part_rows, context_len + part_rows], 0 or -inf


class DraftAttention(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        width, kv_width = spec.num_heads * spec.head_dim, spec.num_kv_heads * spec.head_dim
        self.q_proj = Matrix(width, spec.hidden_size)
        self.k_proj = Matrix(kv_width, spec.hidden_size)
        self.v_proj = Matrix(kv_width, spec.hidden_size)
        self.o_proj = Matrix(spec.hidden_size, width, 0.02 / (2 * spec.num_layers) ** 0.5)
        self.q_norm = Norm(spec.head_dim, spec.eps)
        self.k_norm = Norm(spec.head_dim, spec.eps)
        self._head_dim = spec.head_dim
        self._num_kv_heads = spec.num_kv_heads

    def forward(self, x: Tensor, context: Tensor, view: View) -> Tensor:
        """x: [batch, rows, hidden_size]; context: [batch, context_len, hidden_size]."""
        heads = (-1, self._head_dim)
        q = rotate(self.q_norm(self.q_proj(x).unflatten(-1, heads)), view.block_turn)
        sources = ((context, view.context_turn), (x, view.block_turn))
        keys = [
            rotate(self.k_norm(self.k_proj(source).unflatten(-1, heads)), turn)
            for source, turn in sources
        ]
        values = [self.v_proj(source).unflatten(-1, heads) for source, _ in sources]
        k, v = (_join(*parts, num_parts=view.num_parts) for parts in (keys, values))
        # Queries that share a key head are rows of one matrix, so that no key is repeated.
        q = q.unflatten(1, (view.num_parts, -1)).flatten(0, 1)
        q = q.unflatten(2, (self._num_kv_heads, -1)).permute(0, 2, 3, 1, 4)
        mixed = F.scaled_dot_product_attention(q.flatten(2, 3), k, v, attn_mask=view.mask)
        mixed = mixed.view_as(q).permute(0, 3, 1, 2, 4).flatten(2)
        return self.o_proj(mixed.unflatten(0, (-1, view.num_parts)).flatten(1, 2))


def _join(context: Tensor, rows: Tensor, *, num_parts: int) -> Tensor:
    """Of every part: the context's and its own, [batch * num_parts, heads, length, head_dim]."""
    rows = rows.unflatten(1, (num_parts, -1))
    context = context[:, None].expand(-1, num_parts, -1, -1, -1)
    return torch.cat([context, rows], dim=2).flatten(0, 1).transpose(1, 2)


class DraftFeedForward(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.gate_proj = Matrix(spec.ffn_size, spec.hidden_size)
        self.up_proj = Matrix(spec.ffn_size, spec.hidden_size)
        self.down_proj = Matrix(
            spec.hidden_size, spec.ffn_size, 0.02 / (2 * spec.num_layers) ** 0.5
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(x)) * self.up_proj(x))


class DraftLayer(nn.Module):
    def __init__(self, spec: DraftSpec) -> None:
        super().__init__()
        self.input_layernorm = Norm(spec.hidden_size, spec.eps)
        self.self_attn = DraftAttention(spec)
        self.post_attention_layernorm = Norm(spec.hidden_size, spec.eps)
        self.mlp = DraftFeedForward(spec)

    def forward(self, x: Tensor, context: Tensor, view: View) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), context, view)
        return x + self.mlp(self.post_attention_layernorm(x))


class DraftModule(nn.Module):
    def __init__(self, spec: DraftSpec, output_norm: Tensor | None = None) -> None:
        """output_norm: start from the target's, since the head is the target's too."""
        super().__init__()
        self.spec = spec
        self._num_groups = spec.num_heads // spec.num_kv_heads
        self.is_four_bit = False  # compute with matrices as a q4 file holds them
        self._rounded_at: tuple[int, ...] = ()  # the weights' versions then
        self.fc = Matrix(spec.hidden_size, len(spec.feature_layers) * spec.hidden_size)
        self.hidden_norm = Norm(spec.hidden_size, spec.eps)
        self.layers = nn.ModuleList(DraftLayer(spec) for _ in range(spec.num_layers))
        self.norm = Norm(spec.hidden_size, spec.eps)
        if output_norm is not None:
            self.norm.weight.data.copy_(output_norm)
        exponents = torch.arange(0, spec.head_dim, 2, dtype=torch.float64) / spec.head_dim
        frequencies = (spec.rope_base**-exponents).float()
        self.register_buffer("frequencies", frequencies, persistent=False)

    def used_weights(self) -> dict[str, Tensor]:
        """By name, as the forward pass uses them."""
        self._round()
        used = {f"{n}.weight": m.used() for n, m in self.named_modules() if isinstance(m, Matrix)}
        return {**self.state_dict(), **used}

    @torch.no_grad()
    def _round(self) -> None:
        """All at once: on a GPU many small kernels would take as long as the pass."""
        matrices = [m for m in self.modules() if isinstance(m, Matrix)] if self.is_four_bit else []
        found = [matrix for matrix in matrices if matrix.weight.shape[1] % BLOCK_LEN == 0]
        versions = tuple(matrix.weight._version for matrix in found)
        if found and versions != self._rounded_at:  # once a step, however many passes it has
            self._rounded_at = versions
            blocks = [matrix.weight.view(-1, BLOCK_LEN) for matrix in found]
            rounded = round_weights(torch.cat(blocks)).weights()
            for matrix, part in zip(found, rounded.split([len(b) for b in blocks]), strict=True):
                matrix.rounded = part.view_as(matrix.weight)

    def forward(self, features: Tensor, anchors: Tensor, blocks: Tensor) -> Tensor:
        """Hidden states after the final norm, [batch, num_blocks, block_len, hidden_size].

        features: [batch, context_len, num_feature_layers * hidden_size]; anchors: their positions,
        int64 [batch, num_blocks]; blocks: embedded, [batch, num_blocks, block_len, hidden_size].
        """
        self._round()
        block_len = blocks.shape[2]
        context = self.hidden_norm(self.fc(features))
        view = self._look(anchors, block_len, features.shape[1], features.dtype)
        x = blocks.flatten(1, 2)
        for layer in self.layers:
            x = layer(x, context, view)
        return self.norm(x).unflatten(1, (-1, block_len))

    def _look(self, anchors: Tensor, block_len: int, context_len: int, dtype: torch.dtype) -> View:
        frequencies, device = self.frequencies, anchors.device
        places = torch.arange(context_len, device=device)
        rows = (anchors[:, :, None] + torch.arange(block_len, device=device)).flatten(1)
        starts = anchors.repeat_interleave(block_len, dim=1)
        sees_context = places < starts[:, :, None]
        if self.spec.sliding_window:
            sees_context &= rows[:, :, None] - places < self.spec.sliding_window
        part_blocks = math.gcd(anchors.shape[1], _PART_BLOCKS)
        num_parts = anchors.shape[1] // part_blocks
        sees_context = sees_context.unflatten(1, (num_parts, -1)).flatten(0, 1)
        number = torch.arange(part_blocks, device=device).repeat_interleave(block_len)
        own = (number[:, None] == number).expand(len(sees_context), -1, -1)
        is_seen = torch.cat([sees_context, own], dim=2).repeat(1, self._num_groups, 1)
        mask = torch.zeros(is_seen.shape, dtype=dtype, device=device)
        return View(
            context_turn=rotary_table(places[None], frequencies, dtype),
            block_turn=rotary_table(rows, frequencies, dtype),
            num_parts=num_parts,
            mask=mask.masked_fill_(~is_seen, -torch.inf)[:, None],
        )
