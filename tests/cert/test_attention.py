"""Attention with an offset against the ratio it stands for, in float64."""

import pytest
import torch
from torch import Tensor

from cert.attention import full_attention, retained_attention
from cert.errors import CertError

SCALE = 0.125


def problem(heads: int = 6, kv_heads: int = 2, n: int = 90, d: int = 16, seed: int = 0) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(seed)
    q = torch.randn(heads, d, generator=g, dtype=torch.float64) * 3
    k = torch.randn(kv_heads, n, d, generator=g, dtype=torch.float64)
    v = torch.randn(kv_heads, n, d, generator=g, dtype=torch.float64) + 0.5
    prob = torch.rand(kv_heads, n, generator=g, dtype=torch.float64) * 0.9 + 0.1
    keep = torch.rand(kv_heads, n, generator=g, dtype=torch.float64) <= prob
    return q, k, v, prob, keep


def by_hand(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Every query head in a loop, over its own KV head."""
    group = q.shape[0] // k.shape[0]
    rows = []
    for h in range(q.shape[0]):
        a = torch.exp(SCALE * (k[h // group] @ q[h]))
        rows.append((a / a.sum()) @ v[h // group])
    return torch.stack(rows)


@pytest.mark.parametrize(("heads", "kv_heads"), [(6, 2), (4, 4), (8, 1)])
def test_full_attention_equals_the_loop(heads: int, kv_heads: int) -> None:
    q, k, v, *_ = problem(heads, kv_heads)
    assert torch.allclose(full_attention(q, k, v, SCALE), by_hand(q, k, v), atol=1e-12, rtol=0)


def test_offset_softmax_is_the_hajek_ratio() -> None:
    q, k, v, prob, keep = problem()
    log_weight = torch.where(keep, -prob.log(), -torch.inf)
    out, weight = retained_attention(q, k, v, log_weight, SCALE)
    for h in range(6):
        g, s = h // 3, keep[h // 3]
        a = torch.exp(SCALE * (k[g, s] @ q[h])) / prob[g, s]
        assert torch.allclose(out[h], (a[:, None] * v[g, s]).sum(0) / a.sum(), atol=1e-12, rtol=0)
        assert torch.allclose(weight[h, s], a / a.sum(), atol=1e-12, rtol=0)
        assert (weight[h, ~s] == 0).all()


def test_probability_one_is_full_attention() -> None:
    q, k, v, *_ = problem()
    out, _ = retained_attention(q, k, v, torch.zeros(2, 90, dtype=torch.float64), SCALE)
    assert torch.equal(out, full_attention(q, k, v, SCALE))


def test_the_exact_identity_of_the_error() -> None:
    """o_hat - o = (A / A_hat) sum_U (I/pi - 1) p (v - o), to rounding: what the linearisation drops is the factor."""
    q, k, v, prob, keep = problem(heads=2)
    out, _ = retained_attention(q, k, v, torch.where(keep, -prob.log(), -torch.inf), SCALE)
    full = full_attention(q, k, v, SCALE)
    for h in range(2):
        a = torch.exp(SCALE * (k[h] @ q[h]))
        inverse = torch.where(keep[h], 1 / prob[h], 0.0)
        factor = a.sum() / (a * inverse).sum()
        right = factor * (((inverse - 1) * a / a.sum())[:, None] * (v[h] - full[h])).sum(0)
        assert torch.allclose(out[h] - full[h], right, atol=1e-12, rtol=0)


def test_padding_changes_nothing_and_an_empty_head_is_refused() -> None:
    q, k, v, prob, keep = problem()
    log_weight = torch.where(keep, -prob.log(), -torch.inf)
    out, _ = retained_attention(q, k, v, log_weight, SCALE)
    pad = torch.zeros(2, 7, 16, dtype=torch.float64)
    wide = torch.cat([log_weight, torch.full((2, 7), -torch.inf, dtype=torch.float64)], -1)
    padded, longer = retained_attention(q, torch.cat([k, pad], 1), torch.cat([v, pad], 1), wide, SCALE)
    assert torch.allclose(padded, out, atol=1e-14) and (longer[:, 90:] == 0).all()
    log_weight[1] = -torch.inf
    with pytest.raises(CertError, match="no retained token"):
        retained_attention(q, k, v, log_weight, SCALE)


def test_half_precision_inputs_are_computed_in_float32() -> None:
    q, k, v, prob, keep = (x.bfloat16() if x.is_floating_point() else x for x in problem())
    log_weight = torch.where(keep, -prob.float().log(), -torch.inf)
    out, weight = retained_attention(q, k, v, log_weight, SCALE)
    exact, _ = retained_attention(q.double(), k.double(), v.double(), log_weight.double(), SCALE)
    assert out.dtype == weight.dtype == torch.float32
    assert torch.allclose(out.double(), exact, atol=1e-6)


def test_wrong_shapes_do_not_pass() -> None:
    q, k, v, *_ = problem()
    with pytest.raises(CertError, match="multiple"):
        full_attention(q[:5], k, v, SCALE)
    with pytest.raises(Exception, match=r"shape|type"):
        full_attention(q[:, :8], k, v, SCALE)
