"""Gated delta net of the torch target: a short convolution, then one matrix per value head.

Sequences go through in chunks of 64 tokens: within a chunk a triangular system says what every
token writes, and between chunks the state is carried on. State and sums are float32.
"""

from dataclasses import dataclass
from functools import reduce
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from draftree.train.attention import LayerCache, Sequences, Step, rms_norm

CHUNK = 64
_UNIT_EPS = 1e-6


@dataclass(frozen=True, slots=True)
class TeacherDeltaNet:
    """The convolution's channels are all queries, then all keys, then all values; value head j uses
    key head j % key_heads.
    """

    inputs: Tensor  # rows of queries, keys, values, output gate, decay and strength
    output: Tensor
    conv: Tensor  # float32 [channels, kernel_len]
    decay: Tensor  # float32 [value_heads], negative
    decay_bias: Tensor  # float32 [value_heads]
    norm: Tensor  # float32 [head_dim]
    key_heads: int
    value_heads: int
    head_dim: int
    eps: float

    def new_cache(self, batch_size: int, max_len: int) -> LayerCache:
        """The convolution's last inputs [batch, kernel_len - 1, channels], and the state [batch,
        value_heads, head_dim, head_dim]: keys by values.
        """
        channels, kernel_len = self.conv.shape
        window = self.inputs.new_zeros(batch_size, kernel_len - 1, channels)
        state = self.conv.new_zeros(batch_size, self.value_heads, self.head_dim, self.head_dim)
        return window, state

    def read(self, x: Tensor, sequences: Sequences, cache: LayerCache | None) -> Tensor:
        """x: [batch, length, hidden_size], after the norm."""
        mixed, after = self._mix(x, sequences.num_kept, self.new_cache(len(x), 0))
        if cache is not None:
            _store(cache, after)
        return mixed

    def step(self, x: Tensor, step: Step, cache: LayerCache) -> Tensor:
        """x: [batch, hidden_size], one more token of each of the first rows."""
        window, state = (part[: len(x)] for part in cache)
        mixed, after = self._mix(x[:, None], (~step.is_done).long(), (window, state))
        _store((window, state), after)
        return mixed[:, 0]

    def _mix(
        self, x: Tensor, num_kept: Tensor | None, before: LayerCache
    ) -> tuple[Tensor, LayerCache]:
        """Also what to keep after the first num_kept [batch] tokens of every row."""
        length, heads = x.shape[1], self.value_heads
        channels, kernel_len = self.conv.shape
        sizes = channels, heads * self.head_dim, heads, heads
        qkv, gate, alpha, beta = F.linear(x, self.inputs).split(sizes, dim=-1)
        inputs = torch.cat([before[0], qkv], 1)
        taps = (inputs[:, i : i + length] * self.conv[:, i] for i in range(kernel_len))
        q, k, v = self._split_heads(F.silu(reduce(torch.add, taps)))
        log_decay = self.decay * F.softplus(alpha.float() + self.decay_bias)
        strength = beta.float().sigmoid()
        window = inputs[:, length:]
        if num_kept is not None:  # later tokens write nothing and let nothing fade
            is_kept = (torch.arange(length, device=x.device) < num_kept[:, None])[..., None]
            log_decay, strength = log_decay * is_kept, strength * is_kept
            places = num_kept[:, None] + torch.arange(kernel_len - 1, device=x.device)
            window = inputs.gather(1, places[..., None].expand(-1, -1, channels))
        gates = log_decay.transpose(1, 2), strength.transpose(1, 2)
        mixed, state = gated_delta(q, k, v, *gates, before[1])
        normed = rms_norm(mixed.transpose(1, 2), self.norm, self.eps)
        gated = normed.flatten(2) * F.silu(gate.float())
        return F.linear(gated.to(x.dtype), self.output), (window, state)

    def _split_heads(self, qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Each [batch, value_heads, length, head_dim]; queries and keys as unit vectors."""
        heads = qkv.unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
        q, k, v = heads.split((self.key_heads, self.key_heads, self.value_heads), dim=1)
        num_shared = self.value_heads // self.key_heads
        q, k = (_unit(part).repeat(1, num_shared, 1, 1) for part in (q, k))
        return q * self.head_dim**-0.5, k, v


def gated_delta(
    q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor, state: Tensor
) -> tuple[Tensor, Tensor]:
    """q, k, v: [batch, heads, length, head_dim]; log_decay, strength: [batch, heads, length].

    A token lets the state fade, then replaces what it holds for the token's key by the value, as
    far as strength says. Returns what the queries find, and the state after the last token.
    """
    outputs = []
    for start in range(0, q.shape[2], CHUNK):
        rows = slice(start, start + CHUNK)
        parts = (part[:, :, rows] for part in (q, k, v, log_decay, strength))
        output, state = _advance(state, *parts)
        outputs.append(output)
    return torch.cat(outputs, 2), state


def _advance(
    state: Tensor, q: Tensor, k: Tensor, v: Tensor, log_decay: Tensor, strength: Tensor
) -> tuple[Tensor, Tensor]:
    """One chunk. With S before it and g the sums of log_decay, token i writes
    w_i = strength_i (v_i - exp(g_i) k_i S - sum over j < i of exp(g_i - g_j) (k_i k_j) w_j).
    """
    length, total = k.shape[2], log_decay.cumsum(-1)
    is_later = torch.ones(length, length, dtype=torch.bool, device=k.device).triu(1)
    between = (total[..., None] - total[..., None, :]).masked_fill(is_later, -torch.inf).exp()
    growth, strength = total.exp()[..., None], strength[..., None]
    written = strength * (v - growth * (k @ state))
    if length > 1:  # the diagonal is taken to be ones
        system = strength * between * (k @ k.mT)
        written = torch.linalg.solve_triangular(system, written, upper=False, unitriangular=True)
    output = growth * (q @ state) + (between * (q @ k.mT)) @ written
    last = total[..., -1, None, None]
    kept = k * (last - total[..., None]).exp()
    return output, last.exp() * state + kept.mT @ written


def _unit(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + _UNIT_EPS)


def _store(cache: LayerCache, after: LayerCache) -> None:
    for kept, part in zip(cache, after, strict=True):
        kept.copy_(part)


def read_delta_net(mixer: Any) -> TeacherDeltaNet:
    """From a loaded model's layer."""
    parts = (mixer.qkv, mixer.gate, mixer.alpha, mixer.beta)
    return TeacherDeltaNet(
        inputs=torch.cat([part.weight for part in parts]),
        output=mixer.output.weight,
        conv=mixer.conv_weight,
        decay=mixer.decay,
        decay_bias=mixer.decay_bias,
        norm=mixer.norm,
        key_heads=mixer.key_heads,
        value_heads=mixer.value_heads,
        head_dim=mixer.head_dim,
        eps=mixer.eps,
    )
