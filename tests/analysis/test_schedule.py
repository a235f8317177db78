"""Gains against a selection written out request by request, replicated rows, and every subset of a small size."""

from itertools import combinations

import numpy as np
import pandas as pd
import pytest

from analysis.estimands import Cells
from analysis.intervals import resample
from analysis.requests import Records
from analysis.schedule import SIGNALS, Schedule, gains

FRACTIONS = np.array([0.1, 0.25, 0.5, 1.0])


def by_hand(score, change, weight, fraction):
    """Take requests from the highest score until a weight of fraction * total is taken; ties in equal shares."""
    left, gain = fraction * weight.sum(), 0.0
    score = np.where(np.isnan(score), -np.inf, score)
    for value in sorted(set(score), reverse=True):
        tied = score == value
        share = min(1.0, left / weight[tied].sum()) if weight[tied].sum() else 0.0
        gain += share * (weight * change)[tied].sum()
        left -= share * weight[tied].sum()
    return gain / weight.sum()


@pytest.mark.parametrize("decimals", [0, 1, 6])
def test_gains_are_those_of_a_selection_by_hand(decimals) -> None:
    rng = np.random.default_rng(1)
    score, change = np.round(rng.normal(size=40), decimals), rng.choice([-1.0, 0, 0.3, 1], 40)
    score[3:6], score[7:9] = np.nan, np.inf
    cluster, boot = rng.permutation(np.arange(40) % 8), resample([0] * 8, 30, 1)
    found = gains(score, change, cluster, boot.weights, FRACTIONS)
    for weights, row in zip(boot.weights, found, strict=True):
        assert row == pytest.approx([by_hand(score, change, weights[cluster], f) for f in FRACTIONS])


def test_integer_weights_are_rows_that_often() -> None:
    rng = np.random.default_rng(2)
    score, change, cluster = rng.normal(size=24), rng.normal(size=24), np.arange(24) % 6
    weights = rng.integers(0, 4, (20, 6)).astype(float) + np.eye(6)[rng.integers(0, 6, 20)]
    for w, row in zip(weights, gains(score, change, cluster, weights, FRACTIONS), strict=True):
        rows = np.repeat(np.arange(24), w[cluster].astype(int))
        plain = gains(score[rows], change[rows], np.zeros(len(rows), int), np.ones((1, 1)), FRACTIONS)
        assert row == pytest.approx(plain[0])


def test_a_batch_more_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    rng = np.random.default_rng(3)
    score, change, cluster = rng.normal(size=20), rng.normal(size=20), np.arange(20) % 5
    weights = rng.random((13, 5))
    whole = gains(score, change, cluster, weights, FRACTIONS)
    monkeypatch.setattr("analysis.schedule.BATCH", 60)
    assert gains(score, change, cluster, weights, FRACTIONS) == pytest.approx(whole)


def schedule(n=24, seed=4, fractions=(0.25, 0.5), **over):
    rng = np.random.default_rng(seed)
    frame = pd.DataFrame(
        {"model": "m", "ctx_tokens": 512, "budget": 0.25, "task": "t", "document": np.arange(n) % 12, "cert_steps": 3,
         "cert_flagged": False, "certificate": rng.random(n), "logprob": -rng.random(n),
         "official": rng.random(n), "official_after": rng.random(n)}
    ).assign(**over)  # fmt: skip
    return Schedule(Records(Cells("s", frame, "document"), 0, "pairs"), fractions, (300, 1)), frame


def test_choices_are_what_they_are_called() -> None:
    plan, frame = schedule()
    change = (frame["official_after"] - frame["official"]).to_numpy()
    n, k = 24, 6
    top = {
        "certificate": np.argsort(-frame["certificate"])[:k], "confidence": np.argsort(frame["logprob"])[:k],
        "oracle": np.argsort(-change)[:k],
    }  # fmt: skip
    for name, chosen in top.items():
        assert plan.gain(name, 0.25).value == pytest.approx(change[chosen].sum() / n)
    assert plan.gain("random", 0.25).value == pytest.approx(0.25 * change.mean())
    assert plan.gain("random", 0.5).value == pytest.approx(0.5 * change.mean())
    gap = plan.difference("certificate", "random", 0.25)
    assert gap.value == pytest.approx(plan.gain("certificate", 0.25).value - plan.gain("random", 0.25).value)
    low, high = gap.at(0.95)
    assert low < gap.value < high


