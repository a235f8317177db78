"""The engine on planted strata: four outcomes, every reason, disjointness, and its errors at the null."""

from dataclasses import replace

import numpy as np
import pytest
from scipy import stats

from analysis.intervals import Interval, proportion, resample
from analysis.verdict import (
    INCONCLUSIVE,
    KILLED,
    NOT_EVALUATED,
    SUPPORTED,
    Stratum,
    Tally,
    decide,
    kill_level,
)
from runs.prereg import IDS, load

REGISTRY = load()
COVERAGE, ATTRIBUTION = REGISTRY.claim("claim-1"), REGISTRY.claim("claim-7")
RULES = REGISTRY.rules
WHOLE = Tally(12_096, 0, 0)


def interval(value, low, high, wider=0.0):
    """An interval that is `wider` on each side at every level above 95 %."""
    return Interval(value, lambda level: (low - wider, high + wider) if level > 0.951 else (low, high))


def strata(*bounds, **over):
    fields = {"n": 4032, "clusters": 56} | over
    return [Stratum(f"stratum {k}", {"coverage": interval(*b)}, **fields) for k, b in enumerate(bounds)]


def outcome(found, claim=COVERAGE, tally=WHOLE, obstacles=()):
    return decide(claim, RULES, found, tally, obstacles).outcome


GOOD, UNSURE, BAD = (0.97, 0.96, 0.98), (0.95, 0.94, 0.96), (0.93, 0.92, 0.94)


def test_support_needs_every_stratum_and_a_kill_one() -> None:
    assert outcome(strata(GOOD, GOOD, GOOD)) == SUPPORTED
    assert outcome(strata(GOOD, GOOD, (0.96, 0.95, 0.97))) == SUPPORTED  # low >= 0.95 holds at 0.95
    assert outcome(strata(GOOD, UNSURE, GOOD)) == INCONCLUSIVE
    assert outcome(strata(GOOD, BAD, GOOD)) == KILLED
    assert outcome(strata(UNSURE, UNSURE, BAD)) == KILLED


def test_a_kill_reads_the_wider_interval() -> None:
    assert kill_level(RULES, strata(GOOD, GOOD, GOOD)) == pytest.approx(1 - 0.05 / 3)
    assert kill_level(RULES, strata(GOOD)) == pytest.approx(0.95)
    barely = (0.93, 0.92, 0.945, 0.01)
    assert outcome(strata(barely)) == KILLED
    assert outcome(strata(barely, GOOD, GOOD)) == INCONCLUSIVE


def test_reasons_name_stratum_rule_and_numbers() -> None:
    killed = decide(COVERAGE, RULES, strata(GOOD, BAD), WHOLE)
    assert killed.reasons == ("stratum 1: high(coverage) is 0.94 at level 0.975; the rule: high(coverage) < 0.95",)
    open_ = decide(COVERAGE, RULES, strata(GOOD, UNSURE), WHOLE)
    assert open_.reasons == ("stratum 1: low(coverage) is 0.94 at level 0.95; the rule: low(coverage) >= 0.95",)
    assert decide(COVERAGE, RULES, strata(GOOD), WHOLE).reasons == ()


def test_what_is_missing_is_said_with_by_how_much() -> None:
    def reasons(found, claim=COVERAGE, tally=WHOLE, obstacles=()):
        verdict = decide(claim, RULES, found, tally, obstacles)
        assert verdict.outcome == NOT_EVALUATED
        return verdict.reasons

    good = strata(GOOD)
    assert reasons(good, tally=Tally(12_096, 216, 0)) == ("216 of 12,096 cells missing",)
    assert reasons(good, tally=Tally(1000, 0, 11, "pairs")) == ("11 of 1,000 pairs failed (1.1%, at most 1%)",)
    assert outcome(good, tally=Tally(1000, 0, 10)) == SUPPORTED
    assert reasons(strata(GOOD, clusters=17)) == ("stratum 0: 17 documents of at least 20, 3 short",)
    assert reasons(strata(GOOD, n=0)) == ("stratum 0: no rows",)
    assert reasons([]) == ("no stratum",)
    assert reasons(good, obstacles=["random weights"]) == ("random weights",)
    assert reasons(strata(GOOD, obstacles=("97 % recomputed",))) == ("stratum 0: 97 % recomputed",)
    undefined = [replace(good[0], measures={"coverage": Interval.undefined("no radius")}), *strata(BAD)]
    assert reasons(undefined) == ("stratum 0: coverage is undefined: no radius",)
    assert reasons([replace(good[0], measures={})]) == ("stratum 0: coverage is undefined: not measured",)
    nan = Interval(0.9, lambda _: (float("nan"), float("nan")))
    assert reasons([replace(good[0], measures={"coverage": nan})]) == ("stratum 0: coverage has no interval",)


