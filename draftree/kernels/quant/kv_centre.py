"""What the keys of a layer have in common before they are turned by their positions. Small formats
round what is left of a key without it: the error follows that.

Of most layers it is more than half of a key's energy, of keys with biases nearly all.
"""

import numpy as np


def mean_key(
    keys: np.ndarray, cosines: np.ndarray, sines: np.ndarray, *, interleaved: bool
) -> np.ndarray:
    """float32 [heads * head_dim] of keys [heads, positions, head_dim] that were turned by angles
    [positions, pairs].
    """
    keys, pairs = keys.astype(np.float64), cosines.shape[1]
    firsts, seconds = slice(pairs), slice(pairs, 2 * pairs)
    if interleaved:
        firsts, seconds = slice(0, 2 * pairs, 2), slice(1, 2 * pairs, 2)
    a, b, mean = keys[..., firsts], keys[..., seconds], keys.mean(axis=1)
    mean[:, firsts] = (a * cosines + b * sines).mean(axis=1)
    mean[:, seconds] = (b * cosines - a * sines).mean(axis=1)
    return mean.astype(np.float32).ravel()
