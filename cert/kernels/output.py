"""Kernels in plain PyTorch that return the output alone: scaled_dot_product_attention, eager, FlexAttention."""

import warnings
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from cert.attention import capped


def _folded(q: Tensor, offset: Tensor) -> tuple[Tensor, Tensor]:
    """The query heads of a KV head as further queries: q [batch, kv_heads, group * m, d], offset likewise."""
    group = q.shape[1] // offset.shape[1]
    return q.unflatten(1, (-1, group)).flatten(2, 3), offset.repeat(1, 1, group, 1)


def _unfolded(out: Tensor, m: int) -> Tensor:
    """[batch, kv_heads, group * m, d] -> [batch, m, heads, d]."""
    return out.unflatten(2, (-1, m)).permute(0, 3, 1, 2, 4).flatten(2, 3)


def sdpa(q: Tensor, k: Tensor, v: Tensor, offset: Tensor, scale: float, softcap: float | None) -> Tensor:  # noqa: ARG001
    """torch's fused attention, the offset as its additive mask; no soft cap (best_kernel refuses it)."""
    folded, mask = _folded(q, offset)
    out = functional.scaled_dot_product_attention(folded, k, v, attn_mask=mask, scale=scale)
    return _unfolded(out, q.shape[2])


def eager(q: Tensor, k: Tensor, v: Tensor, offset: Tensor, scale: float, softcap: float | None) -> Tensor:
    """Two matrix products in the model's dtype, softmax in float32, as transformers' eager attention."""
    folded, mask = _folded(q, offset)
    logit = capped((scale * (folded @ k.mT)).float(), softcap)
    return _unfolded((logit + mask).softmax(-1).to(v.dtype) @ v, q.shape[2])


def flex(q: Tensor, k: Tensor, v: Tensor, offset: Tensor, scale: float, softcap: float | None) -> Tensor:
    """FlexAttention, not compiled: correct anywhere, fused nowhere. Cap and offset are its score modification."""
    from torch.nn.attention.flex_attention import flex_attention

    group = q.shape[1] // k.shape[1]
    cap = softcap or 1.0
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="flex_attention called without torch.compile")
        out: Any = flex_attention(  # dynamo traces the lambda, so it calls nothing of ours
            q,
            k,
            v,
            lambda s, b, h, i, j: (cap * torch.tanh(s / cap) if softcap else s) + offset[b, h // group, i, j],
            scale=scale,
            enable_gqa=True,
        )
    return out.transpose(1, 2)
