"""The verdict engine: strata and rules in, one of four outcomes out, exactly as CLAIMS.md says; frozen with LOCK.

SUPPORTED       every support rule holds in every stratum (95 % intervals: intersection-union)
KILLED          any kill rule holds in any stratum (intervals at level 1 - 0.05 / strata)
INCONCLUSIVE    neither
NOT_EVALUATED   cells or a stratum missing, too many failed, too few clusters, too few of a class, a measure undefined
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from analysis.intervals import Interval
from runs.registry import Claim, Rule, Rules

SUPPORTED, KILLED, INCONCLUSIVE, NOT_EVALUATED = "SUPPORTED", "KILLED", "INCONCLUSIVE", "NOT_EVALUATED"


@dataclass(frozen=True)
class Stratum:
    """One stratum of a claim: its measures, cells n, clusters, how many of each class, and what forbids a verdict.

    classes: where the claim has a min_class, cells by class name. obstacles: reasons in words, from the estimand.
    """

    name: str
    measures: Mapping[str, Interval]
    n: int
    clusters: int
    classes: Mapping[str, int] = field(default_factory=dict)
    obstacles: tuple[str, ...] = ()


@dataclass(frozen=True)
class Tally:
    """How complete the rows are: planned, missing and failed ones of what `of` names (cells, pairs)."""

    planned: int
    missing: int
    failed: int
    of: str = "cells"


@dataclass(frozen=True)
class Verdict:
    """The outcome, and why: what is missing, which kill rule holds, or which support rule does not."""

    outcome: str
    reasons: tuple[str, ...]


def kill_level(rules: Rules, strata: Sequence[Stratum]) -> float:
    """Level of the intervals that the kill rules read: 1 - kill_error / strata."""
    return 1 - rules.kill_error / max(len(strata), 1)


def decide(
    claim: Claim, rules: Rules, strata: Sequence[Stratum], tally: Tally, obstacles: Sequence[str] = ()
) -> Verdict:
    """Judge a claim from its strata; obstacles: what else forbids a verdict. No claim's rules allow both a kill and a
    support, which claims.yaml is checked for when it is read.
    """
    lacks = [*obstacles, *_incomplete(rules, tally), *(text for stratum in strata for text in _short(claim, stratum))]
    if lacks or not strata:
        return Verdict(NOT_EVALUATED, tuple(lacks or ["no stratum"]))
    kills = [_said(s, rule, kill_level(rules, strata)) for s in strata for rule in claim.killed_if
             if _holds(s, rule, kill_level(rules, strata))]  # fmt: skip
    if kills:
        return Verdict(KILLED, tuple(kills))
    lacking = [_said(s, rule, rules.level) for s in strata for rule in claim.supported_if
               if not _holds(s, rule, rules.level)]  # fmt: skip
    return Verdict(INCONCLUSIVE if lacking else SUPPORTED, tuple(lacking))


def _holds(stratum: Stratum, rule: Rule, level: float) -> bool:
    return rule.holds(_read(stratum, rule, level))


def _read(stratum: Stratum, rule: Rule, level: float) -> float:
    interval = stratum.measures[rule.measure]
    low, high = interval.at(level)
    bounds = {"low": low, "estimate": math.nan if interval.value is None else interval.value, "high": high}
    return bounds[rule.bound]


def _said(stratum: Stratum, rule: Rule, level: float) -> str:
    at = "" if rule.bound == "estimate" else f" at level {level:.4g}"
    return f"{stratum.name}: {rule.bound}({rule.measure}) is {_read(stratum, rule, level):.4g}{at}; the rule: {rule}"


def _incomplete(rules: Rules, tally: Tally) -> list[str]:
    found = []
    if tally.missing:
        found.append(f"{tally.missing:,} of {tally.planned:,} {tally.of} missing")
    if tally.failed > rules.max_failed_share * tally.planned:
        share = f"{tally.failed / tally.planned:.1%}, at most {rules.max_failed_share:.0%}"
        found.append(f"{tally.failed:,} of {tally.planned:,} {tally.of} failed ({share})")
    return found


def _short(claim: Claim, stratum: Stratum) -> list[str]:
    found = list(stratum.obstacles)
    if not stratum.n:
        found.append("no rows")
    elif stratum.clusters < claim.min_clusters:
        lack = claim.min_clusters - stratum.clusters
        found.append(f"{stratum.clusters} {claim.cluster}s of at least {claim.min_clusters}, {lack} short")
    if claim.min_class is not None and not stratum.classes:
        found.append("its classes were not counted")
    for name, count in stratum.classes.items():
        if claim.min_class is not None and count < claim.min_class:
            found.append(f"{count} {name} of at least {claim.min_class}, {claim.min_class - count} short")
    if stratum.n:
        found += _undefined(claim, stratum)
    return [f"{stratum.name}: {text}" for text in found]


def _undefined(claim: Claim, stratum: Stratum) -> list[str]:
    found = []
    for name in dict.fromkeys(rule.measure for rule in (*claim.supported_if, *claim.killed_if)):
        interval = stratum.measures.get(name)
        if interval is None or interval.value is None:
            found.append(f"{name} is undefined: {interval.reason if interval else 'not measured'}")
        elif stratum.clusters > 1 and any(map(math.isnan, interval.at(0.5))):
            found.append(f"{name} has no interval")
    return found
