"""Texts as vectors: the mean of the target's last hidden states, of length one.

In: token ids. Out: float32 [hidden_size]. Over a sequence of its own with the engine's weights, so
that no conversation is disturbed. The model was trained to write, not to compare texts.
"""

from collections.abc import Sequence
from typing import Any, Final, cast

import numpy as np

from draftree.engine.parts import EngineParts
from draftree.errors import CapacityError
from draftree.kernels.ops import Array
from draftree.models.target import Target
from draftree.prefill.chunked import prefill

MAX_LEN: Final = 8192  # tokens of a text, whose keys and values are kept beside the engine's


class Embedder:
    def __init__(self, parts: EngineParts) -> None:
        plan, model = parts.plan, parts.target.model
        self.max_len = min(MAX_LEN, plan.max_ctx)
        config = parts.model_config
        need = 4 * config.num_kv_layers * config.num_kv_heads * config.head_dim * self.max_len
        need += 4 * plan.chunk * model.hidden_size
        if plan.gpu is not None and need > plan.left_bytes:
            raise CapacityError(
                f"Embeddings need {need / 2**30:.1f} GiB more of the GPU; "
                "start with a smaller --max-ctx."
            )
        self._chunk, self._eps = plan.chunk, model.eps
        self._ops = parts.device.new_scoring_ops(self.max_len, plan.chunk)
        last = (model.num_layers - 1,)
        self._target = Target(model, self._ops, self.max_len, feature_layers=last)
        weight = cast(Any, model.output_norm)
        self._weight = weight if isinstance(weight, np.ndarray) else weight.cpu().numpy()

    def embed(self, ids: Sequence[int]) -> np.ndarray:
        total = np.zeros(len(self._weight))

        def add(features: Array) -> None:
            nonlocal total
            rows = np.asarray(self._ops.read(features, len(features)), dtype=np.float64)
            scale = np.sqrt(np.square(rows).mean(axis=1, keepdims=True) + self._eps)
            total += (rows / scale).sum(axis=0)

        self._target.state.reset()
        prefill(self._target, ids, self._chunk, add)
        mean = total * self._weight
        return np.asarray(mean / max(float(np.linalg.norm(mean)), 1e-12), dtype=np.float32)