def test_a_short_class_forbids_a_verdict() -> None:
    measures = {"auc": interval(0.7, 0.65, 0.75), "auc_difference": interval(0.2, 0.1, 0.3)}
    stratum = Stratum("512 tokens", measures, 240, 40, {"induced": 30, "inherent": 45})
    assert outcome([stratum], ATTRIBUTION) == SUPPORTED
    short = decide(ATTRIBUTION, RULES, [replace(stratum, classes={"induced": 29, "inherent": 45})], WHOLE)
    assert short.reasons == ("512 tokens: 29 induced of at least 30, 1 short",)
    assert outcome([replace(stratum, classes={})], ATTRIBUTION) == NOT_EVALUATED


def test_any_of_two_kill_rules_and_all_of_two_support_rules() -> None:
    def judge(auc, difference):
        measures = {"auc": interval(*auc), "auc_difference": interval(*difference)}
        return outcome([Stratum("s", measures, 240, 40, {"a": 50, "b": 50})], ATTRIBUTION)

    assert judge((0.7, 0.65, 0.75), (0.1, -0.1, 0.3)) == INCONCLUSIVE
    assert judge((0.7, 0.65, 0.75), (-0.2, -0.3, -0.1)) == KILLED
    assert judge((0.5, 0.45, 0.55), (0.2, 0.1, 0.3)) == KILLED


@pytest.mark.parametrize("claim_id", IDS)
def test_no_rows_whatever_give_a_claim_both_verdicts(claim_id: str) -> None:
    """2,000 random intervals per measure near its thresholds, the kill level's around the support level's."""
    claim, rng, seen = REGISTRY.claim(claim_id), np.random.default_rng(1), set()
    rules = (*claim.supported_if, *claim.killed_if)
    for _ in range(2000):
        measures = {}
        for name in {rule.measure for rule in rules}:
            value = rng.choice([rule.value for rule in rules if rule.measure == name]) + rng.choice(
                [-0.2, -0.01, 0, 0.01, 0.2]
            )
            low, high = value - rng.choice([0, 0.005, 0.3]), value + rng.choice([0, 0.005, 0.3])
            measures[name] = interval(value, low, high, rng.choice([0, 0.1]))
        found = [Stratum("s", measures, 100, 50, {"a": 40, "b": 40})]
        supported = all(r.holds(value_of(measures[r.measure], r.bound, 0.95)) for r in claim.supported_if)
        killed = any(r.holds(value_of(measures[r.measure], r.bound, 0.99)) for r in claim.killed_if)
        assert not (supported and killed)
        seen.add(decide(claim, RULES, found, WHOLE).outcome)
    assert seen >= {SUPPORTED, KILLED}


def value_of(of, bound, level):
    return dict(zip(("low", "estimate", "high"), (of.at(level)[0], of.value, of.at(level)[1]), strict=True))[bound]


def test_bounds_never_cross_the_estimate() -> None:
    assert Interval(0.5, lambda _: (0.6, 0.7)).at(0.95) == (0.5, 0.7)
    assert Interval(0.5, lambda _: (0.3, 0.4)).at(0.95) == (0.3, 0.5)


# ---------------------------------------------------------------- errors at the null


@pytest.mark.parametrize("concentration", [None, 50])
def test_at_the_null_both_errors_are_at_most_a_fortieth(concentration: int | None) -> None:
    """Coverage exactly 0.95, 28 documents of 72 cells, 500 studies: one stratum, and three as registered.

    concentration: of the beta distribution of a document's own coverage (None: all documents alike).
    """
    studies, limit = 500, int(stats.binom.ppf(0.999, 500, 0.025))
    counts = {1: {}, 3: {}}
    for study in range(studies):
        rng = np.random.default_rng([2, study])
        p = 0.95 if concentration is None else rng.beta(0.95 * concentration, 0.05 * concentration, (3, 28))
        hits = rng.binomial(72, p, (3, 28)).astype(float)
        boot = resample([0] * 28, 300, study)
        found = [
            Stratum(f"{k}", {"coverage": proportion(h, np.full(28, 72.0), 336, boot)}, 2016, 28)
            for k, h in enumerate(hits)
        ]
        for k, count in counts.items():
            said = outcome(found[:k])
            count[said] = count.get(said, 0) + 1
    for count in counts.values():
        assert count.get(SUPPORTED, 0) <= limit and count.get(KILLED, 0) <= limit, counts
    assert counts[1].get(SUPPORTED, 0) + counts[1].get(KILLED, 0) >= 5, "an engine that never errs decides nothing"
