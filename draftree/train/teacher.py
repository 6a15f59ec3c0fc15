"""The target as torch sees it: many sequences at once, features on the way, for training only.

In: a checkpoint of any supported architecture. Out: hidden states, features, logits, and one-token
steps over a cache. Matrices are decoded to one dtype, so the arithmetic is that of plain torch, not
the engine's.
"""

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from draftree.errors import CheckpointError
from draftree.kernels.quant.formats import QuantType, dequantize
from draftree.models.load import load_model
from draftree.train.attention import (
    LayerCache,
    Sequences,
    Step,
    TeacherAttention,
    Turn,
    read_attention,
    rms_norm,
    rotary_table,
)
from draftree.train.delta_net import TeacherDeltaNet, read_delta_net
from draftree.weights.checkpoint import Checkpoint

_PART_ROWS = 4096  # rows of a matrix that one thread decodes


@dataclass(frozen=True, slots=True)
class TeacherLayer:
    """Gate and up are one matrix."""

    mixer_norm: Tensor
    mixer: TeacherAttention | TeacherDeltaNet
    ffn_norm: Tensor
    gate_up: Tensor
    down: Tensor


@dataclass(frozen=True, slots=True)
class Cache:
    """What every layer keeps of every sequence."""

    layers: list[LayerCache]

    def part(self, rows: slice) -> "Cache":
        """A view of some sequences."""
        return Cache([(first[rows], second[rows]) for first, second in self.layers])

    def move(self, order: Tensor) -> None:
        """The sequences that order names become the first ones."""
        for part in (part for layer in self.layers for part in layer):
            part[: len(order)] = part[order]


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

    def new_cache(self, batch_size: int, max_len: int) -> Cache:
        return Cache([layer.mixer.new_cache(batch_size, max_len) for layer in self.layers])

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
        return self.run_layers(ids, feature_layers, num_layers, None)

    @torch.no_grad()
    def fill(self, ids: Tensor, cache: Cache, num_kept: Tensor) -> Tensor:
        """Read the first num_kept [batch] tokens of one prompt into each row of a cache: hidden
        states of every position.
        """
        return self.run_layers(ids, (), len(self.layers), cache, num_kept).hidden

    def run_layers(
        self,
        ids: Tensor,
        feature_layers: tuple[int, ...],
        num_layers: int,
        cache: Cache | None,
        num_kept: Tensor | None = None,
    ) -> Read:
        """The first num_layers of them, with gradients where the weights have any."""
        turn = self._turn(torch.arange(ids.shape[1], device=self.device))
        sequences = Sequences(turn, num_kept)
        x = self.embedding[ids]
        features: dict[int, Tensor] = {}
        for i, layer in enumerate(self.layers[:num_layers]):
            kept = None if cache is None else cache.layers[i]
            normed = rms_norm(x, layer.mixer_norm, self.eps)
            x = self._finish(layer, x + layer.mixer.read(normed, sequences, kept))
            if i in feature_layers:
                features[i] = x
        joined = torch.cat([features[i] for i in feature_layers], -1) if feature_layers else None
        return Read(rms_norm(x, self.output_norm, self.eps), joined)

    @torch.no_grad()
    def step(
        self, tokens: Tensor, positions: Tensor, is_done: Tensor, cache: Cache, length: int
    ) -> Tensor:
        """Logits after one more token per row, written at its own position. length: all positions
        are below it. tokens, positions: int64 [batch]. Rows that are done may be stepped again.
        """
        is_hidden = (torch.arange(length, device=self.device) > positions[:, None])[:, None, None]
        step = Step(self._turn(positions), positions, is_hidden, is_done)
        x = self.embedding[tokens]
        for layer, kept in zip(self.layers, cache.layers, strict=True):
            normed = rms_norm(x, layer.mixer_norm, self.eps)
            x = self._finish(layer, x + layer.mixer.step(normed, step, kept))
        return self.logits(rms_norm(x, self.output_norm, self.eps))

    def _finish(self, layer: TeacherLayer, x: Tensor) -> Tensor:
        normed = rms_norm(x, layer.ffn_norm, self.eps)
        gate, up = F.linear(normed, layer.gate_up).chunk(2, dim=-1)
        return x + F.linear(F.silu(gate) * up, layer.down)

    def _turn(self, positions: Tensor) -> Turn:
        return rotary_table(positions, self.frequencies, self.head.dtype)


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
        return torch.from_numpy(np.array(values)).to(self._device, torch.float32)

    def rope_table(self, inv_freq: np.ndarray) -> Tensor:
        return torch.from_numpy(np.array(inv_freq)).to(self._device, torch.float32)


def load_teacher(
    checkpoint: Checkpoint, device: torch.device, dtype: torch.dtype = torch.float32
) -> Teacher:
    decoder: Any = _Decoder(device, dtype)
    model: Any = load_model(checkpoint, decoder)
    mixers: list[Any] = [block.mixer for block in model.blocks]
    attention = [mixer for mixer in mixers if _is_attention(mixer)]
    if not attention:
        raise CheckpointError(f"{checkpoint.path} has no attention, which training cannot read.")
    if any(mixer.window for mixer in attention):
        raise CheckpointError(f"{checkpoint.path} has sliding windows, which training cannot read.")
    first, layers = attention[0], tuple(_read_layer(block, dtype) for block in model.blocks)
    return Teacher(
        layers=layers,
        embedding=decoder.pack(model.embedding.raw, model.embedding.qtype),
        output_norm=model.output_norm.to(dtype),
        head=model.head,
        frequencies=first.rope.table,
        num_heads=len(first.query.weight) // first.head_dim,
        num_kv_heads=first.num_kv_heads,
        head_dim=first.head_dim,
        ffn_size=layers[0].down.shape[1],
        eps=model.eps,
        context_length=model.context_length,
        rope_base=float(checkpoint.metadata.get(f"{model.architecture}.rope.freq_base", 10000.0)),
    )


def _is_attention(mixer: Any) -> bool:
    return hasattr(mixer, "rope")


def _read_layer(block: Any, dtype: torch.dtype) -> TeacherLayer:
    mixer = block.mixer
    is_attention = _is_attention(mixer)
    return TeacherLayer(
        mixer_norm=block.mixer_norm.to(dtype),
        mixer=read_attention(mixer, block.eps, dtype) if is_attention else read_delta_net(mixer),
        ffn_norm=block.ffn_norm.to(dtype),
        gate_up=torch.cat([block.ffn.gate.weight, block.ffn.up.weight]),
        down=block.ffn.down.weight,
    )
