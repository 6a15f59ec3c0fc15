"""Gumbel noise as a pure function of (seed, position, token), the same bits on every machine.

key = mix(mix(seed + G) + position * G), bits = the upper 32 of mix(key + (token + 1) * G) with G =
0x9E3779B97F4A7C15 and mix the 64-bit finaliser with shifts 30, 27, 31; u = (bits + 1/2) / 2^32;
noise = -log(-log(u)), computed in float64 by basic operations only and rounded to float32. So
position picks a stream and token an element of it.
"""

# ruff: noqa: ANN001, ANN201, ANN202  (numba inspects these signatures)
import math

import numpy as np

from draftree.kernels.cpu.jit import njit
from draftree.kernels.cpu.kernel import native

_G = np.uint64(0x9E3779B97F4A7C15)
_M1, _M2 = np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB)
_30, _27, _31, _32, _1 = np.uint64(30), np.uint64(27), np.uint64(31), np.uint64(32), np.uint64(1)
_SQRT_HALF = 0.7071067811865476
_LN_2 = 0.6931471805599453
_LOG_TERMS = tuple(2.0 / (2 * i + 1) for i in range(11, -1, -1))  # of log((1 + s) / (1 - s)) in s²
MAX_NOISE = 22.88  # just above the largest value, where u = 1 - 2^-33


@njit
def mix(x):
    """A bijection of 64-bit words whose output bits each depend on all input bits."""
    x = (x ^ (x >> _30)) * _M1
    x = (x ^ (x >> _27)) * _M2
    return x ^ (x >> _31)


@njit
def noise_key(seed, position):
    """What all tokens of a position share."""
    return mix(mix(np.uint64(seed) + _G) + np.uint64(position) * _G)


@njit
def noise_bits(key, token):
    """32 uniform bits, as uint64."""
    return mix(key + (np.uint64(token) + _1) * _G) >> _32


@njit
def _log(x):
    """Natural logarithm to about 1e-15; library functions differ from machine to machine."""
    mantissa, exponent = math.frexp(x)
    if mantissa < _SQRT_HALF:
        mantissa, exponent = 2.0 * mantissa, exponent - 1
    s = (mantissa - 1.0) / (mantissa + 1.0)
    square, total = s * s, 0.0
    for term in _LOG_TERMS:
        total = total * square + term
    return total * s + exponent * _LN_2


@njit
def noise_of(bits):
    """Gumbel noise of 32 uniform bits, as float32."""
    u = (np.float64(bits) + 0.5) * (1.0 / 4294967296.0)
    return np.float32(-_log(-_log(u)))


@njit
def bits_above(noise):
    """Bits below this have less noise than asked for."""
    u = math.exp(-math.exp(-noise))
    return np.uint64(max(u * 4294967296.0 - 2.0, 0.0))


@native("int int int -> float")
def _gumbel(seed, position, token):
    return np.float64(noise_of(noise_bits(noise_key(seed, position), token)))


def gumbel(seed: int, position: int, token: int) -> np.float32:
    """The noise that is added to a token's logit at an absolute position."""
    return np.float32(_gumbel(seed, position, token))
