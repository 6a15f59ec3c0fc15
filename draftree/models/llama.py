"""Llama: interleaved rotary pairs (the converter permutes q and k), no biases in most files."""

from functools import partial

from draftree.models.parts import read_dense_model

read_model = partial(
    read_dense_model, architecture="llama", interleaved_rotary=True, has_head_norms=False
)
