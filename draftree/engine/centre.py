"""An engine whose format of keys is small measures before its first request what the keys of each
layer have in common (kernels/quant/kv_centre.py), on a prompt of random tokens.

The mean over 128 of them is near that of any text, and the same whenever the model is opened.
"""

import numpy as np

from draftree.models.target import Target
from draftree.prefill.chunked import prefill

_NUM_TOKENS, _CHUNK = 128, 64  # passes of so few rows are batch-invariant everywhere
_SINKS = 4  # first positions, whose keys are unlike all others
_USUAL = 5000  # vocabularies begin with what is usual, after what is rarely written


def centre_keys(target: Target, max_rows: int, max_ctx: int) -> None:
    """The sequence is empty before and afterwards."""
    if not target.has_centred_keys or max_ctx <= 2 * _SINKS:
        return
    end, num_forwards = min(_USUAL, target.model.vocab_size), target.num_forwards
    tokens = np.random.default_rng(0).integers(end // 25, end, min(_NUM_TOKENS, max_ctx - 1))
    prefill(target, tokens.tolist(), min(_CHUNK, max_rows))
    target.centre_keys(_SINKS, len(tokens))
    target.state.reset()
    target.num_forwards = num_forwards
