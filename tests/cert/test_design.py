"""Inclusion probabilities against their definition, by brute force, by random scores and by simulation."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cert.design import (
    SPARE,
    budget_tokens,
    certainty_set,
    inclusion_probs,
    protected_set,
    streaming_probs,
    topk_set,
)
from cert.draw import poisson_keep
from cert.errors import CertError


def tille(size: list[float], total: float) -> list[float]:
    """Inclusion probabilities as the textbook computes them: set to 1 what exceeds it, rescale the rest, repeat."""
    fixed: set[int] = set()
    while True:
        rest = sum(x for i, x in enumerate(size) if i not in fixed)
        prob = [1.0 if i in fixed else (total - len(fixed)) * x / rest for i, x in enumerate(size)]
        over = {i for i, p in enumerate(prob) if p > 1 and i not in fixed}
        if not over:
            return prob
        fixed |= over


def awkward_scores(kind: str, n: int, generator: torch.Generator) -> Tensor:
    score = torch.rand(n, generator=generator, dtype=torch.float64)
    if kind == "ties":
        return (score * 4).floor()
    if kind == "zeros":
        return score * (score > 0.7)
    if kind == "huge":
        score[n // 2] = 1e12
    if kind == "all zero":
        return torch.zeros_like(score)
    if kind == "equal":
        return torch.ones_like(score)
    if kind == "tiny":
        return score * 1e-300
    return score


@pytest.mark.parametrize("kind", ["plain", "ties", "zeros", "huge", "all zero", "equal", "tiny"])
def test_a_thousand_random_scores_keep_the_promises(kind: str) -> None:
    generator = torch.Generator().manual_seed(len(kind))
    for trial in range(150):
        n = 60 + 7 * trial
        score = awkward_scores(kind, n, generator)
        budget = (0.05, 0.125, 0.25, 0.5, 0.9)[trial % 5]
        tokens, raised = budget_tokens(budget, n, 36)
        certain = certainty_set(score, tokens)
        prob = inclusion_probs(score, tokens, certain, floor=0.1)
        assert prob.sum().item() == pytest.approx(tokens, abs=1e-8)
        assert ((prob > 0) & (prob <= 1)).all()
        assert (prob[certain] == 1).all()
        assert certain[:4].all() and certain[-32:].all()
        tail = n - int(certain.sum())
        assert (prob[~certain] >= 0.1 * (tokens - int(certain.sum())) / tail - 1e-12).all()
        assert raised == (math.floor(budget * n + 0.5) < 36 + SPARE)


@settings(max_examples=100)
@given(st.lists(st.floats(1e-6, 1e6), min_size=3, max_size=30), st.floats(0.05, 0.95))
def test_probabilities_equal_the_textbook_iteration(size: list[float], share: float) -> None:
    total = max(1, round(share * len(size)))
    if total >= len(size):
        total = len(size) - 1
    none = torch.zeros(len(size), dtype=torch.bool)
    prob = inclusion_probs(torch.tensor(size, dtype=torch.float64), total, none, floor=0.0)
    assert prob.tolist() == pytest.approx(tille(size, total), rel=1e-9)


def test_heads_are_computed_each_with_its_own_budget() -> None:
    score = torch.rand(2, 3, 100, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    budget = torch.tensor([[50, 60, 70], [80, 90, 100]])
    certain = certainty_set(score, budget, certain_share=0.6)
    prob = inclusion_probs(score, budget, certain)
    assert prob.sum(-1).flatten().tolist() == pytest.approx(budget.flatten().tolist())
    alone = inclusion_probs(score[1, 0], 80, certainty_set(score[1, 0], 80, certain_share=0.6))
    assert torch.equal(prob[1, 0], alone)


def test_certainty_set_holds_the_protected_and_the_top_scores() -> None:
    score = torch.arange(200, dtype=torch.float32)
    mask = certainty_set(score, 160, sinks=4, recent=32, certain_share=0.25)  # m = 40 - 36 = 4
    assert mask.nonzero().flatten().tolist() == [0, 1, 2, 3, *range(164, 200)]
    tied = certainty_set(torch.ones(200), 160, sinks=4, recent=32, certain_share=0.25)
    assert tied.nonzero().flatten().tolist() == [*range(8), *range(168, 200)]  # ties go to the earlier token


@pytest.mark.parametrize("scores", [torch.ones(100), -torch.ones(100), torch.eye(100)[40] * 1e30])
def test_protected_tokens_survive_ties_negative_and_huge_scores(scores: Tensor) -> None:
    protected = protected_set(100)
    assert (topk_set(scores, 60, protected)[protected]).all()
    assert topk_set(scores, 60, protected).sum() == 60
    assert certainty_set(scores, 60)[protected].all()


def test_budget_is_rounded_raised_and_bounded() -> None:
    assert budget_tokens(0.125, 1024, 36) == (128, False)
    assert budget_tokens(0.01, 1024, 36) == (52, True)
    assert budget_tokens(0.01, 20, 20) == (20, True)
    assert budget_tokens(0.5, 1001, 36) == (501, False)
    for wrong in (0.0, -0.1, 1.1, math.nan):
        with pytest.raises(CertError, match="budget"):
            budget_tokens(wrong, 100, 36)


def test_infeasible_designs_are_refused_never_replaced() -> None:
    none, some = torch.zeros(50, dtype=torch.bool), protected_set(50)
    for wrong in (math.nan, -1.0, math.inf):
        size = torch.ones(50)
        size[7] = wrong
        with pytest.raises(CertError, match="size"):
            inclusion_probs(size, 10, none)
    with pytest.raises(CertError, match="nothing is sampled"):
        inclusion_probs(torch.ones(50), 36, some)
    with pytest.raises(CertError, match="could never be retained"):
        inclusion_probs(torch.tensor([0.0, 1.0, 1.0]), 2, torch.zeros(3, dtype=torch.bool), floor=0.0)
    with pytest.raises(CertError, match="floor"):
        inclusion_probs(torch.ones(50), 10, none, floor=1.5)
    with pytest.raises(CertError, match="finite"):
        certainty_set(torch.tensor([math.nan, 1.0]), 2)


def test_a_budget_of_everything_evicts_nothing() -> None:
    size = torch.rand(80, generator=torch.Generator().manual_seed(0))
    for budget in (80, 200):
        assert (inclusion_probs(size, budget, protected_set(80)) == 1).all()
    assert (inclusion_probs(size[:5], 5, protected_set(5)) == 1).all()


def test_half_precision_scores_give_float32_probabilities() -> None:
    size = torch.rand(80, generator=torch.Generator().manual_seed(0)).bfloat16()
    prob = inclusion_probs(size, 60, protected_set(80))
    assert prob.dtype == torch.float32 and prob.sum().item() == pytest.approx(60, abs=1e-4)


# ------------------------------------------------------------------ streaming

TURNS, TRIALS = 30, 4000


def stream(trials: int, adaptive: bool, rule: str, turn_tokens: int = 16) -> tuple[Tensor, Tensor]:
    """Independent histories side by side: [trials, tokens] retained, and stored probability, after 30 turns at 10 %.

    rule "permanent" is ours; "reused" multiplies conditional probabilities but tosses the same coins again, "fresh"
    does so with new coins at every event. A history holds its retained tokens alone, in order, padded to the longest:
    padding (place -1) counts as certain tokens outside the budget.
    """
    generator = torch.Generator().manual_seed(3)
    n = TURNS * turn_tokens
    base = torch.rand(n, generator=generator) ** 2 + 0.02
    coins = torch.rand(trials, n, generator=generator)
    place, prob = torch.zeros(trials, 0, dtype=torch.long), torch.ones(trials, 0, dtype=torch.float64)
    for turn in range(1, TURNS + 1):
        seen = turn * turn_tokens
        place = torch.cat([place, torch.arange(seen - turn_tokens, seen).expand(trials, -1)], dim=-1)
        before = torch.cat([prob, torch.ones(trials, turn_tokens, dtype=torch.float64)], dim=-1)
        here = place >= 0
        score = base[place.clamp(min=0)].double()
        if adaptive:  # on what is retained, never on coins: a token with retained neighbours gains
            share = here.cumsum(-1) / (place + 1).clamp(min=1)
            score = score * (0.5 + share + 0.5 * torch.sin(place * 0.7 + turn) ** 2)
        certain = ~here | (place < 2) | (place >= seen - 8)
        budget = max(26, round(0.10 * seen)) + (~here).sum(-1)
        mine = coins.gather(-1, place.clamp(min=0))
        if rule == "permanent":
            after = streaming_probs(score * here, before, budget, certain)
            survives = poisson_keep(after, mine)
        else:
            conditional = inclusion_probs(score * here, budget, certain)
            fresh = mine if rule == "reused" else torch.rand(here.shape, generator=generator)
            after, survives = before * conditional, poisson_keep(conditional, fresh)
        order = torch.argsort((~(here & survives)).int(), dim=-1, stable=True)
        order = order[:, : int((here & survives).sum(-1).max())]
        place = torch.where(here & survives, place, -1).gather(-1, order)
        prob = torch.where(place >= 0, after.gather(-1, order), 1.0)
    keep, stored = torch.zeros(trials, n + 1, dtype=torch.bool), torch.ones(trials, n + 1, dtype=torch.float64)
    keep.scatter_(-1, torch.where(place >= 0, place, n), True)
    stored.scatter_(-1, torch.where(place >= 0, place, n), prob)
    return keep[:, :n], stored[:, :n]


def weights(keep: Tensor, prob: Tensor) -> Tensor:
    """I/prob: 1 on average if prob is the probability of being retained."""
    return torch.where(keep, 1 / prob, 0.0).double()


def z_scores(x: Tensor) -> Tensor:
    """Distance of each column's mean from 1 in standard errors; columns that never vary count as 0."""
    error = x.std(0) / math.sqrt(len(x))
    return torch.where(error > 0, (x.mean(0) - 1) / error.clamp(min=1e-12), 0.0)


