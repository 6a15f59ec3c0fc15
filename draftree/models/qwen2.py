"""Qwen2 and Qwen2.5: biases on q, k and v."""

from functools import partial

from draftree.models.parts import read_dense_model

read_model = partial(
    read_dense_model, architecture="qwen2", interleaved_rotary=False, has_head_norms=False
)
