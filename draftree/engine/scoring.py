"""Scorers of long texts: over the engine's own model, or over a small one that is opened for it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final

import numpy as np

from draftree.config import EngineConfig, resolve
from draftree.engine.device import open_device
from draftree.engine.gpu import find_gpu
from draftree.engine.parts import EngineParts
from draftree.errors import CapacityError
from draftree.memory import machine_memory
from draftree.models.load import load_model
from draftree.models.model_config import read_model_config
from draftree.prefill.score import (
    CHUNK_LEN,
    QUESTION_LEN,
    WINDOW_LEN,
    AttentionScorer,
    KeyReader,
    PooledKeyScorer,
    Scorer,
)
from draftree.weights.checkpoint import Checkpoint

__all__ = ["CHUNK_LEN", "OwnedScorer", "Scorer", "open_scorer", "score_with_own"]
_CHUNK: Final = 512  # rows of a pass at most: queries and keys of all layers are copied
_MAX_CTX: Final = WINDOW_LEN + QUESTION_LEN


class OwnedScorer:
    """A scorer that belongs to an engine. hold: what keeps others off the device meanwhile."""

    def __init__(
        self,
        scorer: Scorer,
        hold: Callable[[], AbstractContextManager[None]] = nullcontext,
        close: Callable[[], None] = lambda: None,
    ) -> None:
        self._scorer, self._hold, self.close = scorer, hold, close

    def score(self, text: Sequence[int], question: Sequence[int]) -> np.ndarray:
        with self._hold():
            return self._scorer.score(text, question)


def open_scorer(checkpoint: Checkpoint, beside: EngineParts) -> OwnedScorer:
    """Another model, on the same device, in the memory that the engine leaves."""
    model_config, plan = read_model_config(checkpoint), beside.plan
    gpu = find_gpu("cuda") if plan.gpu is not None else None
    config = EngineConfig(
        device="cpu" if gpu is None else "cuda",
        threads=plan.threads,
        budget=0,
        max_ctx=min(_MAX_CTX, model_config.context_length),
        chunk=min(plan.chunk, _CHUNK),
        prefix_bytes=0,
        parallel=1,
        math="exact" if plan.is_exact else "auto",
    )
    limit = plan.memory_limit if gpu is not None else machine_memory()
    own = resolve(config, model_config, max(limit - plan.memory.total, 1), gpu)
    device = open_device(replace(own, memory_limit=plan.memory_limit))
    ops = device.new_scoring_ops(own.max_ctx, own.chunk)
    model = load_model(checkpoint, ops)
    reader = KeyReader(model, ops, own.max_ctx, own.chunk)
    checkpoint.release()
    return OwnedScorer(AttentionScorer(reader), close=device.close)


def score_with_own(
    parts: EngineParts, hold: Callable[[], AbstractContextManager[None]]
) -> OwnedScorer:
    """The engine's model itself, with the engine's weights, over a second sequence."""
    plan, model = parts.plan, parts.model_config
    max_ctx, chunk = min(_MAX_CTX, plan.max_ctx), min(plan.chunk, _CHUNK)
    if plan.gpu is not None:
        rows = 16 * chunk * model.num_kv_layers * model.hidden_size  # queries and keys, float32
        need = 4 * model.num_kv_layers * model.num_kv_heads * model.head_dim * max_ctx + rows
        if plan.memory.total + need > plan.memory_limit:
            raise CapacityError(
                f"Compression by the model itself needs {need / 2**30:.1f} GiB more of the GPU; "
                "name a small model with --compress-with, or try a smaller --max-ctx."
            )
    ops = parts.device.new_scoring_ops(max_ctx, chunk)
    reader = KeyReader(parts.target.model, ops, max_ctx, chunk)
    return OwnedScorer(PooledKeyScorer(reader), hold)