def test_streaming_with_fixed_scores_survives_with_the_stored_probability() -> None:
    x = weights(*stream(TRIALS, adaptive=False, rule="permanent"))
    assert z_scores(x).abs().max() < 4.7  # 480 positions: P(max |z| > 4.7) = 0.0012


def faults(x: Tensor) -> list[str]:
    """What is wrong with weights [trials, tokens] of streaming: biased age bands (P = 0.0004 if unbiased), wide totals."""
    by_age, total = x.view(len(x), 6, -1).mean(-1), x.mean(-1)  # turns 1-5, ..., 26-30
    biased = bool((z_scores(by_age).abs() >= 4).any())
    wide = not total.std() / total.mean() < 0.15
    return ["biased"] * biased + ["wide"] * wide


@pytest.mark.parametrize(
    ("rule", "wrong"), [("permanent", []), ("reused", ["biased", "wide"]), ("fresh", ["biased", "wide"])]
)
def test_adaptive_streaming_is_unbiased_and_stable_in_one_form_alone(rule: str, wrong: list[str]) -> None:
    """4,000 histories of 1,500 tokens: every age band weighs what it should, and totals vary by less than 15 %."""
    x = weights(*stream(TRIALS, adaptive=True, rule=rule, turn_tokens=50))
    assert faults(x) == wrong


def test_streaming_never_raises_a_probability_and_keeps_the_protected() -> None:
    generator = torch.Generator().manual_seed(0)
    before = torch.rand(3, 90, generator=generator) * 0.9 + 0.1
    certain = protected_set(90).expand(3, -1)
    prob = streaming_probs(torch.rand(3, 90, generator=generator), before, 50, certain)
    assert (prob <= before).all() and torch.equal(prob[certain], before[certain])
    assert (prob / before).sum(-1).tolist() == pytest.approx([50.0] * 3, abs=1e-4)
    with pytest.raises(CertError, match="prob_before"):
        streaming_probs(torch.ones(3), torch.tensor([0.5, 0.0, 1.0]), 2, torch.zeros(3, dtype=torch.bool))
