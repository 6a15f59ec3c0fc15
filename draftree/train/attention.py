"""Attention of the torch target: whole sequences, or one token per row over a cache.

Queries, keys, values and the gate of the output, where there is one, come from one matrix.
"""

from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

Turn = tuple[Tensor, Tensor]  # cos and signed sin [..., 1, rotary_dim], to be shared by all heads
LayerCache = tuple[Tensor, Tensor]  # what one layer keeps of every sequence, [batch, ...] each


@dataclass(frozen=True, slots=True)
class Sequences:
    """A pass over whole sequences. num_kept [batch]: how many tokens of each go into the cache of a
    layer that cannot take one back; None: all.
    """

    turn: Turn
    num_kept: Tensor | None = None


@dataclass(frozen=True, slots=True)
class Step:
    """A pass of one token per row. Rows that are done leave recurrent state as it is."""

    turn: Turn
    positions: Tensor  # int64 [batch]
    is_hidden: Tensor  # bool [batch, 1, 1, length]: positions after the row's own
    is_done: Tensor  # bool [batch]


@dataclass(frozen=True, slots=True)
class TeacherAttention:
    inputs: Tensor  # rows of queries, keys, values and the gate
    bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    num_heads: int
    num_kv_heads: int
    head_dim: int
    eps: float

    def new_cache(self, batch_size: int, max_len: int) -> LayerCache:
        """Keys and values: [batch, kv_heads, max_len, head_dim]."""
        shape = (batch_size, self.num_kv_heads, max_len, self.head_dim)
        return self.output.new_zeros(shape), self.output.new_zeros(shape)

    def read(self, x: Tensor, sequences: Sequences, cache: LayerCache | None) -> Tensor:
        """x: [batch, length, hidden_size], after the norm."""
        *parts, gate = self._project(x, sequences.turn)
        q, k, v = (part.transpose(1, 2) for part in parts)
        if cache is not None:
            for kept, part in zip(cache, (k, v), strict=True):
                kept[:, :, : x.shape[1]] = part
        mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self._finish(mixed.transpose(1, 2), gate)

    def step(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """x: [batch, hidden_size], written at each row's own position."""
        count, groups = len(x), self.num_heads // self.num_kv_heads
        rows, length = torch.arange(count, device=x.device), step.is_hidden.shape[-1]
        q, k, v, gate = self._project(x, step.turn)
        for kept, part in zip(cache, (k, v), strict=True):
            kept[rows, :, step.positions] = part
        q = q.reshape(count, self.num_kv_heads, groups, self.head_dim) * self.head_dim**-0.5
        keys, values = (part[:count, :, :length] for part in cache)
        scores = (q @ keys.transpose(2, 3)).masked_fill_(step.is_hidden, -torch.inf)
        return self._finish((scores.softmax(-1) @ values).flatten(1, 2), gate)

    def _project(self, x: Tensor, turn: Turn) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        """Queries, keys, values, gates [..., heads, head_dim], the first two rotated. Without a
        gate there are no heads of it.
        """
        joined = F.linear(x, self.inputs, self.bias).unflatten(-1, (-1, self.head_dim))
        counts = self.num_heads, self.num_kv_heads, self.num_kv_heads
        q, k, v, gate = joined.split((*counts, joined.shape[-2] - sum(counts)), dim=-2)
        if self.query_norm is not None and self.key_norm is not None:
            q, k = rms_norm(q, self.query_norm, self.eps), rms_norm(k, self.key_norm, self.eps)
            return rotate(q, turn), rotate(k, turn), v, gate
        turned = rotate(joined[..., : self.num_heads + self.num_kv_heads, :], turn)
        q, k = turned.split((self.num_heads, self.num_kv_heads), dim=-2)
        return q, k, v, gate

    def _finish(self, mixed: Tensor, gate: Tensor) -> Tensor:
        if gate.shape[-2]:
            mixed = mixed * gate.sigmoid()
        return F.linear(mixed.flatten(-2), self.output, self.output_bias)


def read_attention(mixer: Any, eps: float, dtype: torch.dtype) -> TeacherAttention:
    """From a loaded model's layer; rows are put in the order that `rotate` wants."""
    order = _pair_order(mixer.rope.interleaved, 2 * len(mixer.rope.table), mixer.head_dim)

    def reorder(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, mixer.head_dim))[:, order].flatten(0, 1)

    def join(q: Tensor, k: Tensor, *others: Tensor) -> Tensor:
        return torch.cat([reorder(q), reorder(k), *others]).to(dtype)

    parts = [mixer.query, mixer.key, mixer.value, *([mixer.gate] if mixer.gate else [])]
    has_bias = any(part.bias is not None for part in parts)
    biases = [
        torch.zeros_like(part.weight[:, 0]) if part.bias is None else part.bias for part in parts
    ]
    return TeacherAttention(
        inputs=join(*(part.weight for part in parts)),
        bias=join(*biases) if has_bias else None,
        output=mixer.output.weight,
        output_bias=None if mixer.output.bias is None else mixer.output.bias.to(dtype),
        query_norm=mixer.query_norm.weight[order].to(dtype) if mixer.query_norm else None,
        key_norm=mixer.key_norm.weight[order].to(dtype) if mixer.key_norm else None,
        num_heads=len(mixer.query.weight) // mixer.head_dim,
        num_kv_heads=mixer.num_kv_heads,
        head_dim=mixer.head_dim,
        eps=eps,
    )


def _pair_order(interleaved: bool, rotary_dim: int, head_dim: int) -> list[int]:
    """Which row of a head comes where, so that pairs (2i, 2i + 1) become (i, i + half)."""
    if not interleaved:
        return list(range(head_dim))
    pairs = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2)]
    return [*pairs, *range(rotary_dim, head_dim)]


def rotary_table(positions: Tensor, frequencies: Tensor, dtype: torch.dtype) -> Turn:
    angles = positions[..., None, None].float() * frequencies
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([cos, cos], -1).to(dtype), torch.cat([-sin, sin], -1).to(dtype)


def rotate(x: Tensor, turn: Turn) -> Tensor:
    """Turn the pairs (i, i + rotary_dim / 2) of every head: x [..., heads, head_dim]."""
    cos, sin = turn
    rotary_dim = cos.shape[-1]
    part = x[..., :rotary_dim]
    turned = torch.addcmul(part * cos, part.roll(rotary_dim // 2, -1), sin)
    return turned if rotary_dim == x.shape[-1] else torch.cat([turned, x[..., rotary_dim:]], -1)


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    return F.rms_norm(x, weight.shape, weight, eps)
