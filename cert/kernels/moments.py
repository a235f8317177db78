"""Output and certificate of one decode step from moments: no attention weight outlives its layer, V is read twice."""

import torch
from torch import Tensor

from cert.attention import at_least_float32, capped
from cert.certificate import variance_of_moments


def tail_rows(prob: Tensor, v: Tensor) -> Tensor:
    """What a step needs of each row beyond its key and value, the same until the next compression: [3, .., kv_heads, n].

    c = 1 - prob, ||v - v_ref||^2 with v_ref the first row, and ||v|| where the row was sampled (prob < 1), else 0.

    prob [.., kv_heads, n] (1 at padding and at rows that were never sampled), v [.., kv_heads, n, d]; float32 or better.
    """
    v, c = at_least_float32(v), 1 - prob
    return torch.stack([c, (v - v[..., :1, :]).square().sum(-1), v.norm(dim=-1) * (c > 0)])


def moments(  # noqa: PLR0913 - as the other kernels are called
    q: Tensor, k: Tensor, v: Tensor, offset: Tensor, tail: Tensor, scale: float, softcap: float | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """o_hat, V_hat and b of one query a head from the sums of c w^2 ||u||^2, c w^2 u, c w^2 and the maxima of w, w ||v||.

    q [batch, heads, d], k and v [batch, kv_heads, n, d], offset [batch, kv_heads, n] log(1/prob), -inf at padding;
    tail: tail_rows of the first rows, those behind them never having been sampled. Returns out [batch, heads, d]
    and (var_hat, max_term) [batch, heads], float32 or better. Source: METHOD sections 4, 5.
    """
    (batch, heads, d), (kv_heads, n) = q.shape, k.shape[1:3]
    q, k, v = at_least_float32(q), at_least_float32(k).flatten(0, 1), at_least_float32(v).flatten(0, 1)
    grouped = (q * scale).view(batch * kv_heads, heads // kv_heads, d)
    shift = offset.to(q.dtype).reshape(batch * kv_heads, 1, n)
    if softcap is None:
        logit = torch.baddbmm(shift, grouped, k.mT)
    else:
        logit = capped(torch.bmm(grouped, k.mT), softcap) + shift
    weight = logit.softmax(-1)
    out = torch.bmm(weight, v)
    rows = tail.shape[-1]
    c, distance, size = tail.reshape(3, batch * kv_heads, 1, rows)
    sampled = weight[..., :rows]
    cw2 = sampled.square() * c
    total, reference = cw2.sum(-1), v[:, :1]
    first = torch.baddbmm(total[..., None] * reference, cw2, v[:, :rows], beta=-1)
    second = torch.bmm(cw2, distance.mT).squeeze(-1)
    var_hat = variance_of_moments(second, first, total, out - reference)
    largest = (sampled * size).amax(-1) + torch.linalg.vector_norm(out, dim=-1) * (sampled * (c > 0)).amax(-1)
    return out.view(batch, heads, -1), (var_hat.view(batch, heads), largest.view(batch, heads))
