"""The gated delta rule in plain torch, one token after the other."""

import torch
from torch.nn.functional import softplus


def _normalize(x: torch.Tensor) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + 1e-6)


def gated_delta_reference(
    qkv: torch.Tensor,
    alpha: torch.Tensor,
    beta_logit: torch.Tensor,
    ssm_a: torch.Tensor,
    dt_bias: torch.Tensor,
    state: torch.Tensor,
    key_heads: int,
) -> tuple[torch.Tensor, torch.Tensor]:
    """qkv [tokens, q | k | v], alpha, beta_logit [tokens, value_heads], state [value_heads, D, D].

    Returns the outputs [num_tokens, value_heads, D] and the state after these tokens.
    """
    value_heads, dim, _ = state.shape
    cut = key_heads * dim
    q, k, v = qkv.double().split((cut, cut, value_heads * dim), dim=1)
    shared = torch.arange(value_heads) % key_heads
    q = _normalize(q.unflatten(1, (key_heads, dim)))[:, shared] * dim**-0.5
    k = _normalize(k.unflatten(1, (key_heads, dim)))[:, shared]
    v = v.unflatten(1, (value_heads, dim))
    decay = torch.exp(ssm_a.double() * softplus(alpha.double() + dt_bias.double()))
    beta = torch.sigmoid(beta_logit.double())
    s, outputs = state.double(), []
    for t in range(len(qkv)):
        s = s * decay[t, :, None, None]
        correction = beta[t, :, None] * (v[t] - torch.einsum("hk,hkv->hv", k[t], s))
        s = s + torch.einsum("hk,hv->hkv", k[t], correction)
        outputs.append(torch.einsum("hk,hkv->hv", q[t], s))
    return torch.stack(outputs).to(qkv.dtype), s.to(state.dtype)
