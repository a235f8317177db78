"""Retained rows of uneven heads, and output, variance and largest term of one step over them in float64."""

import torch

RAGGED = (37, 5, 1, 64)  # rows of each KV head


def rows(group: int, d: int, values: int | None = None, counts: tuple[int, ...] = RAGGED, seed: int = 0):
    """q [2, heads, d], k, v [2, len(counts) / 2, n, ..] and log_weight, padded with -inf; values far from 0 by 2."""
    g = torch.Generator().manual_seed(seed)
    kv_heads, n = len(counts) // 2, max(counts)
    q, k = torch.randn(2, kv_heads * group, d, generator=g), torch.randn(2, kv_heads, n, d, generator=g)
    v = torch.randn(2, kv_heads, n, values or d, generator=g) + 2
    log_weight = (6 * torch.rand(2, kv_heads, n, generator=g) - 1).clamp(min=0)  # a sixth for certain
    padding = torch.arange(n) >= torch.tensor(counts).view(2, kv_heads, 1)
    for x in (k, v):
        x.masked_fill_(padding[..., None], 0)
    return 2 * q, k, v, log_weight.masked_fill(padding, -torch.inf)


def prob_of(log_weight: torch.Tensor) -> torch.Tensor:
    """1 at padding."""
    return torch.where(log_weight.isinf(), 1.0, torch.exp(-log_weight))


def double(q, k, v, log_weight, scale, softcap=None):
    """(out, var_hat, max_term) by their definitions, each head by itself, without moments."""
    out, var, largest = [], [], []
    group = q.shape[1] // k.shape[1]
    for b in range(q.shape[0]):
        for h in range(q.shape[1]):
            there = log_weight[b, h // group] > -torch.inf
            keys, values, offset = (x[b, h // group][there].double() for x in (k, v, log_weight))
            logit = scale * keys @ q[b, h].double()
            logit = logit if softcap is None else softcap * torch.tanh(logit / softcap)
            w = (logit + offset).softmax(0)
            o, c = w @ values, 1 - torch.exp(-offset)
            tail = w * (c > 0)
            out.append(o)
            var.append((c * w.square() * (values - o).square().sum(-1)).sum())
            largest.append((tail * values.norm(dim=-1)).max() + o.norm() * tail.max())
    shape = q.shape[:2]
    return torch.stack(out).view(*shape, -1), torch.stack(var).view(shape), torch.stack(largest).view(shape)


def check(found, wanted, out: float = 1e-5, var: float = 1e-4) -> None:
    """The stated tolerances: the output absolute, of values near 2; variance and largest term relative.

    Where one sampled token has nearly all the weight the variance is a small difference of large sums: 1e-6 of the
    largest term's square, which such a radius is made of, is allowed beside.
    """
    o, (v, b) = found
    torch.testing.assert_close(o.double(), wanted[0], rtol=0, atol=out)
    assert bool(((v.double() - wanted[1]).abs() <= var * wanted[1] + 1e-6 * wanted[2].square() + 1e-12).all())
    torch.testing.assert_close(b.double(), wanted[2], rtol=max(out, 1e-6), atol=1e-12)
