"""The target as torch sees it: many sequences at once, features on the way, for training only.

In: a checkpoint of any supported architecture with attention in every block. Out: hidden states,
features, logits, and one-token steps over a cache. Weights are decoded to one dtype, so the
arithmetic is that of plain torch, not the engine's.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftree.errors import CheckpointError, ModelError
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.models.load import load_model
from draftree.weights.checkpoint import Checkpoint

_PART_ROWS = 4096  # rows of a matrix that one thread decodes


@dataclass(frozen=True, slots=True)
class TeacherLayer:
    """Queries, keys and values are one matrix, gate and up another."""

    mixer_norm: Tensor
    qkv: Tensor
    qkv_bias: Tensor | None
    output: Tensor
    output_bias: Tensor | None
    query_norm: Tensor | None
    key_norm: Tensor | None
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class KvCache:
    """Keys and values per layer: [batch, kv_heads, max_len, head_dim]."""

    keys: list[Tensor]
    values: list[Tensor]

    def part(self, rows: slice) -> "KvCache":
        """A view of some sequences."""
        return KvCache([keys[rows] for keys in self.keys], [v[rows] for v in self.values])


@dataclass(frozen=True, slots=True)
class Read:
    """What a pass over whole sequences gives."""

    hidden: Tensor  # [batch, length, hidden_size], after the final norm
    features: Tensor | None  # [batch, length, num_feature_layers * hidden_size]


@dataclass(frozen=True, slots=True)
class Teacher:
    layers: tuple[TeacherLayer, ...]
    embedding: Tensor  # [vocab_size, hidden_size]
    output_norm: Tensor
    head: Tensor  # [vocab_size, hidden_size]
    frequencies: Tensor  # float32 [rotary_dim / 2]
    num_heads: int
    num_kv_heads: int
    head_dim: int
    ffn_size: int
    eps: float
    context_length: int
    rope_base: float

    @property
    def vocab_size(self) -> int:
        return self.head.shape[0]

    @property
    def hidden_size(self) -> int:
        return self.head.shape[1]

    @property
    def device(self) -> torch.device:
        return self.head.device

    def new_cache(self, batch_size: int, max_len: int) -> KvCache:
        shape = (batch_size, self.num_kv_heads, max_len, self.head_dim)
        keys, values = (
            [torch.zeros(shape, dtype=self.head.dtype, device=self.device) for _ in self.layers]
            for _ in range(2)
        )
        return KvCache(keys, values)

    def logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head.T

    @torch.no_grad()
    def read(
        self, ids: Tensor, feature_layers: tuple[int, ...] = (), *, needs_hidden: bool = True
    ) -> Read:
        """ids: int64 [batch, length], padded on the right. Without hidden states the layers after
        the last feature are left out.
        """
        num_layers = len(self.layers) if needs_hidden else max(feature_layers) + 1
        return self._run(ids, feature_layers, num_layers, None)

    @torch.no_grad()
    def fill(self, ids: Tensor, cache: KvCache) -> Tensor:
        """Read one prompt into each row of a cache: hidden states of every position."""
        return self._run(ids, (), len(self.layers), cache).hidden

    def _run(
        self,
        ids: Tensor,
        feature_layers: tuple[int, ...],
        num_layers: int,
        cache: KvCache | None,
    ) -> Read:
        length = ids.shape[1]
        turn = self._turn(torch.arange(length, device=self.device))
        x = self.embedding[ids]
        features: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers[:num_layers]):
            q, k, v = self._project(layer, x, turn)
            q, k, v = (part.transpose(1, 2) for part in (q, k, v))
            if cache is not None:
                cache.keys[i][:, :, :length] = k
                cache.values[i][:, :, :length] = v
            mixed = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
            x = self._finish(layer, x, mixed.transpose(1, 2).flatten(2))
            if i in feature_layers:
                features[i] = x
        joined = torch.cat([features[i] for i in feature_layers], -1) if feature_layers else None
        return Read(self._norm(x, self.output_norm), joined)

    @torch.no_grad()
    def step(self, tokens: Tensor, positions: Tensor, cache: KvCache, length: int) -> Tensor:
        """Logits after one more token per row, written at its own position. length: all positions
        are below it. tokens, positions: int64 [batch].
        """
        count, groups = len(tokens), self.num_heads // self.num_kv_heads
        rows = torch.arange(count, device=self.device)
        turn = self._turn(positions)
        is_hidden = (torch.arange(length, device=self.device) > positions[:, None])[:, None, None]
        x = self.embedding[tokens]
        for i, layer in enumerate(self.layers):
            q, k, v = self._project(layer, x, turn)
            cache.keys[i][rows, :, positions] = k
            cache.values[i][rows, :, positions] = v
            q = q.reshape(count, self.num_kv_heads, groups, self.head_dim) * self.head_dim**-0.5
            keys, values = (part[i][:count, :, :length] for part in (cache.keys, cache.values))
            scores = (q @ keys.transpose(2, 3)).masked_fill_(is_hidden, -torch.inf)
            mixed = scores.softmax(-1) @ values
            x = self._finish(layer, x, mixed.reshape(count, -1))
        return self.logits(self._norm(x, self.output_norm))

    def _project(
        self, layer: TeacherLayer, x: Tensor, turn: "Turn"
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys, values [..., heads, head_dim], the first two rotated."""
        joined = F.linear(self._norm(x, layer.mixer_norm), layer.qkv, layer.qkv_bias)
        joined = joined.unflatten(-1, (-1, self.head_dim))
        q, k, v = joined.split((self.num_heads, self.num_kv_heads, self.num_kv_heads), dim=-2)
        if layer.query_norm is not None and layer.key_norm is not None:
            q, k = self._norm(q, layer.query_norm), self._norm(k, layer.key_norm)
            return rotate(q, turn), rotate(k, turn), v
        turned = rotate(joined[..., : self.num_heads + self.num_kv_heads, :], turn)
        q, k = turned.split((self.num_heads, self.num_kv_heads), dim=-2)
        return q, k, v

    def _finish(self, layer: TeacherLayer, x: Tensor, mixed: Tensor) -> Tensor:
        x = x + F.linear(mixed, layer.output, layer.output_bias)
        gate, up = F.linear(self._norm(x, layer.ffn_norm), layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _turn(self, positions: Tensor) -> "Turn":
        return rotary_table(positions, self.frequencies, self.head.dtype)

    def _norm(self, x: Tensor, weight: Tensor) -> Tensor:
        return F.rms_norm(x, weight.shape, weight, self.eps)


Turn = tuple[Tensor, Tensor]  # cos and signed sin [..., 1, rotary_dim], to be shared by all heads


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


class _Decoder:
    """The part of a device's operations that reading a model needs: bytes to tensors."""

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype

    def pack(self, raw: np.ndarray, qtype: QuantType) -> Tensor:
        def decode(rows: np.ndarray) -> Tensor:
            return torch.from_numpy(dequantize(rows, qtype)).to(self._device, self._dtype)

        parts = [raw[start : start + _PART_ROWS] for start in range(0, len(raw), _PART_ROWS)]
        with ThreadPoolExecutor() as pool:
            return torch.cat(list(pool.map(decode, parts)))

    def constant(self, values: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(values)).to(self._device, self._dtype)

    def rope_table(self, inv_freq: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(inv_freq)).to(self._device, torch.float32)


def load_teacher(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype = torch.float32
) -> Teacher:
    decoder: Any = _Decoder(device, dtype)
    model = load_model(checkpoint, decoder)
    mixers: list[Any] = [block.mixer for block in model.blocks]
    if any(not hasattr(mixer, "rope") or mixer.gate is not None for mixer in mixers):
        raise ModelError(
            f"{checkpoint.path} is a '{model.architecture}' model with recurrent layers; "
            "drafts can be trained for models with plain attention in every layer only."
        )
    if any(mixer.window for mixer in mixers):
        raise CheckpointError(f"{checkpoint.path} has sliding windows, which training cannot read.")
    first, layers = mixers[0], tuple(_read_layer(block) for block in model.blocks)
    return Teacher(
        layers=layers,
        embedding=decoder.pack(model.embedding.raw, model.embedding.qtype),
        output_norm=model.output_norm,
        head=model.head,
        frequencies=first.rope.table,
        num_heads=first.query.weight.shape[0] // first.head_dim,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        ffn_size=layers[0].down.shape[1],
        eps=model.eps,
        context_length=model.context_length,
        rope_base=float(checkpoint.metadata.get(f"{model.architecture}.rope.freq_base", 10000.0)),
    )


def _read_layer(block: Any) -> TeacherLayer:
    mixer = block.mixer
    order = _pair_order(mixer.rope.interleaved, 2 * len(mixer.rope.table), mixer.head_dim)

    def reorder(rows: Tensor) -> Tensor:
        return rows.unflatten(0, (-1, mixer.head_dim))[:, order].flatten(0, 1)

    parts = (mixer.query, mixer.key, mixer.value)
    weights = [reorder(parts[0].weight), reorder(parts[1].weight), parts[2].weight]
    bias = None
    if any(part.bias is not None for part in parts):
        rows = [
            torch.zeros_like(part.weight[:, 0]) if part.bias is None else part.bias
            for part in parts
        ]
        bias = torch.cat([reorder(rows[0]), reorder(rows[1]), rows[2]])
    return TeacherLayer(
        mixer_norm=block.mixer_norm,
        qkv=torch.cat(weights),
        qkv_bias=bias,
        output=mixer.output.weight,
        output_bias=mixer.output.bias,
        query_norm=mixer.query_norm.weight[order] if mixer.query_norm else None,
        key_norm=mixer.key_norm.weight[order] if mixer.key_norm else None,
        ffn_norm=block.ffn_norm,
        gate_up=torch.cat([block.ffn.gate.weight, block.ffn.up.weight]),
        down=block.ffn.down.weight,
    )


def _pair_order(interleaved: bool, rotary_dim: int, head_dim: int) -> list[int]:
    """Which row of a head comes where, so that pairs (2i, 2i + 1) become (i, i + half)."""
    if not interleaved:
        return list(range(head_dim))
    pairs = [*range(0, rotary_dim, 2), *range(1, rotary_dim, 2)]
    return [*pairs, *range(rotary_dim, head_dim)]
