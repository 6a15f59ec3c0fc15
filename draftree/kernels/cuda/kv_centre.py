"""Centres of keys (quant/kv_centre.py), measured on those that lie in a cache."""

import numpy as np
import torch

from draftree.kernels.cuda.attention_prefill import expand_kv
from draftree.kernels.cuda.compile import Gpu
from draftree.kernels.cuda.kv_cache import CudaKv
from draftree.kernels.quant.kv_centre import mean_key
from draftree.kernels.quant.kv_format import ROTATED_LEN, rotation_signs


def measure_centre(cache: CudaKv, first: int, end: int, gpu: Gpu) -> None:
    """The mean key of positions first … end-1 becomes the centre of keys to come. The sums are the
    host's: there they have one order.
    """
    assert cache.centre is not None and cache.angles is not None, "keys are not centred"
    keys = expand_kv(cache, first, end, gpu)[0].cpu().numpy().astype(np.float32)
    if cache.shape.keys.is_rotated:
        matrix = _hadamard(min(cache.head_dim, ROTATED_LEN))
        groups = keys.reshape(*keys.shape[:2], -1, len(matrix)) @ matrix
        keys = groups.reshape(keys.shape) * rotation_signs(cache.head_dim)
    pairs, angles = cache.angles.num_pairs, cache.angles.table[first:end].cpu().numpy()
    cosines, sines = angles[:, :pairs], angles[:, pairs : 2 * pairs]
    mean = mean_key(keys, cosines, sines, interleaved=cache.angles.interleaved)
    cache.centre.copy_(torch.from_numpy(mean))


def _hadamard(order: int) -> np.ndarray:
    """float32 [order, order], orthonormal."""
    matrix = np.ones((1, 1))
    while len(matrix) < order:
        matrix = np.block([[matrix, matrix], [matrix, -matrix]])
    return (matrix * order**-0.5).astype(np.float32)
