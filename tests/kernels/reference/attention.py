"""Attention in plain torch, and the masks that say which keys a row sees."""

import torch


def chain_mask(num_tokens: int, committed: int, window: int = 0) -> torch.Tensor:
    """bool [num_tokens, committed + num_tokens]: row i sees everything up to its own position."""
    queries = torch.arange(committed, committed + num_tokens)[:, None]
    keys = torch.arange(committed + num_tokens)[None]
    mask = keys <= queries
    return mask & (queries - keys < window) if window else mask


def block_mask(num_tokens: int, committed: int, window: int = 0) -> torch.Tensor:
    """The same for rows that see each other in both directions."""
    queries = torch.arange(committed, committed + num_tokens)[:, None]
    keys = torch.arange(committed + num_tokens)[None]
    mask = torch.ones(num_tokens, committed + num_tokens, dtype=torch.bool)
    return mask & (queries - keys < window) if window else mask


def tree_mask(parents: list[int], committed: int, window: int = 0) -> torch.Tensor:
    """bool [num_nodes, committed + num_nodes]: a node sees the committed, its ancestors, itself."""
    num_nodes = len(parents)
    depths = [0] * num_nodes
    mask = torch.zeros(num_nodes, committed + num_nodes, dtype=torch.bool)
    mask[:, :committed] = True
    for node, parent in enumerate(parents):
        if parent >= 0:
            depths[node] = depths[parent] + 1
            mask[node, committed:] = mask[parent, committed:]
        mask[node, committed + node] = True
    depth = torch.tensor(depths)
    keys = torch.cat((torch.arange(committed), committed + depth))
    return mask & (committed + depth[:, None] - keys[None] < window) if window else mask


def attention_reference(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, mask: torch.Tensor, scale: float
) -> torch.Tensor:
    """q [tokens, num_heads, head_dim], k and v [keys, kv_heads, head_dim], mask [tokens, keys].

    Head h uses key head h // (num_heads / kv_heads).
    """
    group = q.shape[1] // k.shape[1]
    keys = k.double().repeat_interleave(group, dim=1)
    values = v.double().repeat_interleave(group, dim=1)
    scores = torch.einsum("qhd,khd->hqk", q.double(), keys) * scale
    weights = scores.masked_fill(~mask, float("-inf")).softmax(-1)
    return torch.einsum("hqk,khd->qhd", weights, values).to(q.dtype)
