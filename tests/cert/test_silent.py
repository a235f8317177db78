"""Theorem 1: what deterministic eviction cannot see, what a Poisson draw sees on average, and when it is blind too."""

from math import log, sqrt

import pytest
import torch

from cert.attention import full_attention, retained_attention
from cert.certificate import max_term, poisson_variance, radius
from cert.design import certainty_set, inclusion_probs, protected_set, topk_set
from cert.draw import poisson_keep
from cert.scores import snapkv, value_weighted
from cert.silent import alter_evicted, boundary_margin, log_miss_prob, retained_entropy

HEADS, KV_HEADS, N, D, KEPT, SINKS, RECENT = 4, 2, 40, 5, 16, 2, 4
SCALE = 1 / sqrt(D)
PROTECTED = protected_set(N, SINKS, RECENT)


def world(seed: int = 0):
    """Queries (a window of six, the last one decodes), keys, values and a fixed unit direction, float64."""
    g = torch.Generator().manual_seed(seed)
    window, k, v, u = (
        torch.randn(*shape, D, generator=g, dtype=torch.float64)
        for shape in ((HEADS, 6), (KV_HEADS, N), (KV_HEADS, N), ())
    )
    return window, k, v, u / u.norm()


def topk_run(window, k, v):
    """All that a compressed run computes: scores, the kept set, what it reads, its output and its self-signals."""
    score = snapkv(window, k, SCALE)
    keep = topk_set(score, KEPT, PROTECTED)
    read_k, read_v = (x[keep].view(KV_HEADS, KEPT, D) for x in (k, v))
    out, weight = retained_attention(window[:, -1], read_k, read_v, torch.zeros(KV_HEADS, KEPT), SCALE)
    signals = retained_entropy(weight), boundary_margin(score, keep, PROTECTED)
    return keep, out, (score, keep, read_k, read_v, weight, out, *signals)


def design(window, k):
    score = snapkv(window, k, SCALE)
    return inclusion_probs(score, KEPT, certainty_set(score, KEPT, SINKS, RECENT), floor=0.3)


def test_deterministic_eviction_sees_nothing_while_the_error_grows():
    window, k, v, u = world()
    keep, _, before = topk_run(window, k, v)
    p = torch.softmax(SCALE * (window[:, -1:] @ k.repeat_interleave(2, 0).mT)[:, 0], -1)
    mass = (p * ~keep.repeat_interleave(2, 0)).sum(-1)
    error = {}
    for size in (0.0, 1.0, 1e3, 1e6, 1e9):
        altered = alter_evicted(v, keep, u, size)
        _, out, after = topk_run(window, k, altered)
        assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
        gap = out - full_attention(window[:, -1], k, altered, SCALE)
        error[size] = gap.norm(dim=-1)
        if size == 0:
            start = gap
        want = (start - size * mass[:, None] * u).norm(dim=-1)
        torch.testing.assert_close(error[size], want, rtol=1e-9, atol=1e-12)
    assert (mass > 0.05).all()
    torch.testing.assert_close(error[1e9] / 1e9, mass, rtol=1e-6, atol=0.0)  # linear, slope p(D), no bound


def test_retained_values_keep_their_bits_in_any_dtype():
    _, _, v, u = world()
    v[0, 0] = -0.0  # 0 added would flip a sign bit
    keep = torch.arange(N).expand(KV_HEADS, N) % 2 == 0
    for dtype in (torch.bfloat16, torch.float32, torch.float64):
        values = v.to(dtype)
        altered = alter_evicted(values, keep, u, 100.0)
        assert altered.dtype == dtype
        assert torch.equal(altered[keep].view(torch.uint8), values[keep].view(torch.uint8))
        torch.testing.assert_close(altered[~keep], values[~keep] + (100 * u).to(dtype))


def test_a_value_weighted_score_is_outside_the_theorem():
    window, k, v, u = world()
    keep, _, _ = topk_run(window, k, v)
    score = snapkv(window, k, SCALE)
    changed = topk_set(value_weighted(score, alter_evicted(v, keep, u, 1e3)), KEPT, PROTECTED)
    assert not torch.equal(changed, topk_set(value_weighted(score, v), KEPT, PROTECTED))


def sampled(draws: int, window, k, v, seed: int = 1):
    """Oracle-form variance estimates [draws, heads] (true p and o) over Poisson draws, and the exact V [heads]."""
    prob = design(window, k)
    u = torch.rand(draws, KV_HEADS, N, generator=torch.Generator().manual_seed(seed))
    keep = poisson_keep(prob.expand(u.shape), u)
    o, p = retained_attention(window[:, -1], k, v, torch.zeros(KV_HEADS, N), SCALE)
    ht = p * (keep / prob).repeat_interleave(2, -2)
    estimate = poisson_variance(ht, prob, v, o.expand(draws, -1, -1))
    odds = ((1 - prob) / prob).repeat_interleave(2, 0)
    true = (odds * p**2 * (v.repeat_interleave(2, 0) - o[:, None]).square().sum(-1)).sum(-1)
    return keep, estimate, true