def test_no_choice_of_that_size_beats_the_oracle() -> None:
    plan, frame = schedule(n=12, fractions=(0.25,))
    change = (frame["official_after"] - frame["official"]).to_numpy()
    best = max(change[list(some)].sum() for some in combinations(range(12), 3))
    assert plan.gain("oracle", 0.25).value == pytest.approx(best / 12)


def test_requests_are_ranked_within_model_and_budget_and_gains_averaged() -> None:
    """A group whose certificates are all larger takes no other group's places."""
    budget = np.repeat([0.1, 0.5], 12)
    plan, frame = schedule(budget=budget)
    frame = frame.assign(certificate=frame["certificate"] + 10 * (budget == 0.1))
    plan = Schedule(Records(Cells("s", frame, "document"), 0, "pairs"), (0.25,), (300, 1))
    parts = []
    for _, own in frame.groupby("budget"):
        chosen = own.sort_values("certificate", ascending=False).head(3)
        parts.append((chosen["official_after"] - chosen["official"]).sum() / 12)
    assert plan.gain("certificate", 0.25).value == pytest.approx(np.mean(parts))
    models = Schedule(
        Records(Cells("s", frame.assign(model=budget.astype(str), budget=0.1), "document"), 0, "pairs"), (0.25,), (9, 1)
    )
    assert models.gain("certificate", 0.25).value == pytest.approx(np.mean(parts))


def test_without_a_certificate_last_and_flagged_first() -> None:
    change = np.zeros(24)
    change[[0, 1]] = 1.0
    steps, flagged = np.full(24, 3), np.zeros(24, bool)
    flagged[0], steps[1] = True, 0
    plan, _ = schedule(
        official=0.0, official_after=change, cert_steps=steps, cert_flagged=flagged, fractions=(1 / 24, 23 / 24)
    )
    assert plan.gain("certificate", 1 / 24).value == pytest.approx(1 / 24)
    assert plan.gain("certificate", 23 / 24).value == pytest.approx(1 / 24)
    beside = plan.beside(1 / 24)
    assert (beside["ranked_last"], beside["flagged"]) == (1, 1)


def test_a_curve_passes_through_the_gains_and_ends_at_the_mean_change() -> None:
    plan, frame = schedule()
    beside = plan.beside(0.25)
    for name in SIGNALS:
        curve = dict(zip(beside["curve"]["share"], beside["curve"][name], strict=True))
        assert curve[0.25] == pytest.approx(beside["gain"][name].value)
        assert curve[0.0] == 0 and curve[1.0] == pytest.approx((frame["official_after"] - frame["official"]).mean())


def test_a_resample_without_anything_of_a_group_counts_for_nothing() -> None:
    found = gains(np.array([1.0, 2]), np.array([1.0, 0]), np.array([0, 0]), np.array([[0.0, 2], [1, 1]]), FRACTIONS)
    assert np.isnan(found[0]).all() and np.isfinite(found[1]).all()


def test_ranks_are_taken_anew_in_every_resample() -> None:
    """The highest certificate is document 0's alone; without it the next one takes its place at the same count."""
    score, change = np.array([3.0, 2, 1, 0]), np.array([0.0, 1, 0, 0])
    weights = np.array([[1.0, 1, 1, 1], [0, 4 / 3, 4 / 3, 4 / 3]])
    found = gains(score, change, np.arange(4), weights, np.array([0.25]))
    assert found[:, 0] == pytest.approx([0, 0.25])


def test_ten_thousand_resamples_take_seconds() -> None:
    rng = np.random.default_rng(5)
    weights = resample([0] * 200, 10_000, 1).weights
    cluster = np.arange(800) % 200
    import time

    began = time.process_time()
    gains(rng.normal(size=800), rng.normal(size=800), cluster, weights, FRACTIONS)
    assert time.process_time() - began < 5
