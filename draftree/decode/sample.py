"""Choosing a token: a pure function of logits, history, seed and absolute position.

The noise is a counter-based function of (seed, position, token), so plain and speculative decoding, in any batch,
choose the same token at the same position. A draft's candidates are ranked with the same noise.
"""