@pytest.mark.parametrize("size", [0.0, 10.0, 1e4])
def test_poisson_variance_sees_the_alteration_on_average(size):
    window, k, v, u = world()
    keep, _, _ = topk_run(window, k, v)
    _, estimate, true = sampled(20_000, window, k, alter_evicted(v, keep, u, size))
    z = (estimate.mean(0) - true) / (estimate.std(0) / sqrt(20_000))
    assert z.abs().max() < 3.3
    torch.testing.assert_close(estimate.mean(0), true, rtol=0.05, atol=0.0)


def test_variance_grows_with_the_square():
    window, k, v, u = world()
    keep, _, _ = topk_run(window, k, v)
    (mean_3, true_3), (mean_6, true_6) = (
        (estimate.mean(0), true)
        for _, estimate, true in (sampled(4_000, window, k, alter_evicted(v, keep, u, size)) for size in (1e3, 1e6))
    )
    torch.testing.assert_close(true_6 / true_3, torch.full_like(true_3, 1e6), rtol=0.05, atol=0.0)
    torch.testing.assert_close(mean_6 / mean_3, torch.full_like(mean_3, 1e6), rtol=0.05, atol=0.0)


def test_a_draw_that_misses_is_silent_too():
    """Three altered tokens: the draws without any are as many as the product says, and nothing in them changes."""
    window, k, v, u = world()
    prob, draws = design(window, k), 20_000
    spared = torch.ones(KV_HEADS, N, dtype=torch.bool)
    spared.scatter_(-1, prob.masked_fill(prob == 1, 0).topk(3).indices, False)
    coins = torch.rand(draws, KV_HEADS, N, generator=torch.Generator().manual_seed(2))
    keep = poisson_keep(prob.expand(coins.shape), coins)
    missed = ~(keep & ~spared).any(-1)
    chance = log_miss_prob(prob, spared).exp()
    assert ((chance > 0.01) & (chance < 0.9)).all()
    slack = 3.3 * (chance * (1 - chance) / draws).sqrt()
    assert ((missed.double().mean(0) - chance).abs() < slack).all()

    log_weight = torch.where(keep, -prob.log(), -torch.inf)[:500]

    def certificate(values):
        out, weight = retained_attention(window[:, -1].expand(500, -1, -1), k, values, log_weight, SCALE)
        var = poisson_variance(weight, prob, values, out)
        r = radius(var, max_term(weight, prob, values, out))
        return r, (out - full_attention(window[:, -1], k, values, SCALE)).norm(dim=-1)

    (r, _), (r_altered, err_altered) = certificate(v), certificate(alter_evicted(v, spared, u, 1e6))
    silent = missed[:500].repeat_interleave(2, -1)
    assert silent.any() and not silent.all()
    assert torch.equal(r[silent], r_altered[silent])  # to the bit, though the error is huge
    assert (err_altered[silent] > 1e3 * r_altered[silent]).all()
    assert (r_altered[~silent] > 1e3 * r[~silent]).all()  # every draw that holds one of them shows it


def test_miss_probability_by_hand():
    prob = torch.tensor([[0.5, 0.2, 1.0, 0.9], [0.5, 1.0, 0.2, 0.3]])
    keep = torch.tensor([[False, False, True, True], [True, False, True, False]])
    got = log_miss_prob(prob, keep)
    assert got[0].item() == pytest.approx(log(0.5 * 0.8), rel=1e-6)
    assert got[1] == -torch.inf  # a certainty token among the altered: never missed
    assert (log_miss_prob(prob, torch.ones_like(keep)) == 0).all()
    many = log_miss_prob(torch.full((1, 20_000), 0.1), torch.zeros(1, 20_000, dtype=torch.bool))
    assert many.item() == pytest.approx(20_000 * log(0.9), rel=1e-6)  # its exp is 0 in any float


def test_entropy_by_hand():
    weight = torch.tensor(
        [[[0.25, 0.25, 0.25, 0.25], [0.5, 0.5, 0.0, 0.0]], [[1.0, 0.0, 0.0, 0.0], [0.2, 0.8, 0.0, 0.0]]]
    )
    want = [[log(4), log(2)], [0.0, -0.2 * log(0.2) - 0.8 * log(0.8)]]
    torch.testing.assert_close(retained_entropy(weight), torch.tensor(want))
    assert retained_entropy(weight.bfloat16()).dtype == torch.float32


def test_margin_by_hand():
    protected = torch.tensor([True, False, False, False, False, True])
    score = torch.tensor(
        [[0.0, 5.0, 3.0, 2.0, 1.0, 9.0], [7.0, 4.0, 4.0, 4.0, 1.0, 0.0], [1.0, 2.0, 3.0, 4.0, 5.0, 6.0]]
    )
    keep = torch.tensor([[1, 1, 1, 0, 0, 1], [1, 1, 1, 0, 0, 1], [1, 1, 0, 0, 0, 1]]).bool()
    assert boundary_margin(score, keep, protected).tolist() == [1.0, 0.0, -3.0]
    everything, nothing = torch.ones_like(keep), protected.expand_as(keep)
    assert boundary_margin(score, everything, protected).isnan().all()
    assert boundary_margin(score, nothing, protected).isnan().all()
    top = topk_set(score[:2], 4, protected)
    assert (boundary_margin(score[:2], top, protected) >= 0).all()
