"""Choosing tokens in plain Python and torch: full sorts, noise token by token."""

import math

import torch

_MASK = (1 << 64) - 1
_G = 0x9E3779B97F4A7C15


def _mix(x: int) -> int:
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
    return x ^ (x >> 31)


def gumbel_reference(seed: int, position: int, token: int) -> float:
    """The noise of kernels/cpu/noise.py, before it is rounded to float32."""
    key = _mix((_mix((seed + _G) & _MASK) + position * _G) & _MASK)
    bits = _mix((key + (token + 1) * _G) & _MASK) >> 32
    return -math.log(-math.log((bits + 0.5) / 2**32))


def penalize_reference(
    logits: torch.Tensor,
    seen: dict[int, int],
    repetition: float,
    presence: float,
    frequency: float,
) -> torch.Tensor:
    """seen: how often a token is in the reply (0: only in the prompt)."""
    logits = logits.double().clone()
    for token, count in seen.items():
        value = logits[token]
        value = value / repetition if value > 0 else value * repetition
        logits[token] = value - (presence + frequency * count if count > 0 else 0.0)
    return logits


def kept_reference(
    logits: torch.Tensor, temperature: float, top_k: int, top_p: float, min_p: float
) -> list[int]:
    """Tokens that pass the filters, most likely first; ties by id."""
    scaled = logits.double() / temperature
    order = sorted(range(len(scaled)), key=lambda token: (-scaled[token].item(), token))
    if top_k > 0:
        order = order[:top_k]
    probs = scaled[order].softmax(0)
    if top_p < 1.0:
        order = order[: int((probs.cumsum(0) < top_p).sum()) + 1]
    return [t for t in order if math.exp(scaled[t] - scaled[order[0]]) >= min_p]


def choose_reference(
    logits: torch.Tensor,
    temperature: float,
    top_k: int,
    top_p: float,
    min_p: float,
    seed: int,
    position: int,
) -> int:
    """argmax of logits / T + noise over what the filters keep; T = 0 is a plain argmax."""
    if temperature == 0.0:
        return min(range(len(logits)), key=lambda token: (-logits[token].item(), token))
    kept = kept_reference(logits, temperature, top_k, top_p, min_p)
    scaled = logits.double() / temperature
    noisy = {t: scaled[t].item() + gumbel_reference(seed, position, t) for t in kept}
    return min(noisy, key=lambda token: (-noisy[token], token))
