"""Variance and radius against enumeration, simulation and numbers worked out by hand."""

import math

import pytest
import torch
from scipy import stats
from torch import Tensor

from cert.attention import full_attention, retained_attention
from cert.certificate import (
    anticipated_variance,
    max_term,
    poisson_variance,
    radius,
    request_certificate,
    tail_flags,
    weight_variance,
)
from cert.design import certainty_set, inclusion_probs
from cert.draw import poisson_keep, uniforms
from cert.errors import CertError

SCALE = 0.25


def problem(n: int = 120, heads: int = 4, kv_heads: int = 2, dtype: torch.dtype = torch.float64) -> tuple[Tensor, ...]:
    g = torch.Generator().manual_seed(11)
    q, k = torch.randn(heads, 8, generator=g, dtype=dtype), torch.randn(kv_heads, n, 8, generator=g, dtype=dtype)
    v = torch.randn(kv_heads, n, 8, generator=g, dtype=dtype) + 3  # far from 0, where cancellation would show
    score = torch.rand(kv_heads, n, generator=g, dtype=dtype) ** 2
    prob = inclusion_probs(score, 60, certainty_set(score, 60))
    return q, k, v, score, prob


def draw(q: Tensor, k: Tensor, v: Tensor, prob: Tensor, document: str = "d") -> tuple[Tensor, Tensor, Tensor]:
    keep = poisson_keep(prob, uniforms(0, document, 0, *prob.shape))
    out, weight = retained_attention(q, k, v, torch.where(keep, -prob.log(), -torch.inf), SCALE)
    return out, weight, keep


