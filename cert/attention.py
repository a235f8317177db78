"""One decode step of attention: over all tokens, and over retained tokens with the log(1/prob) offset."""

import torch
from jaxtyping import Float
from torch import Tensor

from cert.errors import CertError


def at_least_float32(x: Tensor) -> Tensor:
    """x in float32, or float64 if it was: statistics never run in the model's half precision."""
    # asked about every operand of every step: float32, the usual answer, comes first
    return x if x.dtype is torch.float32 else x.to(torch.promote_types(x.dtype, torch.float32))


def per_kv_head(x: Float[Tensor, "*lead heads rest"], kv_heads: int) -> Float[Tensor, "*lead kv_heads group rest"]:
    """Query heads grouped by the KV head they share: head h belongs to KV head h // group."""
    if x.shape[-2] % kv_heads:
        raise CertError(f"{x.shape[-2]} query heads: expected a multiple of the {kv_heads} KV heads")
    return x.unflatten(-2, (kv_heads, x.shape[-2] // kv_heads))


def capped(logit: Tensor, softcap: float | None) -> Tensor:
    """softcap * tanh(logit / softcap), the soft cap of Gemma 2; the logits themselves where there is none."""
    return logit if softcap is None else softcap * torch.tanh(logit / softcap)


def logits(
    q: Float[Tensor, "*lead heads d"],
    k: Float[Tensor, "*#lead kv_heads n d"],
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "*lead heads n"]:
    """l_i = scale * q . k_i, soft-capped if so, for every query head over its KV head's tokens, in float32 or better."""
    q, k = at_least_float32(q), at_least_float32(k)
    grouped = per_kv_head(q, k.shape[-3])
    return capped(scale * (grouped @ k.transpose(-1, -2)), softcap).flatten(-3, -2)


def weighted_values(
    weight: Float[Tensor, "*lead heads n"], v: Float[Tensor, "*#lead kv_heads n d"]
) -> Float[Tensor, "*lead heads d"]:
    """sum_i w_i v_i for every query head over its KV head's values."""
    grouped, v = per_kv_head(weight, v.shape[-3]), at_least_float32(v)
    if v.shape[:-3].numel() == 1 < grouped.shape[:-3].numel() and grouped.shape[-2] == 1:
        # All steps over the same values: @ would copy them for each. Head by head a view does.
        steps, shared = grouped.flatten(0, -4), v.flatten(0, -3)
        heads = [torch.bmm(steps[:, h], one.expand(len(steps), -1, -1)) for h, one in enumerate(shared)]
        return torch.stack(heads, 1).squeeze(2).unflatten(0, grouped.shape[:-3])
    return (grouped @ v).flatten(-3, -2)


def full_attention(
    q: Float[Tensor, "*lead heads d"],
    k: Float[Tensor, "*#lead kv_heads n d"],
    v: Float[Tensor, "*#lead kv_heads n dv"],
    scale: float,
    softcap: float | None = None,
) -> Float[Tensor, "*lead heads dv"]:
    """o = sum_i p_i v_i, p = softmax(scale * q . k): attention over every token.

    q [.., heads, d], k and v [.., kv_heads, n, d]; out [.., heads, d], float32 or better.
    """
    return weighted_values(logits(q, k, scale, softcap).softmax(-1), v)


def retained_attention(
    q: Float[Tensor, "*lead heads d"],
    k: Float[Tensor, "*#lead kv_heads n d"],
    v: Float[Tensor, "*#lead kv_heads n dv"],
    log_weight: Float[Tensor, "*#lead kv_heads n"],
    scale: float,
    softcap: float | None = None,
) -> tuple[Float[Tensor, "*lead heads dv"], Float[Tensor, "*lead heads n"]]:
    """The Hajek estimator of attention as a softmax with a logit offset.

    w = softmax(scale * q . k_i + log(1/prob_i)), o_hat = sum_i w_i v_i, which is
    [sum a_i v_i / prob_i] / [sum a_i / prob_i] over retained tokens, a_i = exp(l_i). A soft cap comes before the offset.

    k, v [.., kv_heads, n, d], log_weight [.., kv_heads, n] of the retained tokens: log(1/prob), -inf at padding (whose
    k and v must be finite). Returns out [.., heads, d] and weight [.., heads, n], float32 or better.
    Raises CertError where a head has no retained token at all. Source: METHOD section 3.
    """
    offset = at_least_float32(log_weight)
    if not torch.isfinite(offset.amax(-1)).all():
        raise CertError("log_weight: a head has no retained token (all -inf) or an offset that is not a number")
    score = per_kv_head(logits(q, k, scale, softcap), k.shape[-3]) + offset[..., None, :]
    weight = score.softmax(-1).flatten(-3, -2)
    return weighted_values(weight, v), weight
