"""Importance of each cached token, one score per KV head: what decides certainty, size and top-k.

Every function returns finite scores >= 0 [.., kv_heads, n], so any of them can serve a Poisson design.
"""

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional

from cert.attention import at_least_float32, capped, per_kv_head
from cert.errors import CertError


def attention_mass(
    q: Float[Tensor, "*lead heads m d"],
    k: Float[Tensor, "*lead kv_heads n d"],
    scale: float,
    first: int,
    softcap: float | None = None,
) -> Float[Tensor, "*lead kv_heads n"]:
    """Attention each token received from m queries, summed over queries, averaged over the query heads of a KV head.

    mass_i = mean_group sum_t softmax_{j <= first + t}(scale * q_t . k_j)_i, in float32 or better.

    q [.., heads, m, d] at positions first .. first + m - 1; k [.., kv_heads, n, d]. Raises CertError where a query
    would lie outside the n tokens.
    """
    m, n, kv_heads = q.shape[-2], k.shape[-2], k.shape[-3]
    if first < 0 or first + m > n:
        raise CertError(f"queries at positions {first} to {first + m - 1}: expected positions among the {n} tokens")
    q, k = at_least_float32(q), at_least_float32(k)
    grouped = per_kv_head(q.flatten(-2), kv_heads).unflatten(-1, (m, q.shape[-1]))  # [.., kv, group, m, d]
    logit = capped(scale * (grouped @ k[..., :, None, :, :].transpose(-1, -2)), softcap)
    position = torch.arange(n, device=k.device)
    later = position > (first + torch.arange(m, device=k.device))[:, None]
    return logit.masked_fill(later, float("-inf")).softmax(-1).sum(-2).mean(-2)


def snapkv(
    q: Float[Tensor, "*lead heads window d"],
    k: Float[Tensor, "*lead kv_heads n d"],
    scale: float,
    pool: int = 1,
    softcap: float | None = None,
) -> Float[Tensor, "*lead kv_heads n"]:
    """Mean attention the last `window` queries paid to each token, optionally max-pooled over neighbours.

    q [.., heads, window, d]: the last queries of the prefill, window <= n; pool: odd kernel width, 1 for none.
    Raises CertError for an even pool. Source: Li et al., SnapKV (2024); float32 softmax and pool 1 are ours.
    """
    if pool < 1 or pool % 2 == 0:
        raise CertError(f"pool {pool}: expected an odd width of at least 1")
    window, n = q.shape[-2], k.shape[-2]
    score = attention_mass(q, k, scale, n - window, softcap) / window
    if pool == 1:
        return score
    return functional.max_pool1d(score.flatten(0, -2), pool, stride=1, padding=pool // 2).view(score.shape)


def h2o(
    q: Float[Tensor, "*lead heads n d"], k: Float[Tensor, "*lead kv_heads n d"], scale: float, chunk: int = 256
) -> Float[Tensor, "*lead kv_heads n"]:
    """Attention accumulated over every query of the prefill, in chunks: never n x n in memory.

    score_i = sum_t p_{t,i}. q [.., heads, n, d], k [.., kv_heads, n, d]. Source: Zhang et al., H2O (2023).
    """
    total = torch.zeros(k.shape[:-1], dtype=torch.promote_types(k.dtype, torch.float32), device=k.device)
    for first in range(0, q.shape[-2], chunk):
        total += attention_mass(q[..., first : first + chunk, :], k, scale, first)
    return total


def streaming(k: Float[Tensor, "*lead kv_heads n d"]) -> Float[Tensor, "*lead kv_heads n"]:
    """Recency alone, (i + 1) / n: with protected sinks, StreamingLLM. Source: Xiao et al. (2024)."""
    n = k.shape[-2]
    recency = torch.arange(1, n + 1, device=k.device, dtype=torch.float32) / n
    return recency.expand(k.shape[:-1])


def knorm(k: Float[Tensor, "*lead kv_heads n d"]) -> Float[Tensor, "*lead kv_heads n"]:
    """1 / ||k_i||: tokens with small keys draw much attention. Source: Devoto et al. (2024), who rank by -||k||."""
    return 1 / at_least_float32(k).norm(dim=-1).clamp(min=1e-6)


def constant(k: Float[Tensor, "*lead kv_heads n d"]) -> Float[Tensor, "*lead kv_heads n"]:
    """1 for every token: uniform sampling."""
    return torch.ones(k.shape[:-1], dtype=torch.float32, device=k.device)


def value_weighted(
    score: Float[Tensor, "*lead kv_heads n"], v: Float[Tensor, "*lead kv_heads n d"]
) -> Float[Tensor, "*lead kv_heads n"]:
    """score_i * ||v_i||, the computable stand-in for the optimal (Neyman) size p_i ||v_i - o||.

    Source: Neyman (1934); METHOD section 2 (ours).
    """
    return score * at_least_float32(v).norm(dim=-1)
