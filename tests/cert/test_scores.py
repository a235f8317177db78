"""Scores against loops over queries and tokens, and allocation and policies against their definitions."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor

from cert import scores
from cert.allocate import head_budgets, layer_budgets
from cert.design import protected_set
from cert.draw import uniforms
from cert.errors import CertError
from cert.policy import PRESETS, Policy

SCALE = 0.3


def qkv(n: int = 40, heads: int = 4, kv_heads: int = 2, d: int = 8) -> tuple[Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(2)
    q = torch.randn(heads, n, d, generator=g, dtype=torch.float64)
    k, v = (torch.randn(kv_heads, n, d, generator=g, dtype=torch.float64) for _ in range(2))
    return q, k, v


def mass_by_hand(q: Tensor, k: Tensor, first: int) -> Tensor:
    """Query by query, each over the tokens it may see."""
    total = torch.zeros(k.shape[:2], dtype=torch.float64)
    for h in range(q.shape[0]):
        for t in range(first, q.shape[1]):
            g = h // (q.shape[0] // k.shape[0])
            total[g, : t + 1] += torch.softmax(SCALE * (k[g, : t + 1] @ q[h, t]), -1)
    return total / (q.shape[0] // k.shape[0])


def test_h2o_accumulates_every_query_whatever_the_chunk() -> None:
    q, k, _ = qkv()
    by_hand = mass_by_hand(q, k, 0)
    for chunk in (1, 7, 40, 256):
        assert torch.allclose(scores.h2o(q, k, SCALE, chunk), by_hand, atol=1e-12)
    assert by_hand.sum(-1).tolist() == pytest.approx([40.0, 40.0])


def test_snapkv_is_the_mean_over_window_and_group() -> None:
    q, k, _ = qkv()
    score = scores.snapkv(q[:, -9:], k, SCALE)
    assert torch.allclose(score, mass_by_hand(q, k, 31) / 9, atol=1e-12)
    pooled = scores.snapkv(q[:, -9:], k, SCALE, pool=3)
    for i in range(40):
        assert torch.equal(pooled[:, i], score[:, max(0, i - 1) : i + 2].amax(-1))
    for wrong in (0, 2):
        with pytest.raises(CertError, match="odd"):
            scores.snapkv(q[:, -9:], k, SCALE, pool=wrong)
    with pytest.raises(CertError, match="among the 3 tokens"):
        scores.snapkv(q[:, -9:], k[:, :3], SCALE)


def test_snapkv_takes_batches() -> None:
    q, k, _ = qkv()
    both = scores.snapkv(torch.stack([q, q.flip(0)])[:, :, -5:], torch.stack([k, k.flip(0)]), SCALE)
    assert torch.allclose(both[0], scores.snapkv(q[:, -5:], k, SCALE))
    assert torch.allclose(both[1], scores.snapkv(q.flip(0)[:, -5:], k.flip(0), SCALE))


def test_the_other_scores_are_what_they_say() -> None:
    _, k, v = qkv()
    assert torch.equal(scores.streaming(k).argsort(-1, descending=True)[0], torch.arange(39, -1, -1))
    assert torch.equal(scores.knorm(k).argsort(-1), k.norm(dim=-1).argsort(-1, descending=True))
    assert (scores.constant(k) == 1).all()
    assert torch.allclose(scores.value_weighted(scores.knorm(k), v), v.norm(dim=-1) / k.norm(dim=-1))
    for score in (scores.streaming(k), scores.knorm(k), scores.constant(k), scores.snapkv(k, k, 1.0)):
        assert score.shape == k.shape[:-1] and (score >= 0).all() and torch.isfinite(score).all()


def test_pyramid_falls_with_depth_and_keeps_the_total() -> None:
    for tokens, layers in ((256, 30), (60, 7), (900, 12), (52, 5)):
        mine = layer_budgets("pyramid", tokens, layers, 52, 1024)
        assert sum(mine) == tokens * layers and min(mine) >= 52 and max(mine) <= 1024
        assert all(a >= b - 1 for a, b in pairwise(mine)) and (mine[0] > mine[-1]) == (tokens > 52)
    assert layer_budgets("uniform", 100, 3, 52, 1024) == [100] * 3
    with pytest.raises(CertError, match="between 52 and 1024"):
        layer_budgets("pyramid", 20, 3, 52, 1024)
    with pytest.raises(CertError, match="expected one of"):
        layer_budgets("cake", 100, 3, 52, 1024)


def test_ada_gives_more_to_the_head_with_more_top_scores() -> None:
    score = torch.rand(3, 200, generator=torch.Generator().manual_seed(0)) * torch.tensor([1.0, 2.0, 4.0])[:, None]
    mine = head_budgets("ada", 80, score, 52)
    assert mine.sum() == 240 and (mine >= 52).all() and (mine <= 200).all()
    assert mine[0] < mine[1] < mine[2]
    one_sided = torch.stack([torch.ones(200) * 9, torch.ones(200)])  # every top score in one head, budget 1.0
    assert head_budgets("ada", 200, one_sided, 52).max() <= 200
    assert head_budgets("ada", 100, one_sided, 52).tolist() == [138, 62]  # 52 + 48 (0.8 * 2 + 0.2), 52 + 48 * 0.2
    assert head_budgets("uniform", 80, score, 52).tolist() == [80] * 3


@pytest.mark.parametrize("name", [name for name in PRESETS if name != "full"])
def test_every_preset_keeps_its_budget_and_its_protected_tokens(name: str) -> None:
    policy = Policy.preset(name, budget=0.25)
    score = torch.rand(3, 400, generator=torch.Generator().manual_seed(0))
    prob, keep = policy.plan(score, uniforms(0, name, 0, 3, 400), layer=0, n_layers=1)
    assert prob.sum().item() == pytest.approx(300, abs=1e-3)
    assert keep[:, protected_set(400)].all()
    if policy.design == "topk":
        assert torch.equal(prob, keep.float()) and policy.no_certificate
    else:
        assert ((prob > 0) & (prob <= 1)).all() and policy.no_certificate is None


def test_full_keeps_everything_and_presets_can_be_changed() -> None:
    prob, keep = Policy.preset("full").plan(torch.rand(2, 9), torch.rand(2, 9))
    assert keep.all() and (prob == 1).all()
    assert Policy.preset("certified", budget=0.5).with_budget(0.125).tokens(1024) == (128, False)
    assert Policy.preset("certified", budget_tokens=100).tokens(1000) == (100, False)
    assert Policy.preset("uniform", budget=0.5).certain_share == 0


@pytest.mark.parametrize(
    "wrong",
    [
        {"budget": -0.1},
        {"budget": 1.5},
        {"budget": 0.0},
        {},
        {"budget": 0.5, "budget_tokens": 3},
        {"budget_tokens": 0},
        {"budget": 0.5, "compensation": "merge"},
        {"budget": 0.5, "score": "vibes"},
        {"budget": 0.5, "pool": 2},
        {"budget": 0.5, "floor": 2.0},
        {"budget": 0.5, "window": 0},
        {"budget": 0.5, "design": "none"},
        {"budget": 0.5, "colour": 3},
    ],
)
def test_impossible_policies_are_refused(wrong: dict) -> None:
    with pytest.raises(CertError, match=r"expected|no inclusion probability"):
        Policy.preset("certified", **wrong)


def test_an_unknown_preset_is_refused_by_name() -> None:
    with pytest.raises(CertError, match=r"'best': expected one of full"):
        Policy.preset("best", budget=0.5)
