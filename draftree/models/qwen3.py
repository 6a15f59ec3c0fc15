"""Qwen3 (dense): per-head norms on queries and keys, head size of its own."""

from functools import partial

from draftree.models.parts import read_dense_model

read_model = partial(
    read_dense_model, architecture="qwen3", interleaved_rotary=False, has_head_norms=True
)
