"""Scorers of long texts: over the engine's own model, or over a small one that is opened for it."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from typing import Final

import numpy as np

from draftree.config import EngineConfig, Plan, resolve
from draftree.core import ModelConfig
from draftree.engine.device import open_device
from draftree.engine.parts import EngineParts
from draftree.errors import CapacityError
from draftree.kernels.heads import CHUNK_LEN
from draftree.memory import machine_memory, scoring_bytes
from draftree.models.key_reader import KeyReader
from draftree.models.load import load_model
from draftree.models.model import Model
from draftree.models.model_config import read_model_config
from draftree.prefill.score import WINDOW_LEN, AttentionScorer, Scorer
from draftree.weights.checkpoint import Checkpoint

__all__ = ["CHUNK_LEN", "WINDOW_LEN", "OwnedScorer", "Scorer", "open_scorer", "score_with_own"]
_GPU_CHUNKS: Final = (WINDOW_LEN, 2048, 1024, 512)  # rows of a pass: the first that leaves room
_LEAST_CHUNK: Final = 64
_OWN_SHARE: Final = 8  # one layer in so many of a target that scores for itself


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
    max_ctx = min(WINDOW_LEN, model_config.context_length)
    if plan.gpu is not None:
        chunk = choose_chunk(plan, model_config, model_config.num_layers, max_ctx, is_loaded=False)
        own = replace(plan, chunk=chunk, max_ctx=max_ctx)
    else:
        config = EngineConfig(
            device="cpu",
            threads=plan.threads,
            budget=0,
            max_ctx=max_ctx,
            chunk=max(plan.chunk, _LEAST_CHUNK),
            prefix_bytes=0,
            parallel=1,
            math="exact" if plan.is_exact else "auto",
        )
        own = resolve(config, model_config, max(machine_memory() - plan.memory.total, 1))
    device = open_device(own)
    ops = device.new_scoring_ops(max_ctx, own.chunk)
    model = load_model(checkpoint, ops)
    reader = KeyReader(model, ops, max_ctx, own.chunk)
    checkpoint.release()
    return OwnedScorer(AttentionScorer(reader, ops), close=device.close)


def score_with_own(
    parts: EngineParts, hold: Callable[[], AbstractContextManager[None]]
) -> OwnedScorer:
    """The engine's model itself, as far as its first layers, over a second sequence."""
    plan, model = parts.plan, parts.target.model
    max_ctx, num_layers = min(WINDOW_LEN, plan.max_ctx), choose_layers(model)
    chunk = max(plan.chunk, _LEAST_CHUNK)
    if plan.gpu is not None:
        chunk = choose_chunk(plan, parts.model_config, num_layers, max_ctx, is_loaded=True)
    ops = parts.device.new_scoring_ops(max_ctx, chunk)
    reader = KeyReader(model, ops, max_ctx, chunk, num_layers)
    return OwnedScorer(AttentionScorer(reader, ops), hold)


def choose_layers(model: Model) -> int:
    """Of a target that reads a text only to score it: up to the first layer that attends from the
    first eighth on.
    """
    least = -(-model.num_layers // _OWN_SHARE)
    found = [layer + 1 for layer in model.attention_layers]
    return next((count for count in found if count >= least), found[-1])


def choose_chunk(
    plan: Plan, model: ModelConfig, num_layers: int, max_ctx: int, *, is_loaded: bool
) -> int:
    """Rows of a pass, the longest that memory is left for beside the engine's plan."""
    free = plan.left_bytes
    for chunk in _GPU_CHUNKS:
        need = scoring_bytes(model, num_layers, max_ctx, min(chunk, max_ctx), is_loaded=is_loaded)
        if need <= free:
            return min(chunk, max_ctx)
    raise CapacityError(
        f"Scoring long texts by {model.name} needs {need / 2**30:.1f} GiB more of the GPU, of "
        f"which {max(free, 0) / 2**30:.1f} GiB are left; try a smaller --max-ctx, or name another "
        "small model with --compress-with."
    )