def test_variance_equals_its_sum_token_by_token() -> None:
    q, k, v, _, prob = problem()
    out, weight, _ = draw(q, k, v, prob)
    var = poisson_variance(weight, prob, v, out)
    for h in range(4):
        by_hand = sum(
            (1 - prob[h // 2, i]) * weight[h, i] ** 2 * (v[h // 2, i] - out[h]).square().sum() for i in range(120)
        )
        assert var[h].item() == pytest.approx(by_hand.item(), rel=1e-10)


def test_moments_in_float32_do_not_cancel() -> None:
    """Values far from zero and nearly equal: without the reference value float32 would lose every digit."""
    q, k, v, _, prob = problem()
    v = 1000 + 0.01 * v
    out, weight, _ = draw(q, k, v, prob)
    exact = poisson_variance(weight, prob, v, out)
    single = poisson_variance(weight.float(), prob.float(), v.float(), out.float())
    # v itself is rounded to 6e-5 in float32, a relative 0.6 % of its spread of 0.01
    assert torch.allclose(single.double(), exact, rtol=0.05)


def test_rounding_never_makes_a_variance_negative() -> None:
    """All tail values nearly equal the output, far from the first value: the three sums cancel to rounding."""
    g = torch.Generator().manual_seed(0)
    v = 1000 + torch.rand(1, 9, 3, generator=g) * 1e-3
    v[0, 0] = 0.0
    weight, prob = torch.full((1, 9), 0.3), torch.tensor([[1.0] + 8 * [0.7]])
    out = v[:, 1] + torch.rand(400, 1, 3, generator=g) * 1e-3
    var = poisson_variance(weight.expand(400, 1, 9), prob, v, out)
    assert (var >= 0).all() and (var == 0).any()


def test_monte_carlo_the_estimator_is_unbiased_and_its_variance_is_v() -> None:
    """20,000 draws: mean of the linearised error is 0, its variance is V, the oracle-form estimate has mean V."""
    q, k, v, _, prob = problem(heads=2, n=80)
    draws = 20_000
    full = full_attention(q, k, v, SCALE)
    p = torch.softmax(SCALE * (k @ q[:, :, None]).squeeze(-1), -1)
    keep = torch.stack([poisson_keep(prob[h].expand(draws, -1), uniforms(5, "mc", h, draws, 80)) for h in range(2)], 1)
    true = poisson_variance(p / prob.sqrt(), prob, v, full)
    bound = stats.norm.isf(0.001 / (2 * (8 + 2) * 2))  # Bonferroni: 2 heads, 8 coordinates, 2 variances, two-sided
    for h in range(2):
        direction = p[h][:, None] * (v[h] - full[h])
        linear = (torch.where(keep[:, h], 1 / prob[h], 0.0) - 1) @ direction
        z = linear.mean(0) / (linear.std(0) / math.sqrt(draws))
        assert z.abs().max() < bound
        square = linear.square().sum(-1)
        assert abs(square.mean() - true[h]) / (square.std() / math.sqrt(draws)) < bound
        terms = (1 - prob[h]) / prob[h].square() * p[h].square() * (v[h] - full[h]).square().sum(-1)
        oracle = keep[:, h].double() @ terms
        assert abs(oracle.mean() - true[h]) / (oracle.std() / math.sqrt(draws)) < bound


def test_sen_yates_grundy_pairs_vanish_under_poisson_sampling() -> None:
    *_, prob = problem()
    pair = prob[0][:, None] * prob[0][None]  # pi_ij of independent draws
    assert ((prob[0][:, None] * prob[0][None] - pair) == 0).all()


def test_max_term_bounds_the_exact_maximum() -> None:
    q, k, v, _, prob = problem()
    out, weight, _ = draw(q, k, v, prob)
    exact, bound = max_term(weight, prob, v, out, exact=True), max_term(weight, prob, v, out)
    for h in range(4):
        tail = prob[h // 2] < 1
        terms = weight[h, tail] * (v[h // 2, tail] - out[h]).norm(dim=-1)
        assert exact[h].item() == pytest.approx(terms.max().item(), rel=1e-12)
        by_hand = (weight[h, tail] * v[h // 2, tail].norm(dim=-1)).max() + out[h].norm() * weight[h, tail].max()
        assert bound[h].item() == pytest.approx(by_hand.item(), rel=1e-12)
    assert (bound >= exact).all()
    assert (max_term(weight, torch.ones_like(prob), v, out) == 0).all()


def test_radius_rules_by_hand() -> None:
    """V_hat = 0.04, b = 0.1, delta = 0.05: L = ln 40 = 3.688879, L3 = ln 60 = 4.094345."""
    var, b = torch.tensor([0.04], dtype=torch.float64), torch.tensor([0.1], dtype=torch.float64)
    third = 0.1 * 3.6888794541139363 / 3
    assert radius(var, b).item() == pytest.approx(third + math.sqrt(third**2 + 0.08 * 3.6888794541139363), rel=1e-12)
    assert radius(var, b).item() == pytest.approx(0.6799457, abs=1e-6)
    assert radius(var, b, rule="normal").item() == pytest.approx(1.959964 * 0.2, abs=1e-6)
    assisted = radius(var, b, rule="assisted", anticipated=torch.tensor([0.08], dtype=torch.float64))
    assert assisted.item() == pytest.approx(radius(torch.tensor([0.06], dtype=torch.float64), b).item(), rel=1e-12)
    terms = {
        "weight_var": torch.tensor([1e-4], dtype=torch.float64),
        "weight_max": torch.tensor([0.01], dtype=torch.float64),
    }
    level = 4.0943445622221
    eps = math.sqrt(2 * level * 1e-4) + 8 / 3 * level * 0.01
    wide = (math.sqrt(0.08 * level) + 8 / 3 * 0.1 * level) / (1 - eps)
    assert radius(var, b, rule="conservative", **terms).item() == pytest.approx(wide, rel=1e-12)
    terms["weight_max"] = torch.tensor([0.1], dtype=torch.float64)  # eps > 1: nothing can be said
    assert math.isnan(radius(var, b, rule="conservative", **terms).item())
    assert radius(torch.zeros(1), torch.zeros(1)).item() == 0


def test_empirical_bernstein_inverts_bernstein() -> None:
    """At the radius, Bernstein's tail 2 exp(-r^2 / (2 V + 2 b r / 3)) is exactly delta."""
    for var, b, delta in ((0.04, 0.1, 0.05), (1e-6, 0.3, 0.2), (2.0, 1e-9, 0.01)):
        r = radius(torch.tensor([var]).double(), torch.tensor([b]).double(), delta).item()
        assert 2 * math.exp(-(r**2) / (2 * var + 2 * b * r / 3)) == pytest.approx(delta, rel=1e-6)


def test_unknown_rules_levels_and_missing_inputs_are_refused() -> None:
    one = torch.ones(1)
    for wrong in ({"rule": "bayes"}, {"delta": 0.0}, {"rule": "conservative"}, {"rule": "assisted"}):
        with pytest.raises(CertError, match="expected"):
            radius(one, one, **wrong)


def test_anticipated_variance_by_hand_and_where_the_score_is_the_truth() -> None:
    q, k, v, _, prob = problem()
    p = torch.softmax(SCALE * (k @ q[::2, :, None]).squeeze(-1), -1)  # one query a KV head
    truth = poisson_variance(p / prob.sqrt(), prob, v, full_attention(q[::2], k, v, SCALE))
    assert torch.allclose(anticipated_variance(7 * p, prob, v), truth, rtol=1e-10)  # score = attention: V itself
    zero = anticipated_variance(torch.zeros_like(prob), prob, v)
    assert torch.allclose(zero, anticipated_variance(torch.ones_like(prob), prob, v))


def test_flags_tell_exact_from_undefined() -> None:
    prob = torch.tensor([[1.0, 1.0, 1.0], [1.0, 1.0, 1.0], [1.0, 0.5, 1.0], [1.0, 0.5, 1.0]])
    exact, undefined = tail_flags(prob, torch.tensor([0, 4, 4, 0]))
    assert exact.tolist() == [True, False, False, False]  # all kept by luck is not exact: the offsets remain
    assert undefined.tolist() == [False, True, False, False]


def test_weight_variance_is_its_sum() -> None:
    q, k, v, _, prob = problem()
    _, weight, _ = draw(q, k, v, prob)
    by_hand = ((1 - prob[1]) * weight[3] ** 2).sum()
    assert weight_variance(weight, prob)[3].item() == pytest.approx(by_hand.item(), rel=1e-12)


def test_request_certificate_by_hand() -> None:
    r = torch.tensor([[[1.0, 3.0]], [[2.0, math.nan]]])  # 2 layers, 1 step, 2 heads
    o = torch.tensor([[[2.0, 2.0]], [[8.0, 5.0]]])
    request = request_certificate(r, o)
    assert request.per_layer == (1.0, 0.25) and request.value == 0.625
    assert request.mean_relative == pytest.approx((0.5 + 1.5 + 0.25) / 3) and request.max_relative == 1.5
    assert request.undefined_share == 0.25 and request.flagged and request.steps == 1
    empty = request_certificate(torch.zeros(2, 0, 2), torch.zeros(2, 0, 2))
    assert empty.value is None and empty.steps == 0 and not empty.flagged
    undefined = request_certificate(torch.full((1, 2, 2), math.nan), torch.ones(1, 2, 2))
    assert undefined.value is None and undefined.per_layer == (None,) and undefined.flagged
